"""`TrainConfig`: all settings of a training run, checked when it is made, and stored as TOML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from normfree.report.tables import notebook_html
from normfree.storage.provenance import RELEASE
from normfree.storage.writing import plain_name
from normfree.train.setting_fields import (
    coerce,
    explained_toml,
    field_types,
    parse_changes,
    parse_toml,
    read_toml,
    require_fields,
    require_in_range,
    require_known,
    setting,
    to_toml,
)

if TYPE_CHECKING:  # it loads torch; a command that only reads a configuration must not wait for it
    from normfree.optim.learning_rates import Schedule


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainConfig:
    """All settings of a training run.

    Every setting has a default, and is checked when the configuration is made. The names of models, methods and data
    are looked up when they are used. `print(TrainConfig().to_toml(explained=True))` lists every setting and its
    meaning; so does `normfree train --show`.

    >>> TrainConfig(epochs=5).with_changes(lr=0.2).lr
    0.2

    Raises:
        ValueError: If a value has the wrong type or is out of range.
    """

    # Model
    model: str = setting("resnet20", "the model's name, see `normfree models`", "not to be empty")
    method: str = setting(
        "fixup",
        "the method's name and options, see `normfree methods`; 'as built' trains a third-party model unconverted",
        "not to be empty",
    )
    form: Literal["post", "pre", "linear"] | None = setting(
        None, "activation after the sum (post), at the branch's entry (pre) or nowhere (linear); none: the model's own"
    )
    dropout: float = setting(
        0.0, "dropout in Transformers: of embeddings, branch outputs and feed-forward layers", "at least 0 and below 1"
    )
    inner_dropout: float | None = setting(
        None, "dropout between the layers of a feed-forward branch; none: as `dropout`", "at least 0 and below 1"
    )

    # Data
    data: str = setting("fashion14", "the data's name, see `normfree data list`", "not to be empty")
    data_dir: str = setting(".data", "the folder of the data sets", "not to be empty")
    validation: float = setting(
        0.1, "the fraction of the training images held out; 0 trains on all", "at least 0 and below 1"
    )
    crop: int = setting(0, "zero padding on each side before a random crop, in pixels", "at least 0")
    flip: bool = setting(False, "mirror half of the images")
    cutout: int = setting(0, "the side of the square that is cut out, in pixels; 0 for none", "at least 0")
    mixup: float = setting(0.0, "α of mixup's Beta(α, α); 0 for none", "at least 0")
    randaugment: tuple[int, int] = setting(
        (0, 0),
        "RandAugment's operations per image and their magnitude, 0 to 30; (0, 0) for none",
        "as at least 0 operations and a magnitude of 0 to 30",
    )

    # Length and batches
    epochs: int = setting(10, "passes over the training data", "at least 0 and at most 100 million")
    batch_size: int = setting(
        128,
        "images per step, over all processes and micro-batches; for data pairs:… the maximum number of tokens, for "
        "text:… the number of blocks",
        "at least 1",
    )
    accumulate: int = setting(1, "micro-batches that each batch is split into", "at least 1")
    eval_batch_size: int = setting(1000, "images per batch in evaluation", "at least 1")
    block: int = setting(128, "sequence length of a language model: tokens per block of the text", "at least 1")
    beam: int = setting(5, "beam size in translation", "at least 1")
    length_penalty: float = setting(1.0, "the length penalty of beam search; 0 favours short translations")

    # Optimizer
    optimizer: Literal["sgd", "adam", "adamw"] = setting(  # as in `normfree.optim`, whose import would load torch
        "sgd", "SGD, Adam (weight decay as an L2 term of the loss) or AdamW (decoupled weight decay)"
    )
    lr: float = setting(
        0.1, "the learning rate of the weights; the method sets that of scalars relative to it", "above 0"
    )
    momentum: float = setting(0.9, "momentum of SGD", "at least 0 and below 1")
    nesterov: bool = setting(False, "Nesterov momentum, in SGD")
    betas: tuple[float, float] = setting((0.9, 0.999), "betas of Adam and AdamW", "at least 0 and below 1")
    eps: float = setting(1e-8, "eps of Adam and AdamW", "above 0")
    weight_decay: float = setting(5e-4, "weight decay of every parameter that the method decays", "at least 0")
    label_smoothing: float = setting(
        0.0, "the share of a label that is spread over all classes", "at least 0 and below 1"
    )
    clip: Literal["none", "agc", "norm"] = setting("none", "clip gradients per output unit (AGC) or by their norm")
    clip_at: float = setting(0.01, "the largest ratio of gradient to weight norm (AGC), or the largest norm", "above 0")
    ema: float = setting(
        0.0,
        "the decay of the moving average of the weights, which is evaluated in their place; 0 for none",
        "at least 0 and below 1",
    )

    # Schedule of the learning rate
    schedule: Literal["constant", "step", "cosine", "inverse_sqrt", "linear"] = setting(
        "cosine", "the shape of the learning-rate schedule"
    )
    milestones: tuple[float, ...] = setting(
        (0.5, 0.75),
        "where a step schedule drops, as fractions of the run",
        "as rising fractions of the run between 0 and 1",
        remedy="divide each epoch by the total number of epochs",
    )
    decay: float = setting(0.1, "learning-rate decay of a step schedule: its factor (gamma)", "above 0 and at most 1")
    cosine_by: Literal["step", "epoch"] = setting("step", "whether a cosine schedule falls every step or every epoch")
    warmup: float = setting(0.0, "the length of the warm-up, in the unit `warmup_in`", "at least 0")
    warmup_in: Literal["epochs", "steps"] = setting("epochs", "the unit of `warmup`")
    warmup_shape: Literal["linear", "quadratic"] = setting("linear", "how the rate rises during warm-up")

    # Arithmetic and speed; `resolved` sets the open ones: fast settings on a GPU, plain ones on a CPU
    precision: Literal["auto", "float32", "bf16", "mixed"] = setting(
        "auto",
        "bf16: all weight layers in bf16; mixed: but the residual stream in float32; auto: float32 on a CPU",
    )
    channels_last: bool | None = setting(None, "keep images and weights with their channels last")
    compile: bool | None = setting(None, "compile the blocks with torch.compile")
    graph: bool | None = setting(None, "capture a step in one CUDA graph")
    kernels: Literal["auto", "stage", "compiled"] = setting(
        "auto",
        "auto: the stage kernels where they apply (docs/kernels.md); stage: an error if they apply nowhere; compiled: "
        "torch.compile alone",
    )
    region: int = setting(1, "consecutive blocks that torch.compile compiles as one program", "at least 1")
    recompute: int = setting(
        0, "activation checkpointing: compiled regions per checkpointed segment; 0 for none", "at least 0"
    )

    # The run
    seed: int = setting(
        0, "seed of the initial weights, the order of the data and the augmentation", "at least 0 and below 2^63"
    )
    loss_limit: float = setting(1e4, "a run with a loss above it has diverged", "above 0")
    device: str = setting("auto", "a torch device; auto takes a GPU if there is one", "not to be empty")
    checkpoint_minutes: float = setting(10.0, "minutes between checkpoints; 0 disables timed checkpoints", "at least 0")
    checkpoint_epochs: int = setting(
        1, "epochs between checkpoints, more if they are large; 0 saves by time only", "at least 0"
    )
    keep_last: int = setting(
        2, "newest checkpoints to keep; if one is damaged, the run continues from another", "at least 1"
    )
    keep_best: bool = setting(True, "keep the checkpoint with the best validation accuracy as well")
    workers: int = setting(4, "processes that read an image folder, at most one per core", "at least 0")
    tensorboard: bool = setting(False, "write a TensorBoard log beside the metrics")
    measure_signal: bool = setting(
        True,
        "measure the signal over depth after 0, 1, 2, 4, … epochs for page.html; only of residual networks in float32, "
        "uncompiled and in one process",
    )

    def __new__(cls, *args: Any, **given: Any) -> Self:
        require_fields(given, cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        types = field_types(type(self))
        for field in fields(self):
            value = coerce(field.name, types[field.name], getattr(self, field.name))
            require_in_range(field, value)
            object.__setattr__(self, field.name, value)
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

    def with_changes(self, **changes: Any) -> TrainConfig:
        """Return a copy with some settings changed.

        Args:
            **changes: The new values, by the names of the settings.

        Returns:
            The changed configuration.

        Raises:
            ValueError: If a setting is unknown (the message names the closest one) or a value is bad.
        """
        require_known(changes, field_types(TrainConfig))
        return replace(self, **changes)

    def resolved(self, *, cuda: bool, branches: int = 0, world: int = 1) -> TrainConfig:
        """Return a copy in which every open setting has a value: fast ones on a GPU, plain ones on a CPU.

        Thousands of small additions lose their low bits in a bf16 residual stream, so a deep network keeps its stream
        in float32. Several processes reduce their gradients between backward pass and update, outside any CUDA graph.

        Args:
            cuda: Whether the run is on a GPU.
            branches: The number of residual branches of the network.
            world: The number of processes.

        Returns:
            The configuration with a precision, and with `channels_last`, `compile` and `graph` on or off.
        """
        precision = ("mixed" if branches >= DEEP else "bf16") if cuda else "float32"
        return self.with_changes(
            precision=precision if self.precision == "auto" else self.precision,
            channels_last=cuda if self.channels_last is None else self.channels_last,
            compile=cuda if self.compile is None else self.compile,
            graph=(cuda if self.graph is None else self.graph) and world == 1,
        )

    @staticmethod
    def parse_changes(texts: Iterable[str]) -> dict[str, Any]:
        """Parse changes from a command line, for `with_changes`.

        >>> TrainConfig.parse_changes(["lr=0.2", "method=fixup:scalar_lr=1/L", "milestones=[0.5,0.75]"])
        {'lr': 0.2, 'method': 'fixup:scalar_lr=1/L', 'milestones': (0.5, 0.75)}

        Args:
            texts: Changes of the form 'name=value'.

        Returns:
            The values by name, in the types of their settings.

        Raises:
            ValueError: If a string has no '=', a setting is unknown or repeated, or a value has the wrong type.
        """
        return parse_changes(TrainConfig, texts)

    @classmethod
    def from_toml(cls, path: str | Path, base: TrainConfig | None = None, *, written_by: str = RELEASE) -> TrainConfig:
        """Read a configuration from a TOML file.

        Args:
            path: The file; it may give only some of the settings.
            base: The configuration that provides all other settings; the defaults if None.
            written_by: The release whose methods are meant if the file names none under the key `normfree`.

        Returns:
            The configuration, with a method of an earlier release in today's spelling.

        Raises:
            ValueError: If the text is not TOML, a setting is unknown, or a value is bad.
            OSError: If the file cannot be read.
        """
        return cls._from_values(read_toml(path), str(path), base, written_by)

    @classmethod
    def _from_values(
        cls, values: dict[str, Any], where: str, base: TrainConfig | None = None, written_by: str = RELEASE
    ) -> TrainConfig:
        release = str(values.pop("normfree", written_by))
        require_known(values, field_types(cls), where=f" in '{where}'")
        try:
            config = replace(base or cls(), **values)
            if release == RELEASE or "method" not in values:
                return config
            from normfree.methods.method_registry import as_of  # imported here because it loads torch

            return replace(config, method=as_of(config.method, release, config.model))
        except ValueError as error:
            raise ValueError(f"{error}; correct it in '{where}'") from None

    @classmethod
    def from_toml_text(cls, text: str, where: str) -> TrainConfig:
        """Read a configuration that `to_toml` wrote; `where` is its place in errors, which are those of `from_toml`."""
        return cls._from_values(parse_toml(text.encode(), where), where)

    def __repr__(self) -> str:
        """Return the settings that differ from their defaults."""
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"TrainConfig({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def _repr_html_(self) -> str:
        return notebook_html("TrainConfig", text=self.to_toml())

    def to_toml(self, *, explained: bool = False) -> str:
        """Render all settings as TOML, which `from_toml` reads back equal.

        Args:
            explained: Whether to add the meaning of each setting as a comment, and to leave out the release.

        Returns:
            The text. A setting that is None is left out, or is a comment with `explained`.
        """
        return explained_toml(self) if explained else to_toml({"normfree": RELEASE, **asdict(self)})

    def fingerprint(self) -> str:
        """Identify the settings that affect the result.

        The digits do not depend on settings that change no number: the folder of the data, how often the run is
        saved, how many processes read data, what is logged. Nor do they depend on the device: 'auto' does not say
        which it was, a run may be resumed on another machine, and the result names the hardware. The same holds for
        `kernels`, which 'auto' chooses by the machine. Settings that change only the rounding (compile, graph,
        channels_last, …) count, because a resumed run continues bit for bit. A setting at its default does not count,
        so that adding a setting later changes no earlier fingerprint.

        Returns:
            12 hexadecimal digits.
        """
        changed = {name: value for name, value in asdict(self).items() if value != _DEFAULTS[name]}
        counted = {name: value for name, value in changed.items() if name not in NOT_IN_FINGERPRINT}
        return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:12]

    def warnings(self, steps: int) -> list[str]:
        """Return warnings about settings that are valid but unsuitable for a run of this length.

        Args:
            steps: The steps of the whole run.

        Returns:
            One sentence per warning.
        """
        found = []
        if self.warmup > (steps if self.warmup_in == "steps" else self.epochs) > 0:
            found.append(
                f"the warm-up of {self.warmup:g} {self.warmup_in} is longer than the run of {steps:,} steps, so "
                "it never reaches the full learning rate; make it shorter with --set warmup=…"
            )
        if steps == self.epochs > 0:
            kinds = {"pairs": "tokens holds all training sentences", "text": "blocks holds the complete training text"}
            images = "holds all training images, and repeats some if there are fewer"
            content = kinds.get(self.data.partition(":")[0], images)
            found.append(f"a batch of {self.batch_size:,} {content}; make it smaller with --set batch_size=…")
        return found

    def require_same(self, before: TrainConfig, free: Collection[str], whose: str) -> None:
        """Compare the settings with those that a run began with.

        Args:
            before: The configuration of the run.
            free: The names of the settings that may differ.
            whose: The run in the error, such as "the run in 'runs/fashion'".

        Raises:
            ValueError: If other settings differ; the message names all of them.
        """
        values = ((name, value, getattr(self, name)) for name, value in asdict(before).items())
        differing = [(f"{name}={a}", f"{name}={b}") for name, a, b in values if a != b and name not in free]
        if differing:
            raise ValueError(
                f"{whose} has {', '.join(a for a, _ in differing)}, but this command gives "
                f"{', '.join(b for _, b in differing)}; resume it without changes (only {', '.join(sorted(free))} may "
                "change), or choose another folder"
            )

    @property
    def lr_schedule(self) -> Schedule:
        """The schedule of the learning rate."""
        from normfree.optim.learning_rates import Schedule

        return Schedule(
            kind=self.schedule,
            milestones=self.milestones,
            decay=self.decay,
            by=self.cosine_by,
            warmup=self.warmup,
            warmup_in=self.warmup_in,
            warmup_shape=self.warmup_shape,
        )


DEEP = 400  # residual branches
# Settings that change no number of a run; `fingerprint` gives the reasons.
NOT_IN_FINGERPRINT = {"data_dir", "device", "kernels", "workers", "tensorboard", "measure_signal"}
NOT_IN_FINGERPRINT |= {"checkpoint_minutes", "checkpoint_epochs", "keep_last", "keep_best"}
# Settings that may differ when a run is resumed. Another number of epochs changes the schedule from there on.
MAY_CHANGE = NOT_IN_FINGERPRINT | {"epochs"}
_DEFAULTS = asdict(TrainConfig())


def folder_name(config: TrainConfig) -> str:
    """Name the folder of a run after its main settings and the fingerprint of all settings that change its numbers."""
    words = f"{config.model}-{config.method}-lr{config.lr:g}-seed{config.seed}"
    return f"{plain_name(words)}-{config.fingerprint()}"
