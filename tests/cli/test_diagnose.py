"""`normfree diagnose` in this process: what it prints, writes and refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model

import normfree
from normfree.cli import main
from normfree.cli.options import load_plugins
from normfree.diagnostics import diagnose
from normfree.methods import unregister
from normfree.models import build
from normfree.models.third_party import create_model
from normfree.train import TrainConfig, fit, load

Run = Callable[..., tuple[int, str, str]]
SMALL = ("resnet8", "--input", "3x16x16", "--batch", "4")

FACTORIES = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = scale
    def forward(self, x):
        return x + self.scale * self.layer(x.relu())

class Net(nn.Module):
    def __init__(self, scale=0.1, depth=20):
        super().__init__()
        self.stem, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.Sequential(*(Block(scale) for _ in range(depth)))
    def forward(self, x):
        return self.out(self.blocks(self.stem(x)))

def good():
    return Net()

def exploding():
    return Net(8.0)

class Words(Net):
    def __init__(self):
        super().__init__()
        self.stem = nn.Embedding(9, 6)

class Named(Net):
    def forward(self, left, right):
        return super().forward(left - right)

def words():
    return torch.randint(0, 9, (4, 5))

def pair():
    return torch.randn(4, 6), torch.randn(4, 6)

def named():
    return dict(zip(("left", "right"), pair()))

class Dropping(Net):
    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = x if i == 3 and self.training and not x.is_meta else block(x)
        return self.out(x)

class Images(Net):
    def __init__(self):
        super().__init__()
        self.stem, self.out = nn.Sequential(nn.Flatten(), nn.Linear(196, 6)), nn.Linear(6, 10)

class Tied(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].layer.weight = self.blocks[0].layer.weight

def failing():
    raise RuntimeError("the factory's own trouble")

def plain():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process: exit status, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR", "NORMFREE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["diagnose", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a module of factories; path and modules as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "my_factories", raising=False)
    (tmp_path / "my_factories.py").write_text(FACTORIES)
    (tmp_path / "my_broken.py").write_text("undefined\n")
    yield tmp_path
    sys.modules.pop("my_factories", None)


def refused(result: tuple[int, str, str], *says: str) -> None:
    """Exit status 2, nothing on stdout, one line on stderr that says what is wrong."""
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(text in err for text in says), err


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_two_methods_are_compared(run: Run) -> None:
    status, out, err = run("resnet20", "-m", "he_in", "-m", "fixup", "--input", "3x16x16", "--batch", "4")
    assert (status, err) == (0, "")
    assert "\x1b[" not in out
    assert "he_in: exploding" in out
    assert "fixup: preserved" in out
    assert "the classifier is zero and lets no gradient through" in out


def test_method_is_fixup_unless_given(run: Run) -> None:
    assert run(*SMALL)[1] == run(*SMALL, "-m", "fixup")[1] == run(*SMALL, "-m", "fixup", "-m", "fixup")[1]


def test_json_is_what_the_library_says(run: Run) -> None:
    status, out, err = run(*SMALL, "-m", "he_in", "-m", "hanin:r=0.8", "--json", "--seed", "3")
    assert (status, err) == (0, "")
    records = strict(out)
    assert [record["name"] for record in records] == ["he_in", "hanin:r=0.8"]
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    model = build("resnet8", "he_in", example=x, generator=torch.Generator().manual_seed(3))
    expected = diagnose(model, x, generator=torch.Generator().manual_seed(3)).signal
    assert [s["sum"]["variance"] for s in records[0]["signal"]["sums"]] == expected.series("sum")
    assert [s["sum_gradient"]["norm"] for s in records[0]["signal"]["sums"]] == expected.series("sum_gradient", "norm")


def test_seed_changes_and_repeats_the_run(run: Run) -> None:
    first, again, other = (run(*SMALL, "-m", "he_in", "--json", "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_global_random_state_is_left_alone(run: Run, folder: Path) -> None:
    before = torch.get_rng_state()
    run(*SMALL)
    run("my_factories:good", "--input", "6")
    assert torch.equal(torch.get_rng_state(), before)


def test_torchvision_model_is_diagnosed(run: Run) -> None:
    status, out, err = run("torchvision:resnet18", "--input", "3x64x64", "--batch", "2")
    assert (status, err) == (0, "")
    assert "torchvision:resnet18: preserved" in out


def test_timm_model_is_diagnosed(run: Run) -> None:
    status, out, _ = run("timm:test_resnet", "--input", "3x64x64", "--batch", "4", "--json", "--eval")
    assert status == 0
    (record,) = strict(out)
    assert record["name"] == "timm:test_resnet"
    assert len(record["signal"]["sums"]) == 4


def test_factory_of_the_current_folder_is_diagnosed(run: Run, folder: Path) -> None:
    status, out, _ = run("my_factories:good", "--input", "6")
    assert status == 0
    assert "my_factories:good: preserved" in out
    assert run("my_factories:Net", "--input", "6")[0] == 0  # a class is a factory too


def test_evaluation_mode_is_another_signal(run: Run) -> None:
    training, evaluation = (run(*SMALL, "-m", "batchnorm", "--json", *flag)[1] for flag in ((), ("--eval",)))
    assert training != evaluation


# Exit status for use in CI.


@pytest.mark.parametrize(
    ("factory", "status", "expected"),
    [
        ("good", "growing", 0),
        ("good", "exploding", 0),
        ("exploding", "exploding", 1),
        ("exploding", "vanishing", 1),
        ("exploding", "dead branch", 0),
    ],
)
def test_fail_on_sets_the_exit_status(run: Run, folder: Path, factory: str, status: str, expected: int) -> None:
    code, out, _ = run(f"my_factories:{factory}", "--input", "6", "--fail-on", status)
    assert code == expected
    assert f"my_factories:{factory}:" in out


def test_fail_on_still_writes_the_report(run: Run, folder: Path) -> None:
    code, _, err = run("my_factories:exploding", "--input", "6", "--fail-on", "exploding", "-o", "report.json")
    assert code == 1
    assert "wrote report.json" in err
    assert strict((folder / "report.json").read_text())[0]["verdict"]["status"] == "exploding"


# Files.


def test_out_writes_every_kind(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / f"report.{suffix}" for suffix in ("html", "png", "svg", "json")]
    status, _, err = run(*SMALL, "-m", "he_in", "-m", "fixup", *(part for path in paths for part in ("-o", path)))
    assert status == 0
    assert err.count("wrote") == 4
    assert [path.read_bytes()[:4] for path in paths] == [b"<!do", b"\x89PNG", b"<?xm", b"[\n {"]


def test_data_is_used_instead_of_noise(run: Run, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "batch.npy", x.numpy())
    save_file({"inputs": x}, tmp_path / "batch.safetensors")
    noise = run(*SMALL, "-m", "he_in", "--json")[1]
    for name in ("batch.npy", "batch.safetensors"):
        assert run("resnet8", "-m", "he_in", "--data", tmp_path / name, "--json")[1] == noise  # the same numbers
    np.save(tmp_path / "other.npy", 3 * x.numpy())
    assert run("resnet8", "-m", "he_in", "--data", tmp_path / "other.npy", "--json")[1] != noise


@pytest.mark.parametrize(("model", "example"), [("Words", "words"), ("Named", "pair"), ("Named", "named")])
def test_example_may_be_a_tensor_a_tuple_or_a_dict(run: Run, folder: Path, model: str, example: str) -> None:
    state = torch.get_rng_state()
    arguments = (f"my_factories:{model}", "--example", f"my_factories:{example}")
    status, out, err = run(*arguments)
    assert status == 0, err
    assert f"my_factories:{model}: preserved" in out
    assert run(*arguments)[1] == out
    assert run(*arguments, "--seed", "1")[1] != out
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_whole_numbers_are_words(run: Run, folder: Path, dtype: Any) -> None:
    np.save("words.npy", (np.arange(20).reshape(4, 5) % 9).astype(dtype))
    status, out, err = run("my_factories:Words", "--data", "words.npy")
    assert status == 0, err
    assert "my_factories:Words: preserved" in out


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_whole_numbers_are_pixels_of_a_model_of_images(run: Run, tmp_path: Path, dtype: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (4, 3, 16, 16))
    np.save(tmp_path / "pixels.npy", pixels.astype(dtype))
    np.save(tmp_path / "numbers.npy", pixels.astype(np.float32))
    found = [run("resnet8", "-m", "he_in", "--data", tmp_path / f"{name}.npy") for name in ("pixels", "numbers")]
    assert found[0] == found[1]
    assert found[0][0] == 0


def test_targets_of_the_data_give_a_loss(run: Run, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    save_file({"inputs": x, "targets": torch.tensor([0, 1, 2, 3])}, tmp_path / "batch.safetensors")
    (record,) = strict(run("resnet8", "-m", "he_in", "--data", tmp_path / "batch.safetensors", "--json")[1])
    assert record["signal"]["loss"] > 0
    assert record["signal"]["injected"] == ""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.npy", "found none"),
        ("text.npy", "expected numbers in"),
        ("objects.npy", "expected numbers in"),
        ("text.safetensors", "is damaged"),
        ("others.safetensors", "expected a batch with a tensor 'inputs'"),
        ("batch.pt", "expected --data to end in .safetensors or .npy"),
        ("flat.npy", "expected an example of images"),
        ("labels.safetensors", "got numbers from 1 to 99"),
        ("empty.safetensors", "is damaged"),
        ("empty.npy", "expected numbers in"),
    ],
)
def test_wrong_data_is_refused(run: Run, tmp_path: Path, name: str, says: str) -> None:
    for file in ("text.npy", "text.safetensors", "batch.pt"):
        (tmp_path / file).write_text("this is no array")
    for file in ("empty.safetensors", "empty.npy"):
        (tmp_path / file).touch()
    np.save(tmp_path / "objects.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    np.save(tmp_path / "flat.npy", np.zeros((4, 5), dtype=np.float32))
    save_file({"x": torch.zeros(1)}, tmp_path / "others.safetensors")
    far = {"inputs": torch.randn(2, 3, 16, 16), "targets": torch.tensor([1, 99])}
    save_file(far, tmp_path / "labels.safetensors")
    refused(run("resnet8", "-m", "he_in", "--data", tmp_path / name), says)


@pytest.mark.parametrize("place", ["weights.safetensors", "part/weights.safetensors"])
def test_checkpoint_is_loaded(run: Run, tmp_path: Path, place: str) -> None:
    (tmp_path / "config.toml").write_text("[tool]\n")  # somebody's own, which makes no run of the folder
    weights = tmp_path / place
    weights.parent.mkdir(exist_ok=True)
    x = torch.zeros(2, 3, 16, 16)
    model = build("resnet8", "he_in", example=x, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    save_model(model, str(weights))
    fresh, loaded = (
        strict(run(*SMALL, "-m", "he_in", "--json", *options)[1])[0]["signal"]
        for options in ((), ("--checkpoint", weights))
    )
    norms = {layer["name"]: layer["weight_norm"] for layer in loaded["layers"]}
    for name, norm in norms.items():
        assert norm == pytest.approx(model.get_parameter(f"{name}.weight").norm().item(), rel=1e-5)
    assert fresh["sums"] != loaded["sums"]


def test_checkpoint_of_a_model_with_tied_weights_is_loaded(run: Run, folder: Path) -> None:
    save_model(create_model("my_factories:Tied"), "tied.safetensors")
    assert run("my_factories:Tied", "--input", "6", "--checkpoint", "tied.safetensors")[0] == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("weights.pt", "other formats can run code"),
        ("none.safetensors", "found none"),
        ("damaged.safetensors", "is damaged"),
        ("deeper.safetensors", "unknown tensors"),
        ("shallower.safetensors", "missing"),
        ("wider.safetensors", "to fit the model"),
    ],
)
def test_wrong_checkpoint_is_refused(run: Run, tmp_path: Path, name: str, says: str) -> None:
    model = build("resnet14", "he_in")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    save_model(model, str(tmp_path / "deeper.safetensors"))
    save_file({"stem.conv.weight": model.get_parameter("stem.conv.weight")}, tmp_path / "shallower.safetensors")
    save_model(build("resnet8", "he_in", num_classes=12), str(tmp_path / "wider.safetensors"))
    whole = (tmp_path / "deeper.safetensors").read_bytes()
    (tmp_path / "damaged.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(run(*SMALL, "-m", "he_in", "--checkpoint", tmp_path / name), says)


# Refusals.


@pytest.mark.parametrize(
    ("model", "second", "says", "measured"),
    [
        ("resnet8", "nope", "unknown method 'nope'", 0),
        ("mlp-4-16", "fixup", "expected one of", 0),
        ("resnet8", "batchnorm", "", 2),
    ],
)
def test_all_methods_are_checked_before_the_first_is_measured(
    model: str, second: str, says: str, measured: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import normfree.cli.diagnose as verb

    calls: list[str] = []
    diagnose = verb._diagnose

    def count(*args: Any, **options: Any) -> Any:
        calls.append(args[1])
        return diagnose(*args, **options)

    monkeypatch.setattr(verb, "_diagnose", count)
    result = run(model, "--input", "3x16x16", "-m", "he_in", "-m", second)
    if says:
        refused(result, says)
    assert len(calls) == measured


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("resnt20",), "did you mean 'resnet20'"),
        ((*SMALL, "-m", "fixupp"), "did you mean 'fixup'"),
        ((*SMALL, "-o", "missing/report.html"), "make the folder first"),
        ((*SMALL, "-o", "report.pdf"), "expected --out to end in .html, .png, .svg or .json, got 'report.pdf'"),
        (
            (*SMALL, "--fail-on", "bad"),
            "expected --fail-on to be one of growing, drifting, vanishing, exploding, faulty, dead branch",
        ),
        ((*SMALL, "--device", "nope"), "expected a device such as cpu or cuda, got 'nope'"),
        ((*SMALL, "--device", "cuda:99"), "expected a device such as cpu or cuda, got 'cuda:99'"),
        ((*SMALL, "--device", "meta"), "expected a device such as cpu or cuda, got 'meta'"),
        (("resnet8", "--input", "3x16"), "give channels, height and width, such as 3x32x32"),
        (("my_factories.py:good", "--input", "6"), "leave out folders and the ending .py; write my_factories:good"),
        (("./my_factories.py:good",), "write my_factories:good"),
        (
            ("my_factories",),
            "got the file my_factories.py; name a factory in it: normfree diagnose my_factories:F",
        ),
        (("my_factories.py",), "normfree diagnose my_factories:FACTORY"),
        (("./my_factories.py",), "got the file './my_factories.py'; give a model name or module:factory"),
        (("some_folder",), "expected a run in 'some_folder', found no config.toml there; give the folder that"),
        ((*SMALL, "--device", "cuda:99"), "; auto takes a CUDA GPU if there is one"),
        ((*SMALL, "--checkpoint", "nofile"), "expected a checkpoint at 'nofile', found none; check the path, or write"),
        (("transformer-1-1-16-32-2", "-m", "batchnorm"), "'sequence'; expected one of: "),
        (("transformer-1-1-16-32-2", "-m", "batchnorm"), "layernorm"),
        (("resnet8", "--input", "3xx16"), "expected --input such as 3x224x224, got '3xx16'; write whole"),
        (("resnet8", "--input", "3x-1x16"), "expected --input such as"),
        (("resnet8", "--input", "0x16x16"), "expected --input such as"),
        (("resmlp-4-8", "-m", "he_in", "--batch", "1"), "use a larger batch"),
        (("mlp-4-8", "--widths", "8,16"), "expected a model with {} in place of its width"),
        (("mlp-4-{}", "--widths", "8"), "two or more --widths"),
        (("torchvision:resnet18", "-m", "fixup"), "leave --method out"),
        (("torchvision:resnet18", "--input", "5x64x64"), "check the shape of the example"),
        (("torchvision:resnet81",), "unknown model of torchvision 'resnet81'; did you mean 'resnet18'"),
        (("mlp-4-{}", "--widths", "8,16", "--out", "a.html"), "expected --out to end in .png, .svg or .json"),
        (
            ("my_factories:good", "--input", "7"),
            "check the shape of the example, (8, 7), and pass one that the model accepts",
        ),
        (("my_factories:Dropping", "--input", "6"), "use evaluation mode (--eval) where blocks are dropped at random"),
        (
            ("my_factories:failing", "--input", "6"),
            "'my_factories:failing' to run, but it stopped: RuntimeError: the fac",
        ),
        (
            ("my_factories:Named", "--example", "my_factories:pair", "--input", "6"),
            "--example cannot be combined with --input",
        ),
        (
            ("my_factories:Named", "--example", "my_factories:pair", "--data", "x.npy"),
            "--example cannot be combined with --data",
        ),
        (("my_factories:Named", "--example", "my_factories:failing"), "'my_factories:failing' to run, but it stopped"),
        (("resnet8", "--example", "my_factories:pair"), "--example is for third-party models"),
        ((*SMALL, "--plugin", "no_such_plugin"), "no_such_plugin"),
        ((*SMALL, "--plugin", "my_broken"), "'my_broken' failed: NameError"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(run: Run, folder: Path, arguments: tuple[str, ...], says: str) -> None:
    for name in ("some_folder", "resnet8"):  # a folder that merely has the name of a model is none's
        (folder / name).mkdir()
    refused(run(*arguments), says)
    assert not list(folder.glob("report*"))


def test_batch_below_one_is_a_usage_error(run: Run) -> None:
    status, out, err = run("resnet8", "--batch", "0")
    assert (status, out) == (2, "")
    assert "--batch" in err


def test_traceback_is_shown_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFREE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="check the shape of the example"):
        main(["diagnose", "my_factories:good", "--input", "7"])


def test_diagnosing_a_model_imports_no_training() -> None:
    code = (
        "import sys; from normfree.cli import main\n"
        "try:\n    main(['diagnose', 'resmlp-2-8', '-m', 'he_in'])\n"
        "finally:\n    rooms = ('normfree.train', 'normfree.data', 'normfree_papers')\n"
        "    print([name for name in sys.modules if name.startswith(rooms)])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


def test_command_in_a_process_of_its_own(folder: Path) -> None:
    """As a user runs it, in the folder of the factory."""
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "normfree",
            "diagnose",
            "my_factories:exploding",
            "--input",
            "6",
            "--fail-on",
            "growing",
        ],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 1, done.stderr
    assert "my_factories:exploding: exploding" in done.stdout


def test_block_that_stands_out_is_named_and_counts(run: Run, folder: Path) -> None:
    with (folder / "my_factories.py").open("a") as file:
        file.write("\ndef one_bad():\n    net = Net()\n    net.blocks[7].layer.weight.data.mul_(100)\n    return net\n")
    status, out, _ = run("my_factories:one_bad", "--input", "6", "--batch", "32", "--fail-on", "vanishing")
    assert status == 1
    assert "my_factories:one_bad: exploding: block too large at blocks.7" in out
    assert "look at blocks.7" in out
    assert run("my_factories:one_bad", "--input", "6", "--batch", "32", "--fail-on", "exploding")[0] == 1
    assert run("my_factories:one_bad", "--input", "6", "--batch", "32", "--fail-on", "faulty")[0] == 0
    (record,) = strict(run("my_factories:one_bad", "--input", "6", "--batch", "32", "--json")[1])
    assert [odd["name"] for odd in record["verdict"]["odd"]] == ["blocks.7"]


def test_network_without_sums_is_measured_at_its_layers(run: Run) -> None:
    status, out, _ = run("mlp-40-32", "-m", "he_in", "-m", "xavier", "--fail-on", "vanishing")
    assert status == 1
    assert "signal through the weight layers" in out
    assert "he_in: preserved" in out
    assert "xavier: vanishing: forward signal" in out
    assert "He's initialization ('he_in')" in out


def test_network_without_sums_needs_no_method(run: Run) -> None:
    status, out, _ = run("mlp-20-16")
    assert (status, "he_in: " in out) == (0, True)
    assert "fixup: " in run("resmlp-4-8")[1]


def test_input_that_is_not_finite_is_status_one(run: Run, folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    np.save(folder / "good.npy", x)
    x[1, 2] = np.nan
    np.save(folder / "bad.npy", x)
    assert run("my_factories:good", "--data", "good.npy")[0] == 0
    status, out, _ = run("my_factories:good", "--data", "bad.npy")
    assert status == 1
    assert "faulty: input not finite at the input" in out


def test_widths_are_compared(run: Run, folder: Path) -> None:
    status, out, _ = run("resmlp-2-{}", "--widths", "8,16,32", "-m", "he_in", "-o", "c.png", "-o", "c.json")
    assert status == 0
    assert "width 16" in out
    record = strict((folder / "c.json").read_text())
    assert record["widths"] == [8, 16, 32]
    assert (folder / "c.png").read_bytes().startswith(b"\x89PNG")


# Folders of runs and of converted models.


def trained(folder: str, model: str = "resnet8", **settings: Any) -> Path:
    """A run of a few steps on the embedded images."""
    config = TrainConfig(model=model, epochs=1, batch_size=500, validation=0.8, device="cpu", **settings)
    fit(config, out=folder)
    return Path(folder)


def test_folder_of_a_run_is_diagnosed(run: Run, folder: Path) -> None:
    made = trained("runs/one", method="batchnorm")
    status, out, err = run(made, "--json")
    assert (status, err) == (0, "")
    (record,) = strict(out)
    assert record["name"] == "runs/one"
    model = load(made)
    norms = {layer["name"]: layer["weight_norm"] for layer in record["signal"]["layers"]}
    for name, norm in norms.items():
        assert norm == pytest.approx(model.get_parameter(f"{name}.weight").norm().item(), rel=1e-5)
    assert run(made, "--input", "1x14x14", "--batch", "8", "--json")[1] == out  # the shape of its images
    assert run(made, "--input", "1x20x20", "--json")[1] != out
    (inside,) = made.glob("checkpoint-*/weights.safetensors")
    instead = "diagnose the folder instead: normfree diagnose runs/one"
    refused(run(*SMALL, "--checkpoint", inside), instead)
    refused(run(*SMALL, "--checkpoint", made), instead)
    refused(run(made, "-m", "fixup"), "expected the folder 'runs/one' alone, got --method too")
    refused(run(made, "--checkpoint", "weights.safetensors"), "got --checkpoint too")
    refused(run("runs"), "expected a run in 'runs', found no config.toml there")
    (folder / "runs/empty").mkdir()
    refused(run("runs/empty"), "expected a run in 'runs/empty'")


@pytest.mark.parametrize("method", ["as built", "fixup"])
def test_folder_of_a_run_of_somebody_elses_model_is_diagnosed(run: Run, folder: Path, method: str) -> None:
    made = trained("other", "my_factories:Images", method=method)
    status, _, err = run(made)
    assert status == 2
    assert "would import 'my_factories' and call 'Images'" in err
    status, out, err = run(made, "--trust")
    assert status == 0, err
    assert "other: " in out


def test_folder_of_a_run_with_a_plugin_is_diagnosed(run: Run, folder: Path) -> None:
    (folder / "my_method.py").write_text(
        "from dataclasses import replace\nfrom normfree.methods import get, register\n"
        "register(replace(get('he_in'), name='mine'))\n"
    )
    try:
        load_plugins(["my_method"])
        made = trained("mine", method="mine")
        assert run(made, "--plugin", "my_method")[0] == 0
    finally:
        unregister("mine")
    refused(run(made), "mine")


def test_folder_of_a_converted_model_is_diagnosed(run: Run, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", "torchvision:resnet18", "--input", "3x32x32", "--batch", "2", "--out", "converted"]
    with pytest.raises(SystemExit):
        main(arguments)
    capsys.readouterr()
    status, out, err = run("converted", "--batch", "4")
    assert status == 0, err
    assert "converted: preserved" in out
    refused(run(*SMALL, "--checkpoint", "converted/weights.safetensors"), "normfree diagnose converted")


# What the input was.


def test_shape_of_the_noise_is_told(run: Run, folder: Path) -> None:
    assert run("resnet8")[1].endswith("(the input was noise: --batch 8 --input 3x32x32)\n")
    assert run("torchvision:resnet18", "--batch", "2")[1].endswith("--batch 2 --input 3x224x224)\n")
    assert run("my_factories:good", "--input", "6")[1].endswith("--batch 8 --input 6)\n")
    assert run("decoder-1-16-32-2", "--input", "5")[1].endswith("--batch 8 --input 5)\n")
    assert run(trained("run"))[1].endswith("--batch 8 --input 1x14x14)\n")
    assert "the input was noise" not in run("my_factories:Words", "--example", "my_factories:words")[1]
    np.save("batch.npy", np.zeros((4, 3, 16, 16), dtype=np.float32))
    assert "the input was noise" not in run("resnet8", "--data", "batch.npy")[1]


def test_help_says_which_shape_is_used(run: Run) -> None:
    assert "3x224x224 for other models" in " ".join(run("--help")[1].replace("│", " ").split())


def test_batch_whose_activations_do_not_fit_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normfree.nn.devices.free_memory", lambda _: 1 << 27)
    status, _, err = run("resmlp-20-64", "--input", "3x8x8", "--batch", "20000", "--device", "cpu")
    assert status == 2
    assert err.startswith("error: expected the activations of 20,000 samples to fit into the memory")
    assert err.count("\n") == 1
