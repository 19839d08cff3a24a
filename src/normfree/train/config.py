"""What a training run is: one frozen value that says everything, checked when it is made, kept as TOML."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from normfree.train.settings import checked, hints, parsed, require_known, toml

if TYPE_CHECKING:  # these load torch, which a command line that only reads a configuration can do without
    from normfree.data.images.augment import Augmentation
    from normfree.optim.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    >>> TrainConfig(epochs=5).with_changes(lr=0.2).lr
    0.2

    Raises `ValueError` for a value that is of the wrong type or out of range; names of models, methods and data are
    looked up when they are used.
    """

    # What is trained
    model: str = "resnet20"  # the model's name, see `normfree models`
    method: str = "fixup"  # the method's name and options, see `normfree methods`; 'as built' converts nothing
    form: Literal["post", "pre", "linear"] | None = None  # the block form; none for the method's or model's own
    dropout: float = 0.0  # in Transformers: of embeddings, branches' ends and inside the feed-forward

    # On what
    data: str = "fashion14"  # the data's name, see `normfree data`
    data_dir: str = ".data"  # the folder that data is kept in
    validation: float = 0.1  # the fraction of the training data held out; 0 trains on all
    crop: int = 0  # zero padding on each side before a random crop, in pixels
    flip: bool = False  # mirror half of the images
    cutout: int = 0  # the side of the square that is cut out, in pixels; 0 for none
    mixup: float = 0.0  # α of mixup's Beta(α, α); 0 for none
    randaugment: tuple[int, int] = (0, 0)  # RandAugment's operations an image and their magnitude of 30; (0, 0) none

    # How long, and how much at a time
    epochs: int = 10  # passes over the training data
    batch_size: int = 128  # images a step, over all processes and micro-batches; of pairs, at most so many tokens
    accumulate: int = 1  # micro-batches that a step's batch is split into
    eval_batch_size: int = 1000  # images at a time in evaluation
    block: int = 128  # tokens a block of running text, of which a batch has `batch_size`
    beam: int = 5  # hypotheses of a sentence that is translated
    length_penalty: float = 1.0  # of translations; 0 favours short ones

    # Optimizer
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"  # Adam adds weight decay to the gradient, AdamW does not
    lr: float = 0.1  # the learning rate of the weights; scalars learn at the method's multiple of it
    momentum: float = 0.9  # of SGD
    nesterov: bool = False  # look ahead with the momentum, in SGD
    betas: tuple[float, float] = (0.9, 0.999)  # of Adam
    eps: float = 1e-8  # of Adam
    weight_decay: float = 5e-4  # of everything that the method decays
    label_smoothing: float = 0.0  # the share of a label that is spread over all classes
    clip: Literal["none", "agc", "norm"] = "none"  # clip gradients unit by unit (AGC) or by their norm
    clip_at: float = 0.01  # the largest ratio of norms (AGC) or the largest norm
    ema: float = 0.0  # the decay of the moving average of the weights that is evaluated; 0 for none

    # Schedule of the learning rate
    schedule: Literal["constant", "step", "cosine", "inverse_sqrt", "linear"] = "cosine"  # how it falls
    milestones: tuple[float, ...] = (0.5, 0.75)  # where a step schedule drops, as fractions of the run
    decay: float = 0.1  # what it multiplies the rate by
    cosine_by: Literal["step", "epoch"] = "step"  # how often a cosine falls
    warmup: float = 0.0  # epochs of warm-up, or steps
    warmup_in: Literal["epochs", "steps"] = "epochs"  # what `warmup` counts
    warmup_shape: Literal["linear", "quadratic"] = "linear"  # in the step

    # Arithmetic and speed
    # What is left to be chosen is fast on a GPU and plain on a CPU; see `resolved`.
    precision: Literal["auto", "float32", "bf16", "mixed"] = "auto"  # bf16: all weight layers; mixed: branches only
    channels_last: bool | None = None  # keep images and weights with their channels last
    compile: bool | None = None  # compile the blocks
    graph: bool | None = None  # capture a step in one CUDA graph
    region: int = 1  # blocks a compiled region
    recompute: int = 0  # blocks a segment that is computed again in the backward pass; 0 keeps all activations

    # The run
    seed: int = 0  # of the initial weights, the order of the data and the augmentation
    loss_limit: float = 1e4  # a loss above it counts as diverged
    device: str = "auto"  # a torch device; auto takes a GPU where there is one
    checkpoint_minutes: float = 10.0  # minutes between checkpoints; 0 for none by the clock
    checkpoint_epochs: int = 1  # epochs between checkpoints, more if they are large; 0 for none by the epoch
    workers: int = 4  # processes that read an image folder, at most one a core
    tensorboard: bool = False  # write a TensorBoard log beside the metrics

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            object.__setattr__(self, name, checked(name, hint, getattr(self, name)))
        for expected, holds, names in _RANGES:
            for name in names:
                if not holds(getattr(self, name)):
                    raise ValueError(f"expected '{name}' {expected}, got {getattr(self, name)!r}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"expected 'betas' at least 0 and below 1, got {list(self.betas)}")
        if self.randaugment[0] < 0 or not 0 <= self.randaugment[1] <= 30:
            raise ValueError(
                f"expected 'randaugment' as at least 0 operations and a magnitude of 0 to 30, "
                f"got {list(self.randaugment)}"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"expected 'accumulate' to divide the batch size of {self.batch_size}, got {self.accumulate}; "
                "micro-batches are equal parts of a batch"
            )
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError(
                f"expected optimizer 'sgd' with a momentum above 0 for 'nesterov', got '{self.optimizer}' and "
                f"{self.momentum:g}"
            )
        if not all(0 <= m <= 1 for m in self.milestones) or list(self.milestones) != sorted(self.milestones):
            raise ValueError(
                f"expected 'milestones' as rising fractions of the run between 0 and 1, got {list(self.milestones)}; "
                "divide epochs by the number of epochs"
            )

    def with_changes(self, **changes: Any) -> TrainConfig:
        """The same run but for some fields. Raises `ValueError` for an unknown field, with the closest known one."""
        for name in changes:
            require_known(name, hints(TrainConfig))
        return replace(self, **changes)

    def resolved(self, *, cuda: bool, branches: int = 0, world: int = 1) -> TrainConfig:
        """The same run with everything chosen that was left open, for a network of `branches` residual branches.

        Thousands of small additions lose their low bits in a bf16 residual stream, so a deep network keeps it in
        float32. Several processes reduce their gradients between backward pass and update, outside of any graph.
        """
        precision = ("mixed" if branches >= _DEEP else "bf16") if cuda else "float32"
        return self.with_changes(
            precision=precision if self.precision == "auto" else self.precision,
            channels_last=cuda if self.channels_last is None else self.channels_last,
            compile=cuda if self.compile is None else self.compile,
            graph=(cuda if self.graph is None else self.graph) and world == 1,
        )

    @staticmethod
    def parse_changes(texts: Iterable[str]) -> dict[str, Any]:
        """Read changes from a command line, for `with_changes`.

        >>> TrainConfig.parse_changes(["lr=0.2", "method=fixup:scalar_lr=1/L", "milestones=[0.5,0.75]"])
        {'lr': 0.2, 'method': 'fixup:scalar_lr=1/L', 'milestones': (0.5, 0.75)}

        Raises `ValueError` for a text that is no change, an unknown or repeated field, and a value of the wrong type.
        """
        return parsed(TrainConfig, texts)

    @classmethod
    def from_toml(cls, path: str | Path, base: TrainConfig | None = None) -> TrainConfig:
        """Read the fields that a TOML file gives; the others are those of `base`, or the defaults.

        Raises `ValueError` for text that is no TOML, an unknown field or a bad value, and `OSError` where the file
        cannot be read.
        """
        try:
            with Path(path).open("rb") as file:
                values = tomllib.load(file)
        except FileNotFoundError:
            raise FileNotFoundError(f"expected a file of settings at '{path}', found none; check the name") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"expected TOML in '{path}', got text that is none ({error}); correct it there") from None
        for name in values:
            require_known(name, hints(cls), where=f" in '{path}'")
        try:
            return replace(base or cls(), **values)
        except ValueError as error:
            raise ValueError(f"{error}; correct it in '{path}'") from None

    def to_toml(self, *, explained: bool = False) -> str:
        """All fields as TOML that `from_toml` reads back equal; None is left out.

        `explained` puts beside each what it means, as it stands above in this file, and names those left out.
        """
        lines = toml(asdict(self))
        if not explained:
            return lines
        given = {line.partition(" ")[0]: line for line in lines.splitlines()}
        meanings = re.findall(r"^    (\w+): (?:Literal\[(.*?)\])?.*?  # (.+)$", inspect.getsource(type(self)), re.M)
        return "".join(
            f"{given.get(name, f'# {name} = …'):32}  # {choices}{': ' if choices else ''}{what}\n"
            for name, choices, what in meanings
        )

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change with everything that can change the numbers of a run.

        Left out are where data lies, how often state is saved, how many processes read it and what is logged, which
        change no number, and the device: 'auto' does not say which it was, a run may be continued on another machine,
        and the result names the hardware. What changes only the rounding (compile, graph, channels_last, …) counts,
        because a run that is continued must go on bit for bit. A setting at its default does not count, so that one
        that is added later changes no run that was made before.
        """
        counted = {name: value for name, value in asdict(self).items() if name not in FREE and value != _DEFAULTS[name]}
        return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def lr_schedule(self) -> Schedule:
        """The schedule of the learning rate."""
        from normfree.optim.schedules import Schedule

        return Schedule(
            kind=self.schedule,
            milestones=self.milestones,
            decay=self.decay,
            by=self.cosine_by,
            warmup=self.warmup,
            warmup_in=self.warmup_in,
            warmup_shape=self.warmup_shape,
        )

    def augmentation(self) -> Augmentation:
        """What is done to a training image."""
        from normfree.data.images.augment import Augmentation

        return Augmentation(
            crop=self.crop,
            flip=self.flip,
            cutout=self.cutout,
            mixup=self.mixup,
            randaugment=self.randaugment if self.randaugment[0] else None,
        )


_DEEP = 400  # residual branches
# What changes no number of a run, so that it may differ when one is resumed; `fingerprint` says why.
FREE = {"data_dir", "device", "checkpoint_minutes", "checkpoint_epochs", "workers", "tensorboard"}

_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("not to be empty", bool, ("model", "method", "data", "data_dir", "device")),
    ("above 0", lambda x: x > 0, ("lr", "eps", "clip_at", "loss_limit")),
    ("above 0 and at most 1", lambda x: 0 < x <= 1, ("decay",)),
    ("at least 0 and below 1", lambda x: 0 <= x < 1, ("validation", "momentum", "label_smoothing", "ema", "dropout")),
    ("at least 1", lambda x: x >= 1, ("batch_size", "accumulate", "eval_batch_size", "region", "block", "beam")),
    ("at least 0", lambda x: x >= 0, ("epochs", "crop", "cutout", "mixup", "weight_decay", "warmup")),
    ("at least 0", lambda x: x >= 0, ("recompute", "checkpoint_minutes", "checkpoint_epochs", "workers")),
    ("at least 0 and below 2^63", lambda x: 0 <= x < 2**63, ("seed",)),
)

_DEFAULTS = asdict(TrainConfig())
