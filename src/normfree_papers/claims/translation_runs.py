"""The made-up language that is translated at the quick scale."""

from __future__ import annotations

import random
from pathlib import Path

from normfree.data.text.prepared_folder import prepare_pairs

_WORDS, _LONGEST = 16, 6


def made_up_language(folder: Path) -> str:
    """Prepare sentences of made-up words, to be translated into their reversal, and return the name of the data."""
    draws, files = random.Random(0), {}
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 2000), ("valid", 100), ("test", 100)):
        lines = [[f"w{draws.randrange(_WORDS)}" for _ in range(draws.randint(2, _LONGEST))] for _ in range(count)]
        files[split] = (folder / f"{split}.words", folder / f"{split}.backwards")
        for path, step in zip(files[split], (1, -1), strict=True):
            path.write_text("".join(" ".join(line[::step]) + "\n" for line in lines), encoding="utf-8")
    prepare_pairs(folder / "prepared", files, size=_WORDS + 6)
    return f"pairs:{folder / 'prepared'}"
