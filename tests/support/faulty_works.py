"""The works that `make faults` disturbs: what each runs, what its folder then holds, and how a user goes on."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import normfree as nf
from compared_runs import TIMES, differences
from forked_runs import Runs
from normed_blocks import X, network
from normfree.conversion import convert
from normfree.conversion.saving import load_converted, save_converted
from normfree.data.text.prepared_folder import open_prepared
from normfree.train import RunFolder
from tiny_text import SIZE, write_pairs

Arguments = tuple[str, ...]
OUT = "{out}"  # stands for the folder of the work in its arguments


class Work(NamedTuple):
    """A work that writes a folder."""

    name: str
    arguments: Arguments
    is_whole: Callable[[Path], bool]
    """Read a folder: whether it holds what it should. Raises an error of one sentence if it is refused."""
    base: Path | None = None  # what the folder holds before
    go_on: Arguments = ()  # goes on with what a fault left
    restart: Arguments = ()  # begins again if the folder was refused; empty if there is something that must not be lost


def save(folder: str, seed: str) -> None:
    """Convert a network and save it."""
    model, plan = convert(network(), "fixup", X, generator=torch.Generator().manual_seed(int(seed)))
    save_converted(folder, model, plan, example=X, source="normed_blocks:network")


def save_carelessly(folder: str, other: str) -> None:
    """Write the files of another model over those of a folder, one by one: the control."""
    for path in sorted(Path(other).iterdir()):
        Path(folder, path.name).write_bytes(path.read_bytes())


@cache
def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_converted(folder, trust=True)[0].state_dict()


def _is_model(folder: Path, *wanted: Path) -> bool:
    found = load_converted(folder, trust=True)[0].state_dict()
    return any(all(torch.equal(found[name], value) for name, value in _weights(path).items()) for path in wanted)


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _untimed(item) for name, item in value.items() if name not in TIMES}
    return [_untimed(item) for item in value] if isinstance(value, list) else value


def _comparison(folder: Path) -> Any:
    if missing := [end for end in ("json", "html", "png", "svg") if not (folder / f"comparison.{end}").exists()]:
        raise FileNotFoundError(f"no comparison.{missing[0]}")
    return _untimed(json.loads((folder / "comparison.json").read_text(encoding="utf-8")))


def make_works(runs: Runs, root: Path) -> dict[str, Work]:
    """Do every work once without a fault in a folder, and return them by name."""

    def whole(name: str, *arguments: str) -> Path:
        out = root / name
        runs.start(*(item.replace(OUT, str(out)) for item in arguments), prints=root / "prints")
        assert runs.wait() == 0, (root / "prints").read_text()
        return out

    settings = nf.TrainConfig(model="resmlp-2-8", epochs=2, batch_size=16, device="cpu", workers=0)
    (root / "config.toml").write_text(settings.to_toml())
    begin = ("train", "--config", str(root / "config.toml"), "--out", OUT)
    trained = whole("trained", *begin)
    begun = root / "begun"
    runs.start(*begin[:-1], str(begun), prints=root / "prints", die=("normfree.train.engine.loop:checkpoint.save", 2))
    runs.wait()
    assert not (begun / "result.json").exists()
    assert RunFolder(begun).has_begun
    resume = ("train", "--resume", OUT)
    make = ("convert", "normed_blocks:network", "--input", "8", "--batch", "6", "--out", OUT)
    converted = whole("converted", *make)
    keep = ("faulty_works:save", OUT)
    first, second = whole("first", *keep, "1"), whole("second", *keep, "2")
    assert not _is_model(first, second)
    (root / "pairs").mkdir()
    train = write_pairs(root / "pairs")["train"]
    prepare = ("data", "prepare", "--source", str(train[0]), "--target", str(train[1]), "--vocabulary", str(SIZE))
    prepare = (*prepare, "--out", OUT)
    manifest = open_prepared(whole("prepared", *prepare)).manifest
    compare = ("compare", "-m", "fixup", "-m", "batchnorm", "--model", "resmlp-2-8", "--jobs", "1", "--out", OUT)
    compare = (*compare, *(word for name in ("epochs=1", "batch_size=16", "device=cpu") for word in ("--set", name)))
    compared = _comparison(whole("compared", *compare))
    works = (
        Work("training", begin, lambda out: not differences(trained, out), None, resume, (*begin, "--overwrite")),
        Work("resuming", resume, lambda out: not differences(trained, out), begun, resume),
        Work("converting", make, lambda out: _is_model(out, converted), restart=(*make, "--overwrite")),
        Work("saving over an earlier model", (*keep, "2"), lambda out: _is_model(out, first, second), first),
        Work("preparing data", prepare, lambda out: open_prepared(out).manifest == manifest, restart=prepare),
        Work("comparing", compare, lambda out: _comparison(out) == compared, go_on=compare),
    )
    return {work.name: work for work in works}


def copy_base(work: Work, out: Path) -> None:
    """Put into a folder what the work finds there."""
    if work.base is not None:
        shutil.copytree(work.base, out)
