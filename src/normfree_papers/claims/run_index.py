"""The kept training runs by their configurations, so that a run is found by what it computes and not by its folder.

A folder of an earlier release is named after the method as that release wrote it. `nf` of release 0.1 is today's
`nf:bias=false`. A claim that asks for `nf:bias=false` finds that run. A claim that asks for `nf` gets it too, if there
is no run of today, and is then stale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from normfree.methods import get
from normfree.provenance import RELEASE
from normfree.train import RunFolder, TrainConfig
from normfree.train.config import folder_name
from normfree.train.settings import read_toml

_OPEN: dict[str, Any] = {"precision": "auto", "channels_last": None, "compile": None, "graph": None}


@dataclass(frozen=True)
class RunIndex:
    """The runs that ended in a folder."""

    kept: Path

    def find(self, config: TrainConfig) -> Path | None:
        """The folder of a run; of the run by an earlier definition of its method, if there is no other."""
        name = self.kept / folder_name(config)
        if _has_ended(name) and not is_earlier(name, config):
            return name
        return self._folders.get(_key(config)) or (name if _has_ended(name) else None)

    def new_folder(self, config: TrainConfig) -> Path:
        """The folder for a run of today; its plain name may be taken by an earlier definition."""
        name, found = folder_name(config), self.find(config)
        taken = found is not None and is_earlier(found, config)
        return self.kept / (f"{name}-{RELEASE}" if taken else name)

    @cached_property
    def _folders(self) -> dict[str, Path]:
        """Every folder, by the name that today's spelling of its configuration gives."""
        folders = sorted(path for path in self.kept.iterdir() if _has_ended(path)) if self.kept.is_dir() else []
        return {_key(asked_config(folder)): folder for folder in folders}


def is_earlier(folder: Path, config: TrainConfig) -> bool:
    """Whether a kept run was made by an earlier definition of the method that was asked for."""
    return canonical(RunFolder(folder).read_config().method) != canonical(config.method)


def canonical(method: str) -> str:
    """The method as the registry spells it; as it is, if it is not registered."""
    try:
        return get(method).spec
    except ValueError:
        return method


def asked_config(folder: Path) -> TrainConfig:
    """The configuration that a kept run was asked for, with its method in today's spelling.

    The kept configuration says how 'auto' and other open settings came out. The fingerprint in the folder's name is
    that of the settings as asked for, and tells which were open.
    """
    run = RunFolder(folder)
    config, written = run.read_config(), str(read_toml(run.config_path)["method"])
    digits = re.search(r"-([0-9a-f]{12})(?:-[0-9.]+)?$", folder.name)
    for is_open in product((True, False), repeat=len(_OPEN)) if digits else ():
        opened = {name: value for (name, value), left in zip(_OPEN.items(), is_open, strict=True) if left}
        asked = config.with_changes(**opened)
        if digits and asked.with_changes(method=written).fingerprint() == digits[1]:
            return asked
    return config


def _key(config: TrainConfig) -> str:
    return folder_name(config.with_changes(method=canonical(config.method)))


def _has_ended(folder: Path) -> bool:
    return (folder / "config.toml").exists() and RunFolder(folder).status in ("finished", "diverged")
