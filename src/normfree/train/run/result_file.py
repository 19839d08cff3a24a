"""Read result.json of a run, which may be damaged or forged; and judge whether a score is no better than a guess."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args

from normfree.checksums import has_kinds, read_sealed_json

RESULT = "result.json"  # in the folder of the run
RunStatus = Literal["finished", "interrupted", "diverged"]
# The kinds of the values that are read from a result, which may be forged; a number may be "nan".
_KINDS: dict[str, Any] = {"status": str, "seconds": int | float | str, "config": dict, "files": dict}
_SCORE_KINDS: dict[str, Any] = dict.fromkeys(("loss", "accuracy", "score"), int | float | str)
_GUESS = 0.995  # a loss above this share of a random guess's is a guess; a network that learns is soon below it


def read_result(path: Path) -> dict[str, Any]:
    """Return the content of a result.json.

    Raises:
        ValueError: If there is no result, or the file is damaged.
    """
    if not path.exists():
        raise ValueError(f"expected a result at '{path}', found none; finish the run with --resume")
    result = read_sealed_json(path, "the result of a run", "delete it")
    scores = [result[name] for name in ("validation", "test", "bleu") if result.get(name) is not None]
    whole = has_kinds(result, _KINDS) and all(has_kinds(score, _SCORE_KINDS) for score in scores)
    if result.get("status") not in get_args(RunStatus) or not whole:
        raise ValueError(f"expected a result with a status, but '{path}' is damaged; delete it")
    return result


def is_guess(loss: float, accuracy: float, classes: int, unit: str) -> bool:
    """Whether a score is no better than a guess: by its loss, and for images by its accuracy too.

    The accuracy on tokens says little: a model that always predicts the most frequent token is often right.
    """
    by_chance = min(2 / classes, 0.1 + 0.9 / classes)  # of two classes 55 %, of ten 19 %
    return loss > _GUESS * math.log(classes) and (unit == "tokens" or accuracy <= by_chance)
