"""Texts of error messages: an unknown name, a wrong argument, a package that is not installed, lists of modules.

try:
    import scipy
except ImportError as error:
    raise ValueError(missing_package("scipy", "reading 'a.mat'")) from error
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

_FEW, _MANY = 12, 40  # the most names that a message lists next to close matches, and without
MOST_REASONS = 6  # reasons in an error, or names of modules in a note; a deep network has one per block
# Names of settings that other libraries use, with ours.
_OTHER_WORDS = {
    **dict.fromkeys(("learning_rate", "learningrate", "rate", "eta", "max_lr"), "lr"),
    **dict.fromkeys(("wd", "decay", "l2", "weightdecay"), "weight_decay"),
    **dict.fromkeys(("steps", "num_epochs", "max_epochs", "n_epochs", "num_train_epochs", "max_steps"), "epochs"),
    **dict.fromkeys(("batch", "bs", "batchsize", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("dataset", "data_set", "task"), "data"),
    **dict.fromkeys(("net", "network", "arch", "architecture", "backbone"), "model"),
    **dict.fromkeys(("optim", "opt"), "optimizer"),
    **dict.fromkeys(("scheduler", "lr_schedule", "lr_scheduler"), "schedule"),
    **dict.fromkeys(("warmup_steps", "warmup_epochs"), "warmup"),
    **dict.fromkeys(("grad_clip", "clip_grad", "gradient_clipping", "max_grad_norm"), "clip"),
    **dict.fromkeys(("num_workers", "n_workers"), "workers"),
    **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
    **dict.fromkeys(("dtype", "amp", "fp16", "mixed_precision"), "precision"),
    **dict.fromkeys(("accumulation", "grad_accum", "gradient_accumulation_steps", "accumulation_steps"), "accumulate"),
    **dict.fromkeys(("gpu", "accelerator"), "device"),
    **dict.fromkeys(("norm", "normalization", "init", "initialization"), "method"),
}
# The optional packages, by the extra that installs them.
EXTRAS = {
    "plots": ("matplotlib", "jinja2"),
    "data": ("pillow", "scipy"),
    "vision": ("torchvision", "timm"),
    "text": ("sentencepiece", "sacrebleu"),
    "tracking": ("tensorboard",),
    "cluster": ("ray", "grpcio"),
    "tune": ("optuna",),
}


def missing_package(package: str, purpose: str) -> str:
    """Return one sentence on a missing optional package: the feature that needs it, and the command that installs it.

    Args:
        package: The name of the package, as pip knows it; one of those in `EXTRAS`.
        purpose: The subject of the sentence, such as "a plot" or "reading 'a.mat'".

    >>> missing_package("matplotlib", "a plot")
    "a plot needs matplotlib, which is not installed; in a clone of normfree, run: pip install '.[plots]'"
    """
    extra = next(extra for extra, packages in EXTRAS.items() if package in packages)
    return f"{purpose} needs {package}, which is not installed; {install_command(extra)}"


def require_package(package: str, purpose: str) -> None:
    """Raise `ValueError` if an optional package is not installed, before any work; nothing is imported.

    Args:
        package: The name of the package, which is also the name of its module.
        purpose: The subject of the sentence, as in `missing_package`.
    """
    if find_spec(package) is None:
        raise ValueError(missing_package(package, purpose))


def install_command(extra: str) -> str:
    """Return the end of an error message: the command that installs an extra.

    It installs from a clone, since normfree is on no package index.
    """
    return f"in a clone of normfree, run: pip install '.[{extra}]'"


def brief(error: BaseException, longest: int = 200) -> str:
    r"""Return the first line of an error of another library, as a part of a sentence.

    >>> brief(RuntimeError("no  kernel\nMore about kernels: https://…"))
    'no kernel'
    """
    text = " ".join(str(error).strip().partition("\n")[0].split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def wrong_argument(name: str, expected: str, got: object, remedy: str) -> ValueError:
    """Return the error for an argument of the wrong kind.

    >>> print(wrong_argument("model", "a torch.nn.Module", "resnet20", "pass the model itself"))
    expected a torch.nn.Module as model, got the text 'resnet20'; pass the model itself
    """
    if isinstance(got, type):
        described = f"the class {got.__name__}, not an object of it"
    elif isinstance(got, str):
        described = f"the text {got!r}"
    elif got is None or isinstance(got, int | float):
        described = repr(got)
    else:
        shape = f" of shape {tuple(got.shape)}" if hasattr(got, "shape") else ""
        described = f"a {type(got).__module__.partition('.')[0]}.{type(got).__name__}{shape}".replace(
            "a builtins.", "a "
        )
    return ValueError(f"expected {expected} as {name}, got {described}; {remedy}")


def unknown_name(what: str, got: str, known: Iterable[str], where: str = "") -> ValueError:
    """Return the error for an unknown name, with the closest known names, or all if they are few or none is close.

    >>> print(unknown_name("colour", "gren", ["red", "green", "blue"]))
    unknown colour 'gren'; did you mean 'green' or 'red'? expected one of: red, green, blue

    Args:
        what: The kind of name.
        got: The unknown name.
        known: The known names.
        where: A text after the name, such as " in 'setup.toml'".
    """
    known = list(known)
    if (meant := _OTHER_WORDS.get(got.lower())) in known:
        return ValueError(f"unknown {what} '{got}'{where}; did you mean '{meant}'?")
    close = difflib.get_close_matches(got, known, n=3, cutoff=0.5)
    parts = [f"did you mean {' or '.join(map(repr, close))}?"] if close else []
    if len(known) <= _FEW or not close:
        rest = f", … ({len(known)} in all)" if len(known) > _MANY else ""
        parts.append(f"expected one of: {', '.join(known[:_MANY]) or 'none'}{rest}")
    return ValueError(f"unknown {what} '{got}'{where}; {' '.join(parts)}")


def quoted(name: str) -> str:
    """The name of a module or sum in quotes; the model itself is '(model)'."""
    return f"'{name}'" if name.partition("#")[0] else f"'(model){name}'"


def listed(names: Iterable[str], classes: Mapping[str, str] | None = None) -> str:
    """The first names, with their classes if given, and the number of the others."""
    every = list(names)
    shown = [quoted(name) + (f" ({classes[name]})" if classes else "") for name in every[:MOST_REASONS]]
    more = f" and {len(every) - MOST_REASONS} more" if len(every) > MOST_REASONS else ""
    return ", ".join(shown) + more


def grouped(reasons: Iterable[str]) -> list[str]:
    """One reason of each kind, with the number of the others, which differ from it in quoted names only.

    >>> grouped(["'a': no place", "'b': no place", "'c': no bias"])
    ["'a' (and 1 more): no place", "'c': no bias"]
    """
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(re.sub("'[^' ]*'", "''", reason), []).append(reason)
    return [
        re.sub("^('[^' ]*')", rf"\1 (and {len(alike) - 1} more)", alike[0]) if len(alike) > 1 else alike[0]
        for alike in kinds.values()
    ]
