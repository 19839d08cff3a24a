"""The works that `make faults` disturbs: what each runs, what its folder then holds, and how a user goes on."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

import normfree as nf
from compared_runs import TIMES, differences
from faulty_calls import Fault
from forked_runs import Runs
from normed_blocks import X, network
from normfree.conversion import convert
from normfree.conversion.saving import load_converted, save_converted
from normfree.data.text.prepared_folder import open_prepared
from normfree.storage.reading import Checksum, read_sealed_json
from normfree.train import RunFolder
from normfree.train.run import checkpoint
from tiny_text import SIZE, write_pairs

Arguments = tuple[str, ...]
SAVED = "/checkpoint-"  # in the names of checkpoints
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
    ranks: bool = False  # two processes do it
    source: Path | None = None  # what its workers read


def save(folder: str, seed: str) -> None:
    """Convert a network and save it."""
    model, plan = convert(network(), "fixup", X, generator=torch.Generator().manual_seed(int(seed)))
    save_converted(folder, model, plan, example=X, source="normed_blocks:network")


def save_carelessly(folder: str, other: str) -> None:
    """Write the files of another model over those of a folder, one by one: the control."""
    for path in sorted(Path(other).iterdir()):
        Path(folder, path.name).write_bytes(path.read_bytes())


def train_shards(folder: str, begin: str = "") -> None:
    """Train a sharded model for four steps, as one of two processes, with a checkpoint after every second step.

    It resumes if `begin` is empty.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from normfree.train.engine.distributed import explained_disconnection
    from sharded_saves import load_sharded_, made, save_sharded, train

    dist.init_process_group("gloo")
    model, optimizer = made(0, init_device_mesh("cpu", (2,)))
    Path(folder).mkdir(exist_ok=True)
    done = 0 if begin else load_sharded_(folder, model, optimizer=optimizer)["step"]
    for step in range(done, 4, 2):
        with explained_disconnection(2):  # the user's part
            train(model, optimizer, step, step + 2)
        save_sharded(folder, model, {"step": step + 2}, optimizer=optimizer)
    dist.destroy_process_group()


def _shards(folder: Path) -> dict[str, Any]:
    """Return the tensors in the files of step 4, and its plain state; the order of tensors differs between saves."""
    if not (saved := folder / "checkpoint-4").exists():
        raise FileNotFoundError("no checkpoint of step 4")
    digests, state = checkpoint.read_state(saved)
    if digests != {path.name: Checksum.of(path).sha256 for path in saved.glob("*.safetensors")}:
        raise ValueError("a shard is damaged or missing")
    shards = {name: load_file(saved / name) for name in digests}
    return {"state": state, **{f"{file} {n}": t.tolist() for file, shard in shards.items() for n, t in shard.items()}}


def write_images(folder: Path, train: int = 16, test: int = 4) -> Path:
    """Write a folder of small images of two classes."""
    for split, count in (("train", train), ("val", test)):
        for number in range(count):
            path = folder / split / "ab"[number % 2] / f"{number}.ppm"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"P6 8 8 255\n" + bytes((number * 13 + i * 7) % 256 for i in range(192)))
    return folder


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
    return _untimed(read_sealed_json(folder / "comparison.json", "the comparison", "compare again"))


def _run(name: str, begin: Arguments, wanted: Path, resume: Arguments) -> Work:
    """A run that begins, is resumed, and has to equal another one."""
    return Work(name, begin, lambda out: not differences(wanted, out), None, resume, (*begin, "--overwrite"))


def make_works(runs: Runs, root: Path) -> dict[str, Work]:
    """Do every work once without a fault in a folder, and return them by name."""

    def whole(name: str, *arguments: str, ranks: bool = False) -> Path:
        out = root / name
        runs.start(*(item.replace(OUT, str(out)) for item in arguments), prints=root / "prints", ranks=ranks)
        assert runs.wait() == 0, (root / "prints").read_text()
        return out

    settings = nf.TrainConfig(model="resmlp-2-8", epochs=2, batch_size=16, device="cpu", workers=0)
    (root / "config.toml").write_text(settings.to_toml())
    begin = ("train", "--config", str(root / "config.toml"), "--out", OUT)
    trained = whole("trained", *begin)
    begun = root / "begun"
    calls, log = [*begin[:-1], str(begun)], root / "calls"
    runs.start(*calls, prints=root / "prints", fault=Fault("recorded", str(begun), 0, str(log)))
    assert runs.wait() == 0
    saved = next(
        i for i, line in enumerate(log.read_text().splitlines()) if line.startswith("rename") and SAVED in line
    )
    shutil.rmtree(begun)
    runs.start(*calls, prints=root / "prints", fault=Fault("killed", str(begun), saved + 3, str(log)))
    runs.wait()  # it is killed after its first checkpoint is synced
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
    pictures = f"data=folder:{write_images(root / 'photos')}"  # spawned workers do not have the small set of the server
    pool = tuple({"1": "2", "batch_size=16": "batch_size=4"}.get(word, word) for word in compare)
    pool = (*pool, "--set", pictures, "--lr", "1e-6")
    pooled = _comparison(whole("pooled", *pool))
    shard = ("faulty_works:train_shards", OUT)
    often = (*begin, "--set", "checkpoint_minutes=1e-9")  # after every step
    ranked, shards = whole("ranked", *begin, ranks=True), _shards(whole("sharded", *shard, "begin", ranks=True))
    photos = (*begin, "--set", pictures, "--set", "workers=2")
    photos = (*photos, "--set", "batch_size=4", "--set", "lr=1e-6")
    seen = whole("seen", *photos)
    works = (
        _run("training", begin, trained, resume),
        Work("resuming", resume, lambda out: not differences(trained, out), begun, resume),
        Work("converting", make, lambda out: _is_model(out, converted), restart=(*make, "--overwrite")),
        Work("saving over an earlier model", (*keep, "2"), lambda out: _is_model(out, first, second), first),
        Work("preparing data", prepare, lambda out: open_prepared(out).manifest == manifest, restart=prepare),
        Work("comparing", compare, lambda out: _comparison(out) == compared, go_on=compare),
        Work("comparing in two workers", pool, lambda out: _comparison(out) == pooled, go_on=pool),
        _run("saving while training", often, whole("often", *often), resume),
        _run("training on images of two workers", photos, seen, resume)._replace(source=root / "photos"),
        _run("training in two ranks", begin, ranked, resume)._replace(ranks=True),
        Work("saving shards in two ranks", (*shard, "begin"), lambda out: _shards(out) == shards, None, shard,
             (*shard, "begin"), ranks=True),
    )  # fmt: skip
    return {work.name: work for work in works}


def copy_base(work: Work, out: Path) -> None:
    """Put into a folder what the work finds there."""
    if work.base is not None:
        shutil.copytree(work.base, out)
