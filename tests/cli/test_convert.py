"""`normfree convert` in this process: what it prints, writes and refuses."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_model

import normfree as nf
from normfree.cli.convert import convert_model
from normfree.conversion.saving import read_plan
from normfree.diagnostics import diagnosis
from normfree.models.third_party import create_model

Run = Callable[..., tuple[int, str, str]]

ZOO = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = norm(width)
    def forward(self, x):
        return x + self.two(torch.relu(self.one(self.norm(x))))

class Net(nn.Module):
    def __init__(self, norm=nn.LayerNorm, words=7):
        super().__init__()
        self.embed, self.out = nn.Embedding(words, 6), nn.Linear(6, 3)
        self.blocks = nn.Sequential(*(Block(6, norm) for _ in range(4)))
    def forward(self, ids, shift=None):
        x = self.embed(ids)
        return self.out(self.blocks(x if shift is None else x + shift))

class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv, self.norm2, self.out = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 3)
    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.out(torch.relu(x + self.norm2(self.conv(x))).mean((2, 3)))

def exploding():
    model = Net(norm=lambda _: nn.Identity())
    for block in model.blocks:
        nn.init.normal_(block.two.weight, std=9.0)
    return model

def plain():
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))

def normless():
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))

def ids():
    return torch.randint(0, 7, (4, 5))

def named():
    return {"ids": ids(), "shift": torch.ones(6)}

ready = (torch.zeros(2, 5, dtype=torch.long),)
"""


@pytest.fixture(autouse=True)
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_zoo.py").write_text(ZOO)
    yield
    sys.modules.pop("my_zoo", None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the verb in this process: exit status, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(convert_model)

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


def test_plan_changes_and_both_verdicts_are_printed(run: Run) -> None:
    status, out, err = run("my_zoo:Image", "--input", "1x8x8", "--method", "skipinit")
    assert (status, err) == (0, "")
    assert "1 residual branches in 1 stage" in out
    assert "└─ classifier  out" in out
    assert "converted by skipinit: 435 → 412 parameters" in out
    assert "removed  2 × BatchNorm2d" in out
    assert "my_zoo:Image, before" in out
    assert "my_zoo:Image, skipinit: preserved" in out
    assert "\x1b[" not in out


def test_folder_gives_the_model_again(run: Run, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    status, out, err = run("my_zoo:Image", "--input", "1x8x8", "-o", "folder", "--seed", "3", "--batch", "4")
    assert status == 0
    assert "wrote folder; load it with: normfree.load('folder', trust=True)" in err
    assert {p.name for p in (tmp_path / "folder").iterdir()} == {
        "weights.safetensors", "plan.json", "example.safetensors", "load.py", "report.html",
    }  # fmt: skip
    page = (tmp_path / "folder" / "report.html").read_text()
    assert "my_zoo:Image, before" in page
    assert "my_zoo:Image, fixup" in page
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        original = create_model("my_zoo:Image")
    expected, plan = nf.convert(original, "fixup", x, generator=torch.Generator().manual_seed(3))
    assert torch.equal(nf.load("folder", trust=True)(x), expected.eval()(x))
    assert read_plan("folder") == plan
    assert str(plan) in out


def test_converted_model_is_replaced_on_request_only(run: Run, tmp_path: Path) -> None:
    other = ("my_zoo:Image", "--input", "1x8x8", "-o", "folder", "-m", "nf")
    assert run("my_zoo:Image", "--input", "1x8x8", "-o", "folder")[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    status, out, err = run(*other)
    assert (status, out) == (2, "")
    assert "'folder' holds one; replace it with --overwrite, or choose another folder" in err
    assert {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()} == before
    assert run(*other, "--overwrite")[0] == 0
    assert read_plan("folder").changes.method.startswith("nf")
    assert "my_zoo:Image, nf" in (tmp_path / "folder" / "report.html").read_text()
    (tmp_path / "folder" / "mine.txt").write_text("")
    assert "holds 'mine.txt'" in run(*other, "--overwrite")[2]


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_conversions_into_one_folder_never_mix(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    arguments = ("my_zoo:Image", "--input", "1x8x8", "-o", "folder", *(["--overwrite"] if overwrite else []))
    inner: list[int] = []
    write = diagnosis.save

    def save(*found: object, **settings: object) -> Path:
        """Let another conversion begin and end while the first one writes its last file."""
        if not inner:
            inner.append(-1)
            inner[0] = run(*arguments, "-m", "nf")[0]
        return write(*found, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(diagnosis, "save", save)
    status, _, err = run(*arguments)
    assert inner == [0]
    left = "fixup" if overwrite else "nf"
    assert status == (0 if overwrite else 2)
    assert overwrite or "'folder' holds one" in err
    assert read_plan("folder").changes.method.startswith(left)
    assert f"my_zoo:Image, {left}" in (tmp_path / "folder" / "report.html").read_text()
    assert not list(tmp_path.glob(".tmp-*"))


def test_json_has_plan_changes_and_diagnoses(run: Run) -> None:
    status, out, _ = run("my_zoo:Image", "--input", "1x8x8", "--json")
    record = json.loads(out)
    assert status == 0
    assert (record["model"], record["method"]) == ("my_zoo:Image", "fixup")
    assert [d["name"] for d in record["diagnoses"]] == ["my_zoo:Image, before", "my_zoo:Image, fixup"]
    assert len(record["plan"]["changes"]["removed"]) == 2


def test_verdict_before_knows_nothing_of_the_method(run: Run) -> None:
    before, after = json.loads(run("my_zoo:exploding", "--example", "my_zoo:ids", "--json")[1])["diagnoses"]
    assert before["verdict"]["status"] == "exploding"
    assert "use 'fixup'" in before["verdict"]["recommendation"]
    assert after["verdict"]["status"] == "preserved"


@pytest.mark.parametrize("example", ["my_zoo:ids", "my_zoo:named", "my_zoo:ready"])
def test_example_may_be_a_tensor_a_dict_or_a_tuple(run: Run, example: str) -> None:
    status, out, _ = run("my_zoo:Net", "--example", example, "-m", "rezero", "-o", "folder")
    assert status == 0, out
    assert "removed  4 × LayerNorm" in out
    ids = torch.zeros(2, 5, dtype=torch.long)
    assert torch.equal(nf.load("folder", trust=True)(ids), nf.load("folder", trust=True)(ids))


def test_folding_keeps_the_function_of_a_checkpoint(run: Run) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create_model("my_zoo:Image")
        for _ in range(3):
            model(2 + torch.randn(8, 1, 8, 8))
        x = torch.randn(4, 1, 8, 8)
    save_model(model, "weights.safetensors")
    options = ("--input", "1x8x8", "--checkpoint", "weights.safetensors", "--fold-batchnorm", "-o", "folder")
    status, out, _ = run("my_zoo:Image", *options)
    assert status == 0
    assert "2 of 2 folded" in out
    loaded = nf.load("folder", trust=True)
    assert not any("BatchNorm" in type(m).__name__ for m in loaded.modules())
    torch.testing.assert_close(loaded(x), model.eval()(x))
    assert run("my_zoo:Image", *options[:-3], "--fold-batchnorm", "--json")[0] == 0


def test_model_without_sums_is_converted_without_a_verdict(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("my_zoo:plain", "--input", "1x8x8", "-m", "wn", "-o", "folder")
    assert status == 0
    assert "no residual branches" in out
    assert "no verdict: the model has no residual sum" in out
    assert not (tmp_path / "folder" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("resnet50",), "expected torchvision:NAME, timm:NAME or package.module:factory, got 'resnet50'"),
        (("my_zoo.py",), "name a factory in it: normfree convert my_zoo:FACTORY"),
        (("my_zoo:Imag",), "did you mean 'Image'"),
        (("my_zoo:Image", "-m", "fixupp", "--input", "1x8x8"), "did you mean 'fixup'"),
        (("my_zoo:Image", "-m", "batchnorm", "--input", "1x8x8"), "expected a method without normalization"),
        (("my_zoo:Image", "--input", "1xx"), "expected --input such as 3x224x224"),
        (("my_zoo:Image", "--input", "5x8x8"), "expected a model that runs on"),
        (("my_zoo:Image", "-m", "nf", "--fold-batchnorm"), "--method cannot be combined with --fold-batchnorm"),
        (("my_zoo:Image", "-m", "nf", "--checkpoint", "w.safetensors"), "draws new weights"),
        (("my_zoo:Image", "-m", "dyt", "--input", "1x8x8", "--checkpoint", "w.safetensors"), "found none"),
        (("my_zoo:Net", "--example", "my_zoo:idz"), "did you mean 'ids'"),
        (("my_zoo:Net", "--example", "other_zoo:ids"), "for example 'other_zoo:ids', but it was not found"),
        (("my_zoo:Net", "--example", "my_zoo:ids", "--input", "5"), "--example cannot be combined with --input"),
        (("my_zoo:Net", "--example", "my_zoo:ids", "--batch", "5"), "--example cannot be combined with --batch"),
        (("my_zoo:Image", "--input", "1x8x8", "-o", "."), "holds 'my_zoo.py'; choose another folder"),
        (("my_zoo:Image", "--input", "1x8x8", "-o", "my_zoo.py/new"), "expected --out to be a folder, but '"),
        (("my_zoo:Image", "--input", "1x8x8", "--overwrite"), "--overwrite needs --out"),
        (("my_zoo:plain", "--input", "1x8x8"), "works on residual branches"),
        (("my_zoo:normless", "--input", "1x8x8", "--fold-batchnorm"), "expected a model with batch norms, but"),
    ],
)
def test_what_cannot_be_done_is_one_line(run: Run, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} <= {"my_zoo.py", "__pycache__"}


def test_torchvision_model_is_converted(run: Run) -> None:
    status, out, _ = run("torchvision:resnet18", "--input", "3x32x32", "--batch", "2", "-m", "skipinit")
    assert status == 0
    assert "8 residual branches in 4 stages" in out
    assert "removed  20 × BatchNorm2d" in out
