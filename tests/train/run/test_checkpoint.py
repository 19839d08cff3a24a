"""A checkpoint comes back bit for bit, is never half there, and a damaged one is refused by name."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import normfree
from normfree.train.run import checkpoint
from normfree.train.run.checkpoint import STATE, WEIGHTS, Writer, latest, load, load_intact, read, save


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """All that there is of a tensor, NaN payloads and signs of zero included."""
    return tensor.dtype, tensor.shape, bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def some(step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return {"w": torch.full((5,), float(step)), "b": torch.tensor(step)}, {"step": step, "epoch": step / 7}


def names(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 4, generator=generator)
    odd = torch.tensor([0x7F800001, -1, 0x7FC12345, -(2**31)], dtype=torch.int32).view(torch.float32)
    return {
        "float32": base,
        "odd": odd,
        "transposed": base.t(),
        "strided": base[::2, 1:3],
        "same storage": base[1],
        "expanded": torch.tensor([1.5]).expand(3, 2),
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float64": base.double() / 3,
        "int64": torch.tensor([2**62 + 1, -5]),
        "uint8": torch.arange(7, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "without dimensions": torch.tensor(3.25, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "needs gradient": torch.ones(2, requires_grad=True),
        "channels last": torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
    }


STATE_VALUES = {
    "step": 12,
    "lr": 0.1 + 0.2,
    "tiny": 5e-324,
    "best": float("-inf"),
    "seed": 2**63 + 1,
    "none": None,
    "flag": True,
    "text": "naïve √",
    "list": [1, [2.0, "x"]],
    "deep": {"a": {"b": -0.0}},
}


def test_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    given = tensors()
    assert save(tmp_path, given, STATE_VALUES) == tmp_path / "checkpoint-12" == latest(tmp_path)
    back, state = load(tmp_path)
    assert {name: bits(tensor) for name, tensor in back.items()} == {n: bits(tensor) for n, tensor in given.items()}
    assert repr(state) == repr(STATE_VALUES)  # tells 0.0 from -0.0 and 1 from True
    assert not any(tensor.requires_grad for tensor in back.values())
    back["float32"].add_(1)  # a tensor of its own that can be written
    assert given["same storage"].data_ptr() != back["same storage"].data_ptr()


def test_nothing_and_nan_come_back(tmp_path: Path) -> None:
    save(tmp_path, {}, {"step": 0, "loss": float("nan"), "pair": (1, 2)})
    back, state = load(tmp_path)
    assert back == {}
    assert state["loss"] != state["loss"]
    assert state["pair"] == [1, 2]


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10, 100):
        save(tmp_path, *some(step))
        assert names(tmp_path) == {f"checkpoint-{step}"}
    for step in (101, 102, 103):
        save(tmp_path, *some(step), keep=3)
    assert names(tmp_path) == {"checkpoint-101", "checkpoint-102", "checkpoint-103"}
    assert load(tmp_path)[1]["step"] == 103


def test_best_one_is_kept_and_found(tmp_path: Path) -> None:
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.7), (4, None), (5, 0.9), (6, 0.1), (7, float("nan"))):
        save(tmp_path, {"w": torch.tensor(step)}, {"step": step, "score": score}, keep=2, keep_best=True)
        if step == 4:  # a step without a score of its own cannot be the best
            assert names(tmp_path) == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}
    assert names(tmp_path) == {"checkpoint-5", "checkpoint-6", "checkpoint-7"}
    assert load(tmp_path, best=True)[0]["w"] == 5
    assert load(tmp_path)[0]["w"] == 7
    (tmp_path / "checkpoint-5" / STATE).write_text("{}")  # a damaged one has no score
    assert load(tmp_path, best=True)[0]["w"] == 6


def test_best_without_any_score_is_refused(tmp_path: Path) -> None:
    save(tmp_path, *some(1), keep_best=True)
    with pytest.raises(ValueError, match="expected a checkpoint with a validation score in"):
        load(tmp_path, best=True)


@pytest.mark.parametrize("file", [STATE, WEIGHTS])
def test_damaged_ones_are_passed_over_and_named(tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        save(tmp_path, *some(step), keep=3)
    assert load_intact(tmp_path)[1]["step"] == 3
    assert not caplog.records
    for step in (3, 2):
        (tmp_path / f"checkpoint-{step}" / file).write_bytes(b"{}")
    assert load_intact(tmp_path)[1]["step"] == 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    for step, text in zip((3, 2), said, strict=True):
        assert f"checkpoint-{step}/{file}' is damaged" in text
        assert text.endswith("; the run continues from 'checkpoint-1'")
    (tmp_path / "checkpoint-1" / file).write_bytes(b"{}")
    with pytest.raises(ValueError, match=f"checkpoint-3/{file}' is damaged"):
        load_intact(tmp_path)


def test_changed_metrics_are_refused_up_to_the_step(tmp_path: Path) -> None:
    metrics = tmp_path / checkpoint.METRICS
    lines = [b'{"step": 1, "loss": 2}\n', b'{"step": 2, "loss": 1}\n', b'{"step": 3, "loss": 0}\n', b'{"ste']
    metrics.write_bytes(b"".join(lines))
    save(tmp_path, *some(2))
    for end in (b"", b'{"step": 3, "loss": 9}\n', b"torn"):  # later lines are cut on resuming
        metrics.write_bytes(b"".join(lines[:2]) + end)
        load_intact(tmp_path)
    whole = b"".join(lines[:2])
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        metrics.write_bytes(changed)
        with pytest.raises(ValueError, match=r"expected the metrics in .* as the run wrote them"):
            load_intact(tmp_path)
    metrics.write_bytes(lines[0])
    with pytest.raises(ValueError, match="delete it to continue without them"):
        load_intact(tmp_path)
    metrics.unlink()
    load_intact(tmp_path)


def test_reader_follows_a_run_that_replaces_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, *some(1))
    original, left = checkpoint.read_tensors, 3

    def slow(path: Path) -> dict[str, Tensor]:
        nonlocal left
        if left:  # the run is faster
            left -= 1
            save(tmp_path, *some(10 - left))
        return original(path)

    monkeypatch.setattr(checkpoint, "read_tensors", slow)
    assert load(tmp_path)[1]["step"] == 10
    assert left == 0


# Writing in a thread


def test_writer_writes_what_it_was_given_and_calls_first(tmp_path: Path) -> None:
    called: list[str] = []
    writer = Writer(tmp_path, lambda: called.append("asked"), keep=2)
    for step in (1, 2, 3):
        writer.start(*some(step))
    writer.wait()
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-3"}
    assert called == ["asked"] * 3
    assert writer.seconds > 0


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    gate = threading.Event()
    writer = Writer(tmp_path, lambda: assert_soon(gate))
    writer.start(*some(1))  # returns before it is written
    assert latest(tmp_path) is None
    gate.set()
    writer.wait()
    assert latest(tmp_path) == tmp_path / "checkpoint-1"


def assert_soon(gate: threading.Event) -> None:
    assert gate.wait(20)


def test_error_of_the_writer_surfaces_once_and_leaves_the_earlier_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path, lambda: None)
    writer.start(*some(1))
    writer.start({"w": torch.zeros(1, device="meta")}, {"step": 2})
    with pytest.raises(ValueError, match="got a meta one under 'w'"):
        writer.start(*some(3))
    writer.wait()
    assert load(tmp_path)[1]["step"] == 1
    refusing = Writer(tmp_path, lambda: read(tmp_path / "none"))
    refusing.start(*some(4))
    with pytest.raises(ValueError, match="is damaged"):
        refusing.wait()
    refusing.start(*some(4))
    refusing.close()  # another error is on its way
    assert load(tmp_path)[1]["step"] == 1


def test_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    for value in range(12):  # past 9, so that order by text would be caught
        save(tmp_path, {"w": torch.tensor(value)}, {"step": 5})
        assert load(tmp_path)[0]["w"] == value
        assert len(names(tmp_path)) == 1
    save(tmp_path, *some(6))
    assert names(tmp_path) == {"checkpoint-6"}


def test_later_checkpoints_are_given_up_by_going_back(tmp_path: Path) -> None:
    save(tmp_path, *some(10), keep=2)
    save(tmp_path, *some(20), keep=2)
    save(tmp_path, *some(15), keep=2)
    assert names(tmp_path) == {"checkpoint-10", "checkpoint-15"}


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-notes.txt").write_text("mine")
    (tmp_path / "checkpoint-9").write_text("a file")
    (tmp_path / ".tmp-checkpoint-12345678").mkdir()
    (tmp_path / ".tmp-checkpoint-12345678" / WEIGHTS).write_text("half")
    (tmp_path / ".tmp-checkpoint-mine").mkdir()
    save(tmp_path, *some(1))
    save(tmp_path, *some(2))
    assert names(tmp_path) == {"checkpoint-notes.txt", "checkpoint-9", "checkpoint-2", ".tmp-checkpoint-mine"}
    assert latest(tmp_path) == tmp_path / "checkpoint-2"


# Damage


@pytest.mark.parametrize("file", [WEIGHTS, STATE])
def test_any_changed_byte_is_refused_by_name(file: str, tmp_path: Path) -> None:
    folder = save(tmp_path, *some(3))
    whole = (folder / file).read_bytes()
    for place in range(0, len(whole), 1 if file == STATE else 7):
        for changed in (whole[place] ^ 1, whole[place] ^ 0x80):
            (folder / file).write_bytes(whole[:place] + bytes([changed]) + whole[place + 1 :])
            with pytest.raises(ValueError, match=rf"checkpoint-3/{file}' is damaged") as caught:
                load(tmp_path)
            assert "start the run again" in str(caught.value)
            assert "\n" not in str(caught.value)
    (folder / file).write_bytes(whole)
    assert load(tmp_path)[1]["step"] == 3


@pytest.mark.parametrize("file", [WEIGHTS, STATE])
def test_truncated_longer_or_missing_file_is_refused(file: str, tmp_path: Path) -> None:
    folder = save(tmp_path, *some(3))
    whole = (folder / file).read_bytes()
    for content in (b"", whole[:-1], whole + b"\n", b"[]", b"\xff"):
        (folder / file).write_bytes(content)
        with pytest.raises(ValueError, match=f"{file}' is damaged"):
            read(folder)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=f"{file}' is damaged \\(missing\\)"):
        read(folder)


def test_pair_of_two_checkpoints_is_refused(tmp_path: Path) -> None:
    save(tmp_path, *some(1), keep=2)
    save(tmp_path, *some(2), keep=2)
    (tmp_path / "checkpoint-2" / WEIGHTS).write_bytes((tmp_path / "checkpoint-1" / WEIGHTS).read_bytes())
    with pytest.raises(ValueError, match=f"checkpoint-2/{WEIGHTS}"):
        load(tmp_path)


def test_damage_names_another_checkpoint_only_where_there_is_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, *some(step), keep=2)
    (tmp_path / "checkpoint-3" / STATE).write_text("{}")
    with pytest.raises(
        ValueError, match=r"; delete the folder 'checkpoint-3' to continue from 'checkpoint-2', or start"
    ):
        load(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-3")
    assert load(tmp_path)[1]["step"] == 2
    (tmp_path / "checkpoint-2" / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"is damaged \(missing\); start the run again$"):
        load(tmp_path)


def test_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=r"expected a checkpoint in .*, found none"):
            load(folder)


# Obstacles


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "under 'step'"),
        ({"step": -1}, "under 'step'"),
        ({"step": True}, "under 'step'"),
        ({"step": 1, "a": {2: 3}}, r"keys in state\['a'\], got 2"),
        ({"step": 1, "a": [0, torch.tensor(1)]}, r"state\['a'\]\[1\], got Tensor"),
    ],
)
def test_state_that_would_not_come_back_is_refused(state: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        save(tmp_path, {}, state)
    assert not names(tmp_path)


@pytest.mark.parametrize(
    "tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.zeros(1, dtype=torch.complex128)]
)
def test_tensor_that_cannot_be_written_is_refused(tensor: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected (dense tensors|tensors that safetensors)"):
        save(tmp_path, {"odd": tensor}, {"step": 1})
    assert not names(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("obstacle", ["folder", "first file", "second file", "sync", "rename"])
def test_obstacle_is_one_sentence_and_leaves_the_earlier_one_whole(
    code: int, obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, *some(1))

    def stop(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    write = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        if self.name == (WEIGHTS if obstacle == "first file" else STATE):
            write(self, content[: len(content) // 2])
            stop()
        return write(self, content)

    with monkeypatch.context() as patch:
        if obstacle.endswith("file"):
            patch.setattr(Path, "write_bytes", full)
        else:
            where = {"folder": (checkpoint, "temporary_folder"), "sync": (os, "fsync"), "rename": (Path, "rename")}
            patch.setattr(*where[obstacle], stop)
        with pytest.raises(OSError, match="could not write the checkpoint in") as caught:
            save(tmp_path, *some(2))
    assert caught.value.errno == code
    assert os.strerror(code) in str(caught.value)
    assert "the earlier checkpoint is intact" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == {"checkpoint-1"}
    assert load(tmp_path)[1]["step"] == 1
    save(tmp_path, *some(2))
    assert load(tmp_path)[1]["step"] == 2


@pytest.mark.faults
def test_read_only_folder_is_one_sentence(tmp_path: Path) -> None:
    save(tmp_path, *some(1))
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("root writes everywhere; the test above stands in")
        with pytest.raises(OSError, match="choose a folder that can be written"):
            save(tmp_path, *some(2))
    finally:
        tmp_path.chmod(0o755)
    assert load(tmp_path)[1]["step"] == 1


def test_missing_folder_and_file_in_its_place_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"No such file.*create the folder"):
        save(tmp_path / "none", *some(1))
    with pytest.raises(OSError, match=r"Not a directory.*a file is in the way of the folder: move it"):
        save(tmp_path / "file", *some(1))
    assert names(tmp_path) == {"file"}


def test_old_checkpoint_that_cannot_be_removed_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, *some(1))

    def stop(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", stop)
        save(tmp_path, *some(2))
    assert load(tmp_path)[1]["step"] == 2
    save(tmp_path, *some(3))
    assert names(tmp_path) == {"checkpoint-3"}


# Death at any moment

SAVES = """
import sys, torch
from normfree.train.run.checkpoint import Writer, latest, load
run = sys.argv[1]
writer = Writer(run, lambda: None, keep=2, keep_best=True)
step = load(run)[1]["step"] if latest(run) else 0
print("ready", flush=True)
while True:
    step += 1
    tensors = {f"t{i}": torch.full((20_000,), step, dtype=torch.int32) for i in range(4)}
    writer.start(tensors, {"step": step, "double": 2 * step, "score": (7 * step % 5) / 5})
"""


@pytest.mark.faults
def test_kill_at_any_moment_leaves_a_whole_pair(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    draw = random.Random(0)
    last = unfinished = 0
    for _ in range(2):
        command = [sys.executable, "-c", SAVES, str(tmp_path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as child:
            assert child.stdout
            try:
                assert child.stdout.readline() == b"ready\n"
                for _ in range(40):  # a stopped process is what a kill at this moment would leave
                    time.sleep(draw.uniform(0.0, 0.02))
                    child.send_signal(signal.SIGSTOP)
                    os.waitpid(child.pid, os.WUNTRACED)
                    if latest(tmp_path) or last:
                        found, state = load(tmp_path)
                        assert all(bool((tensor == state["step"]).all()) for tensor in found.values())
                        assert len(found) == 4
                        assert state["double"] == 2 * state["step"]
                        assert state["step"] >= last
                        last = state["step"]
                    unfinished += any(name.startswith(".tmp-") for name in names(tmp_path))
                    child.send_signal(signal.SIGCONT)
            finally:
                child.kill()
        assert load(tmp_path)[1]["step"] >= last
    assert last > 3
    assert unfinished  # the test did meet half-written ones
    save(tmp_path, *some(10**6))
    assert names(tmp_path) == {"checkpoint-1000000"}  # and they are gone with the next


def test_state_is_json_that_can_be_read_without_us(tmp_path: Path) -> None:
    found = json.loads((save(tmp_path, *some(4)) / STATE).read_text())
    assert found["state"] == {"step": 4, "epoch": 4 / 7}
    assert set(load_file(tmp_path / "checkpoint-4" / WEIGHTS)) == {"w", "b"}


def test_checkpoint_that_the_disk_cannot_read_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, *some(1), keep=2)
    newest = save(tmp_path, *some(2), keep=2)
    (newest / WEIGHTS).unlink()
    (newest / WEIGHTS).symlink_to(WEIGHTS)  # an OSError, as of a bad sector
    assert load_intact(tmp_path)[1]["step"] == 1
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(OSError, match="symbolic links"):
        load_intact(tmp_path)


@pytest.mark.parametrize("name", [STATE, WEIGHTS])
def test_endless_file_in_a_checkpoint_is_not_read(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, *some(1))
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="got a folder, device or pipe"):
        load(tmp_path)


@pytest.mark.parametrize(
    "forged",
    ["step x", "step -1", "seconds x", "validation 7", "validation [1.0]", "config 5", "classes 5", "vocabulary x"],
)
def test_state_with_values_of_another_kind_is_damaged(tmp_path: Path, forged: str) -> None:
    name, _, text = forged.partition(" ")
    value = text if text == "x" else json.loads(text)
    folder = save(tmp_path, *some(1))
    digest, state = checkpoint.read_state(folder)
    (folder / STATE).write_bytes(checkpoint._render_state(digest, {**state, name: value}, None))
    with pytest.raises(ValueError, match="is damaged"):
        load(tmp_path)
    (folder / STATE).write_bytes(checkpoint._render_state(digest, {**state, "validation": [0.1, 0.2]}, None))
    load(tmp_path)


def test_weights_that_are_none_are_one_sentence(tmp_path: Path) -> None:
    folder = save(tmp_path, *some(1))
    (folder / WEIGHTS).write_bytes(b"x" * 50)
    digest = hashlib.sha256(b"x" * 50).hexdigest()
    (folder / STATE).write_bytes(checkpoint._render_state(digest, {"step": 1}, None))
    with pytest.raises(ValueError, match="expected a safetensors file"):
        load(tmp_path)
