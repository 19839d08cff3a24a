import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import normfree
from normfree.cli import main
from normfree.cli.train import _log_shown
from normfree.train import RunFolder, TrainConfig, read_config, recipe
from normfree.train.engine import loop as engine
from normfree.train.engine.step import TrainStep
from normfree.train.recipes import configuration, recipes
from normfree.train.run.run_records import Score
from tiny_images import tiny_images

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--set", "model=cnn-4-8", "--set", "method=he_in", "--set", "epochs=2", "--set", "batch_size=16")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command line in this process and an empty folder, with a few images: exit status, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR", "NORMFREE_TRACEBACK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "normfree.train.data_sources.load", lambda name, root: tiny_images(name=name, linear_accuracy=0.835)
    )
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


def is_one_line_error(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text


def result(folder: str = "run") -> dict[str, Any]:
    return RunFolder(folder).read_result()


def stop_at(monkeypatch: pytest.MonkeyPatch, call: int, number: int) -> None:
    original, calls = TrainStep.__call__, 0

    def step(self: TrainStep) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        original(self)

    monkeypatch.setattr(TrainStep, "__call__", step)


# Without training


@pytest.mark.parametrize("arguments", [["train", "--help"], ["evaluate", "--help"], ["train", "--list"]])
def test_help_and_list_answer_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from normfree.cli import main\n"
        f"try:\n    main({arguments!r})\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_list_names_every_recipe(run: Run) -> None:
    status, out, err = run("train", "--list")
    assert (status, err) == (0, "")
    firsts = [line.split()[0] for line in out.splitlines() if line.split()]
    assert [first for first in firsts if first in recipes()] == list(recipes())
    status, out, err = run("train", "--list", "--json")
    assert [record["name"] for record in json.loads(out)] == list(recipes())


def test_show_prints_the_effective_configuration(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("lr = 0.3\nepochs = 7\n")
    status, out, err = run(
        "train", "fixup_cifar", "--config", "mine.toml", "--set", "lr=0.2", "--device", "cpu", "--show"
    )
    assert (status, err) == (0, "")
    (tmp_path / "shown.toml").write_text(out)
    shown = normfree.TrainConfig.from_toml(tmp_path / "shown.toml")
    assert shown == normfree.recipe("fixup_cifar", lr=0.2, epochs=7, device="cpu")
    assert not (tmp_path / "runs").exists()


def test_show_says_what_every_setting_means(run: Run) -> None:
    lines = run("train", "--show")[1].splitlines()
    fields = list(normfree.TrainConfig.__dataclass_fields__)
    assert [line.removeprefix("# ").split()[0] for line in lines] == fields
    assert all(len(line.partition("  # ")[2]) > 5 for line in lines)
    assert '# "sgd", "adam", "adamw": ' in lines[fields.index("optimizer")]


def test_options_stand_for_settings(run: Run) -> None:
    short = ("--model", "resnet8", "-m", "he_in", "--data", "mnist", "--data-dir", "d", "--epochs", "3", "--lr", "0.2")
    names = ("model", "method", "data", "data_dir", "epochs", "lr")
    changes = [f"--set={name}={value}" for name, value in zip(names, short[1::2], strict=True)]
    shown = run("train", "fashion", *short, "--show")[1]
    assert shown == run("train", "fashion", *changes, "--show")[1]
    assert shown != run("train", "fashion", "--show")[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lr", "fast"], "expected a number for 'lr', got 'fast'"),
        (["--lr", "1", "--set", "lr=2"], "'lr' twice"),
        (["--set", "lr"], "'name=value'"),
        (["--set", "lrr=1"], "did you mean 'lr'"),
        (["--set", "lr=fast"], "expected a number for 'lr', got 'fast'"),
        (["--set", "lr=-1"], "expected 'lr' above 0"),
        (["--set", "lr=1", "--set", "lr=2"], "'lr' twice"),
        (["fashon"], "fashion"),
        (["--config", "none.toml"], "none.toml"),
        (["--resume", "none"], "expected a run in 'none'"),
        (["--resume", "none", "--out", "other"], "--resume cannot be combined with --out"),
        (["--resume", "none", "--overwrite"], "--overwrite cannot be combined with --resume"),
        (["fashion", "--overwrite"], "--overwrite needs --out"),
        (["fashion", "--device", "toaster"], "expected a device such as cpu or cuda"),
        (["--set", "data=cifar11"], "cifar10"),
        (["--set", "graph=true"], "expected a GPU for graph=true"),
        (["--set", "model=no_such_module:make"], "'no_such_module'"),
    ],
)
def test_mistakes_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str) -> None:
    from normfree.data import load

    monkeypatch.setattr("normfree.train.data_sources.load", load)
    status, out, err = run("train", *arguments)
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert says in err


# Training


def test_train_prints_plain_lines_and_keeps_the_run(run: Run, tmp_path: Path) -> None:
    status, out, err = run("train", "fashion", *SMALL)
    assert (status, err) == (0, "")  # so short that there is no progress to tell
    assert "\x1b[" not in out
    lines = out.splitlines()
    assert lines[0] == "cnn-4-8 (he_in) on fashion14, 2 of 2 epochs"
    assert [line.split()[0] for line in lines[1:4]] == ["training", "validation", "test"]
    assert lines[4] == "for comparison: a linear classifier gets 83.50 %"
    folder = Path("runs/cnn-4-8-he_in-fashion14-seed0")
    assert lines[5].endswith(str(folder))
    record = result(str(folder))
    assert record["status"] == "finished"
    assert f"test        accuracy {100 * record['test']['accuracy']:.2f} %" in out
    run("train", "fashion", *SMALL)
    assert RunFolder(f"{folder}-2").status == "finished"


@pytest.mark.parametrize(
    ("warmup", "unit", "told"),
    [(3, "epochs", True), (1, "epochs", False), (10_000, "steps", True), (1, "steps", False)],
)
def test_warm_up_that_outlasts_the_run_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, warmup: int, unit: str, told: bool
) -> None:
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)
    _, out, err = run("train", "fashion", *SMALL, "--set", f"warmup={warmup}", "--set", f"warmup_in={unit}")
    for text in (out, err):  # at the end, and as soon as it is known
        assert (f"the warm-up of {warmup} {unit} is longer than the run" in " ".join(text.split())) == told


@pytest.mark.parametrize(("size", "told"), [(71, False), (72, True), (100, True)])
def test_batch_that_takes_all_images_is_told(run: Run, size: int, told: bool) -> None:
    out = run("train", "fashion", *SMALL[:-1], f"batch_size={size}")[1]
    assert (f"a batch of {size} holds all training images" in " ".join(out.split())) == told


def test_progress_is_plain_lines_when_not_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normfree.report.terminal.EVERY", 0.0)
    monkeypatch.setattr("normfree.report.terminal._SHARE", 0.0)
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)
    status, _, err = run("train", *SMALL, "--out", "run")
    assert status == 0
    assert "\x1b[" not in err
    assert "\r" not in err
    lines = err.splitlines()
    assert len(lines) == 11
    assert lines[4].startswith("cnn-4-8: 5 of 10 done after ")
    assert "images/s" in lines[4]


def test_json_is_the_result(run: Run) -> None:
    status, out, _ = run("train", *SMALL, "--out", "run", "--json")
    assert status == 0
    printed = json.loads(out)
    record = result()
    assert printed["folder"] == "run"
    assert {name: record[name] for name in printed if name != "folder"} == {
        name: value for name, value in printed.items() if name != "folder"
    }


def test_result_names_the_command_without_folders(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my file.toml").write_text("lr = 0.05\n")
    places = ("--config", str(tmp_path / "my file.toml"), "--out", str(tmp_path / "run"), "--data-dir", str(tmp_path))
    run("train", "fashion", *SMALL, *places, "--device", "cpu")
    record = result()
    begins = f"normfree train fashion --data-dir {tmp_path.name} --device cpu --set model=cnn-4-8 --set method=he_in"
    assert record["command"].startswith(begins)
    assert record["command"].endswith("--out run")
    assert str(tmp_path) not in json.dumps(record)
    assert record["config"]["lr"] == 0.05
    assert set(record) >= {"commit", "versions", "hardware", "seed", "date"}


def test_configuration_of_a_run_is_a_configuration(run: Run) -> None:
    run("train", *SMALL, "--set", "crop=2", "--set", "ema=0.9", "--out", "one")
    assert run("train", "--config", "one/config.toml", "--out", "two")[0] == 0
    assert read_config("one") == read_config("two")
    assert result("one")["test"] == result("two")["test"]


def test_evaluate_gives_the_test_score_of_the_run(run: Run) -> None:
    run("train", *SMALL, "--set", "ema=0.9", "--out", "run")
    status, out, err = run("evaluate", "run", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == result()["test"]
    status, out, _ = run("evaluate", "run")
    assert f"accuracy {100 * result()['test']['accuracy']:.2f} %" in out
    status, out, err = run("evaluate", "none")
    assert (status, out) == (2, "")
    assert is_one_line_error(err)


# How it ends


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_is_the_exit_status_and_the_run_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    run("train", *SMALL, "--out", "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 3, number)
        found, out, _ = run("train", *SMALL, "--out", "run")
    assert found == status
    assert f"stopped by {signal.Signals(number).name}; continue with: normfree train --resume run" in out
    assert (result()["status"], result()["signal"], result()["steps"]) == ("interrupted", number, 3)
    assert run("train", "--resume", "run")[0] == 0
    assert result()["test"] == result("whole")["test"]
    assert result()["command"] == "normfree train --resume run"


def test_progress_of_a_resumed_run_starts_where_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from normfree.report import terminal

    begun: list[int] = []
    original = terminal.progress

    def noted(what: str, **options: Any) -> Any:
        begun.append(options["done"])
        return original(what, **options)

    monkeypatch.setattr(terminal, "progress", noted)
    with monkeypatch.context() as patch:
        stop_at(patch, 7, signal.SIGTERM)
        run("train", *SMALL, "--out", "run")
    run("train", "--resume", "run")
    assert begun == [0, 7]


def test_divergence_has_its_own_exit_status(run: Run) -> None:
    status, out, err = run("train", *SMALL, "--set", "lr=1e6", "--out", "run")
    assert (status, err) == (3, "")
    assert "diverged: the loss is no longer finite" in out
    assert out.endswith("or see where the signal goes with: normfree diagnose run\n")
    assert "Traceback" not in out
    assert result()["status"] == "diverged"
    status, out, err = run("train", "--resume", "run")
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert "diverged; start another one" in err


def test_a_run_that_only_guesses_says_so(run: Run) -> None:
    small = ("--set", "model=resnet8", "--set", "epochs=4", "--set", "batch_size=16")  # Fixup starts from a guess
    status, out, _ = run("train", *small, "--set", "lr=1e-9", "--out", "still")
    assert status == 0
    classes = result("still")["classes"]
    assert f"nothing was learned: the test loss, {math.log(classes):.4g}, is that of a guess among 10 classes" in out
    assert out.endswith("with: normfree diagnose still\n")
    assert run("diagnose", "still")[0] == 0
    status, out, _ = run("train", *small, "--set", "lr=0.1", "--out", "learns")
    assert status == 0
    assert result("learns")["train_loss"] < 0.99 * math.log(classes)
    assert "nothing was learned" not in out


def test_resume_refuses_changes_by_name(run: Run) -> None:
    run("train", *SMALL, "--out", "run")
    status, _, err = run("train", "--resume", "run", "--set", "seed=1")
    assert status == 2
    assert is_one_line_error(err)
    assert "has seed=0, but this command gives seed=1" in err


def test_longer_run_and_another_one_in_its_folder(run: Run) -> None:
    run("train", *SMALL, "--out", "run")
    config = RunFolder("run").read_config()
    status, _, err = run("train", "--resume", "run", "--epochs", config.epochs + 1)
    assert status == 0, err
    assert f"continues with epochs={config.epochs + 1}" in err
    status, _, err = run("train", *SMALL, "--out", "run")
    assert status == 2
    assert "replace it with --overwrite" in err
    assert run("train", *SMALL, "--out", "run", "--overwrite")[0] == 0
    assert RunFolder("run").read_config() == config


def test_full_disk_is_one_line_and_the_run_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        append = RunFolder.append

        def full(self: RunFolder, record: dict[str, Any]) -> None:
            if record["epoch"] == 2:
                patch.setattr("normfree.train.run.checkpoint.temporary_folder", no_room)
            append(self, record)

        def no_room(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(RunFolder, "append", full)
        status, out, err = run("train", *SMALL, "--out", "run")
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert "No space left on device; free some room on the disk; the earlier checkpoint is intact" in err
    assert run("train", "--resume", "run")[0] == 0
    assert len(RunFolder("run").read_metrics()) == 2


def test_damaged_or_held_runs_are_one_line(run: Run) -> None:
    run("train", *SMALL, "--out", "run")
    with RunFolder("run").hold(resume=True):
        status, _, err = run("train", "--resume", "run")
    assert (status, is_one_line_error(err)) == (2, True)
    assert "is held by process" in err
    for weights in Path("run").glob("checkpoint-*/weights.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    for arguments in (("train", "--resume", "run"), ("evaluate", "run")):
        status, out, err = run(*arguments)
        assert (status, out, is_one_line_error(err)) == (2, "", True)
        assert "weights.safetensors' is damaged" in err


def test_file_in_the_place_of_the_folder_is_one_line(run: Run) -> None:
    Path("file").write_text("mine")
    status, _, err = run("train", *SMALL, "--out", "file")
    assert (status, is_one_line_error(err)) == (2, True)
    assert "a file is in the way of the folder: move it" in err


def test_evaluation_that_is_not_finite_is_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("train", *SMALL, "--out", "run")
    monkeypatch.setattr("normfree.train.evaluate", lambda *_, **__: Score(math.nan, 0.1))
    status, out, _ = run("evaluate", "run", "--json")
    assert status == 0

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    assert json.loads(out, parse_constant=refuse) == {"loss": "nan", "accuracy": 0.1}


def test_method_of_a_plugin_is_trained_resumed_and_evaluated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from normfree.methods.method_registry import unregister

    Path("half_train_plugin.py").write_text(
        "from dataclasses import replace\n"
        "import normfree as nf\n"
        "from normfree.methods import get\n"
        "nf.register(replace(get('he_in'), name='half_train'))\n"
    )
    plugin = ("--plugin", "half_train_plugin")

    def once(*arguments: str) -> tuple[int, str, str]:
        """As a process of its own would, which has not imported it yet."""
        try:
            return run(*arguments)
        finally:
            if sys.modules.pop("half_train_plugin", None) is not None:
                unregister("half_train")

    changed = (*SMALL[:2], "--set", "method=half_train", *SMALL[4:])
    status, _, err = once("train", *changed, "--out", "run")
    assert (status, is_one_line_error(err)) == (2, True)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        assert once("train", *changed, *plugin, "--out", "run")[0] == 143
    assert once("train", "--resume", "run", *plugin)[0] == 0
    assert result()["command"] == "normfree train --resume run --plugin half_train_plugin"
    status, out, _ = once("evaluate", "run", *plugin)
    assert status == 0
    assert "(half_train)" in out


def test_show_prepares_nothing(run: Run) -> None:
    for name in ("tiny.train.de", "tiny.train.en"):
        Path(name).write_text("one two\n")
    files = ("--source", "tiny.train.de", "--target", "tiny.train.en")
    status, out, err = run("train", "translation", *files, "--show")
    assert (status, err) == (0, "")
    assert 'data = "pairs:.data/tiny-8000"' in out
    assert sorted(path.name for path in Path().iterdir()) == ["tiny.train.de", "tiny.train.en"]


def test_train_shows_its_log_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("normfree.train")
    with _log_shown(True):
        log.info("kernels: stage")
    log.info("after")
    with _log_shown(False):
        log.info("another process")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "kernels: stage\n")


def test_configuration_puts_a_file_over_the_recipe_and_changes_over_both(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("lr = 0.3\nepochs = 7\n")
    found = configuration("fixup_cifar", file=tmp_path / "mine.toml", changes=["lr=0.2"])
    assert found == recipe("fixup_cifar", lr=0.2, epochs=7)
    assert configuration(changes=["seed=3"]) == TrainConfig(seed=3)


def test_configuration_of_a_model_says_where_its_name_belongs() -> None:
    with pytest.raises(ValueError, match="got the model 'resnet20'; give it as --model resnet20"):
        configuration("resnet20")
