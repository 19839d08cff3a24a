"""The faults of `make faults`: each row of its tables is one of these."""

from typing import NamedTuple

NAMES = ["training", "resuming", "converting", "saving over an earlier model", "preparing data", "comparing"]
RANKED = ["training in two ranks", "saving shards in two ranks"]
POWER = ("power loss", "power loss after a commit")
GROWING = ("create", "write", "pwrite", "writev", "mkdir", "link", "symlink", "copy")
HANDS = ("second writer", "folder moved")


class Kind(NamedTuple):
    """A kind of fault, and the calls at which it happens."""

    fault: str
    calls: str = "changes"
    who: str = ""
    only: tuple[str, ...] = ()  # what the calls do, if not all count
    thread: bool = False  # only calls of other threads than the main one


KINDS = {
    "killed": Kind("killed"),
    "killed in a write": Kind("killed in a write", only=("write",)),
    "input/output error": Kind("input/output error"),
    "disk full": Kind("disk full", only=GROWING),
    "error on reading": Kind("input/output error", "reads"),
    "killed a moment after a write of a thread": Kind("killed later", thread=True),
    "stopped": Kind("stopped"),
    "worker killed": Kind("killed", who="spawn"),
    "worker killed in reading": Kind("killed", "reads", "fork"),
    "first rank killed": Kind("killed", who="0"),
    "first rank killed at a message": Kind("killed", "messages", "0"),
    "second rank killed": Kind("killed", who="1"),
    "second rank killed at a message": Kind("killed", "messages", "1"),
    "input/output error of the first rank": Kind("input/output error", who="0"),
    "input/output error of the second rank": Kind("input/output error", who="1"),
    "disk full of the first rank": Kind("disk full", who="0", only=GROWING),
    "disk full of the second rank": Kind("disk full", who="1", only=GROWING),
}
DISTURBED = [
    *((name, kind) for name in NAMES for kind in list(KINDS)[:4]),
    ("resuming", "error on reading"),
    ("comparing", "error on reading"),
    ("saving while training", "killed a moment after a write of a thread"),
    ("saving while training", "input/output error"),
    ("saving while training", "disk full"),
    ("training on images of two workers", "worker killed in reading"),
    ("comparing in two workers", "worker killed"),
    *((RANKED[0], kind) for kind in KINDS if kind.startswith("first rank") or kind.endswith("k killed at a message")),
    *((RANKED[1], kind) for kind in KINDS if "rank" in kind),
]
FLIPPED = [
    "configuration (config.toml)", "metrics (metrics.jsonl)", "result (result.json)",
    "state of a checkpoint (state.json)", "weights of a checkpoint", "plan of a conversion (plan.json)",
    "weights of a conversion", "example of a conversion", "stored claim", "prepared text (prepared.json)",
    "tokens of prepared text", "image of a run", "index of a sharded checkpoint (state.json)", "shard of a checkpoint",
    "archive of a data set", "file of a data set", "vocabulary of prepared text", "checksums of images",
    "comparison (comparison.json)",
]  # fmt: skip
IMAGE_FORMATS = ("png", "jpeg", "bmp", "webp", "tiff", "ppm")
DAMAGED = [
    "tar archive", "tar archive (gz)", "tar archive (xz)", "zip archive in place of a tar", "gz file", "idx",
    "idx (gz)", "pickled batch", "binary batch", "MATLAB file", "text (gz)", "text (xz)",
    *(f"image ({form})" for form in IMAGE_FORMATS),
]  # fmt: skip
ROWS: dict[str, list[tuple[str, ...]]] = {
    "processes": [*DISTURBED, *((name, kind) for kind in (*POWER, *HANDS) for name in NAMES)],
    "files": [(kind,) for kind in FLIPPED],
    "data": [(kind,) for kind in DAMAGED],
}
"""The names of the rows of each table, in order."""
