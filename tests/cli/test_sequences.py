"""The command line on models of sequences: random words by default, batches from files, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from normfree.cli import main
from normfree.diagnostics import diagnose
from normfree.models import build
from normfree.models.example_inputs import random_inputs

Run = Callable[..., tuple[int, str, str]]
NAMES = ("transformer-2-2-16-32-2", "encoder-3-16-32-2", "decoder-3-16-32-2")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: exit status, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


def words(rows: int, length: int) -> torch.Tensor:
    return torch.randint(4, 1000, (rows, length), generator=torch.Generator().manual_seed(0))


def test_models_lists_the_three_families(run: Run) -> None:
    out = run("models")[1]
    for pattern in ("transformer-E-D-W-I-H", "encoder-N-W-I-H", "decoder-N-W-I-H"):
        assert pattern in out


@pytest.mark.parametrize("name", NAMES)
def test_diagnose_takes_models_of_sequences(run: Run, name: str) -> None:
    methods = ("fixup", "layernorm", "rezero", "tfixup", "deepnorm", "admin", "dyt")
    code, out, _ = run("diagnose", name, *(f"-m{m}" for m in methods), "--json", "--batch", "4")
    assert code == 0
    records = json.loads(out)
    assert [record["name"] for record in records] == list(methods)
    branches = {"transformer": 10}.get(name.partition("-")[0], 6)
    assert all(len(record["signal"]["sums"]) == branches for record in records)
    assert {record["verdict"]["status"] for record in records} <= {"preserved", "growing"}


def test_gradient_is_put_on_a_memory_that_nothing_reads_yet() -> None:
    given = random_inputs(NAMES[0], batch=4)
    fixup = diagnose(build(NAMES[0], "fixup", generator=torch.Generator().manual_seed(0)), given)
    assert fixup.signal.injected == "output, memory"
    assert fixup.verdict.status == "preserved"
    assert "injected at the output" in str(fixup)
    assert "injected there, too" in str(fixup)
    plain = diagnose(build(NAMES[0], "layernorm", generator=torch.Generator().manual_seed(0)), given)
    assert plain.signal.injected == "output"


def test_input_is_a_length_and_batches_come_from_files(run: Run, tmp_path: Path) -> None:
    assert run("diagnose", NAMES[1], "--input", "9")[0] == 0
    save_file({"inputs": words(4, 9), "targets": torch.arange(4)}, tmp_path / "one.safetensors")
    save_file(
        {"inputs": words(4, 9), "decoder_inputs": words(4, 7), "targets": words(4, 7)}, tmp_path / "two.safetensors"
    )
    for name, file in ((NAMES[1], "one"), (NAMES[0], "two")):
        code, out, _ = run(
            "diagnose", name, "--data", str(tmp_path / f"{file}.safetensors"), "--json", "-m", "layernorm"
        )
        assert code == 0
        assert json.loads(out)[0]["signal"]["loss"] > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--input", "3x32x32"), "expected --input to be the length of a sequence, such as 32, got '3x32x32'"),
        (("-m", "batchnorm"), "method 'batchnorm' does not admit model"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    code, _, err = run("diagnose", NAMES[1], *arguments)
    assert code != 0
    assert expected in " ".join(err.split())


def test_file_without_the_second_sequence_is_refused(run: Run, tmp_path: Path) -> None:
    save_file({"inputs": words(4, 9)}, tmp_path / "one.safetensors")
    code, _, err = run("diagnose", NAMES[0], "--data", str(tmp_path / "one.safetensors"))
    assert code != 0
    assert "expected a batch with a tensor 'decoder_inputs'" in " ".join(err.split())
