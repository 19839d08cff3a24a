"""`normfree lr` in this process: what it prints, draws and refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file

from normfree.cli.lr import find_rate

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the verb in this process: exit status, stdout and stderr."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(find_rate)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        try:
            app([*map(str, arguments)], standalone_mode=False)
            status = 0
        except ValueError as error:
            status = 2
            print("error:", error, file=sys.stderr)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_rate_is_printed_and_drawn(run: Run, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, 28, 28, generator=draw)
    save_file({"inputs": x, "targets": (x[:, 0, 0, 0] > 0).long()}, tmp_path / "data.safetensors")
    picture = tmp_path / "rate.svg"
    status, out, err = run("resmlp-2-4", "--data", tmp_path / "data.safetensors", "--batch", 4, "-o", picture)
    assert status == 0, err
    assert out.startswith("learning rate ")
    assert "random labels" not in out
    assert "suggested rate" in picture.read_text(encoding="utf-8")


def test_json_has_the_curves(run: Run) -> None:
    status, out, err = run("resmlp-2-4", "-m", "wn", "--batch", 4, "--batches", 2, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["interval"][0] <= found["suggestion"] <= found["interval"][1]
    assert len(found["losses"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resmlp-2-4", "-o", "none/rate.png"), "expected --out in a folder that exists, got 'none/rate.png'"),
        (("resmlp-2-4", "--momentum", "2"), "expected a momentum of at least 0 and below 1, got 2"),
        (("resmlp-2-4", "--input", "99x999999x999999"), "to fit into the memory"),
        (("resmlp-2-4", "-o", "rate.pdf"), "expected --out to end in .png or .svg, got 'rate.pdf'"),
        (("resmlp-2-4", "--optimizer", "lion"), "expected optimizer to be sgd, adam, adamw"),
    ],
)
def test_bad_input_is_one_sentence(run: Run, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = run(*arguments, "--batch", "2", "--batches", "1")
    assert (status, out) == (2, "")
    assert message in err
