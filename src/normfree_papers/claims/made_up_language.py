"""The made-up language that is translated at the quick scale."""

from __future__ import annotations

import random
from pathlib import Path

from filelock import FileLock

from normfree.data.text.prepared_folder import prepare_pairs
from normfree.storage.writing import write_text

_WORDS, _LONGEST = 16, 6


def made_up_language(folder: Path) -> str:
    """Prepare sentences of made-up words, to be translated into their reversal, and return the name of the data.

    Of several processes that prepare the same folder, one does, and the others wait for it.
    """
    draws, files = random.Random(0), {}
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        for split, count in (("train", 2000), ("valid", 100), ("test", 100)):
            lines = [[f"w{draws.randrange(_WORDS)}" for _ in range(draws.randint(2, _LONGEST))] for _ in range(count)]
            files[split] = (folder / f"{split}.words", folder / f"{split}.backwards")
            for path, step in zip(files[split], (1, -1), strict=True):
                write_text(path, "".join(" ".join(line[::step]) + "\n" for line in lines))
        prepare_pairs(folder / "prepared", files, size=_WORDS + 6)
    return f"pairs:{folder / 'prepared'}"
