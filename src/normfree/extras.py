"""Optional packages: the extra that installs each of them, and the message for one that is not installed.

try:
    import scipy
except ImportError as error:
    raise ValueError(missing_package("scipy", "reading 'a.mat'")) from error
"""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "plots": ("matplotlib", "jinja2"),
    "data": ("pillow", "scipy"),
    "vision": ("torchvision", "timm"),
    "text": ("sentencepiece", "sacrebleu"),
    "tracking": ("tensorboard",),
}


def missing_package(package: str, purpose: str) -> str:
    """Return one sentence on a missing optional package: the feature that needs it, and the command that installs it.

    Args:
        package: the name of the package, as pip knows it; one of those in `EXTRAS`.
        purpose: the subject of the sentence, such as "a plot" or "reading 'a.mat'".

    >>> missing_package("matplotlib", "a plot")
    "a plot needs matplotlib, which is not installed; in a clone of normfree, run: pip install '.[plots]'"
    """
    extra = next(extra for extra, packages in EXTRAS.items() if package in packages)
    return f"{purpose} needs {package}, which is not installed; {install_command(extra)}"


def require_package(package: str, purpose: str) -> None:
    """Raise `ValueError` if an optional package is not installed, before any work; nothing is imported.

    Args:
        package: the name of the package, which is also the name of its module.
        purpose: the subject of the sentence, as in `missing_package`.
    """
    if find_spec(package) is None:
        raise ValueError(missing_package(package, purpose))


def install_command(extra: str) -> str:
    """Return the end of an error message: the command that installs an extra.

    It installs from a clone, since normfree is on no package index.
    """
    return f"in a clone of normfree, run: pip install '.[{extra}]'"
