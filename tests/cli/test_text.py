"""The command line on text: prepare, train, translate, evaluate and compare, and one sentence for every mistake."""

import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import normfree
from normfree.cli import main
from normfree.cli.options import load_plugins
from normfree.data.text.prepared_folder import MANIFEST, open_prepared
from normfree.data.text.text_files import decode_lines
from normfree.methods import unregister
from normfree.train import RunFolder, TrainConfig, fit, read_config
from normfree.train.engine import loop as engine
from tiny_text import LETTERS, SIZE, tiny_pairs, tiny_text, write_pairs, write_text

Run = Callable[..., tuple[int, str, str]]
TINY = {"model": "transformer-1-1-16-32-2", "batch_size": "120", "warmup": "2", "beam": "2", "epochs": "1"}
LEARNS = {"model": "transformer-1-1-32-64-4", "batch_size": "400", "warmup": "20", "epochs": "7", "lr": "0.01"}
FILES = ("--source", "made.train.a", "--target", "made.train.b", "--vocabulary", str(SIZE))


def changed(settings: dict[str, str], **changes: str) -> list[str]:
    """Settings as a command line has them."""
    return [part for name, value in {**settings, **changes}.items() for part in ("--set", f"{name}={value}")]


ONE = (*changed(TINY), "--device", "cpu")


def is_one_line_error(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files, prepared data, and a run on them that no test changes."""
    pytest.importorskip("sentencepiece")
    pytest.importorskip("sacrebleu")
    folder = tmp_path_factory.mktemp("place")
    write_pairs(folder, counts={"train": 2000, "valid": 10, "test": 12})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(engine, "write_curves", lambda *_: None)
        for name in ("RANK", "WORLD_SIZE", "NORMFREE_TRACEBACK"):
            patch.delenv(name, raising=False)
        with pytest.raises(SystemExit) as caught:
            main(["train", "translation", *FILES, *changed(LEARNS, dropout="0", schedule="cosine"), "--out", "run"])
        assert not caught.value.code
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process, with bytes on standard input: exit status, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR", "NORMFREE_TRACEBACK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)

    def run(*arguments: str, given: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, place: Path, call: Run) -> Run:
    """`call` in the folder of the run."""
    monkeypatch.chdir(place)
    return call


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Run) -> Run:
    """`call` in an empty folder."""
    pytest.importorskip("sentencepiece")
    monkeypatch.chdir(tmp_path)
    return call


@pytest.fixture
def altered(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Run) -> Run:
    """`call` in a copy of the folder, which may be changed."""
    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return call


# Preparing


def test_help_answers_without_torch() -> None:
    code = (
        "import sys\n"
        "from normfree.cli import main\n"
        "for arguments in (['translate', '--help'], ['data', 'prepare', '--help']):\n"
        "    try:\n        main(arguments)\n"
        "    except SystemExit as stop:\n        assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_prepare_finds_the_splits_and_reports_what_is_left_out(empty: Run, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    with (tmp_path / "made.train.a").open("a") as source, (tmp_path / "made.train.b").open("a") as target:
        source.write("\na b\n" + "a " * 300 + "\n")
        target.write("a\nc d\nb\n")
    with (tmp_path / "made.test.a").open("a") as source, (tmp_path / "made.test.b").open("a") as target:
        source.write("a\n")
        target.write("\n")
    last = len((tmp_path / "made.test.b").read_text().splitlines())
    status, out, err = empty("data", "prepare", *FILES, "--out", "made")
    assert (status, out) == (0, "pairs:made\n")
    assert "train: 41 lines" in err
    told = " ".join(err.split())
    left_out = "1 empty in 'made.train.a' (line 41) and 1 of more than 250 words in 'made.train.a' (line 43)"
    assert f"left out {left_out}" in told
    assert f"kept 1 empty in 'made.test.b' (line {last}), because a score counts all lines" in told
    assert open_prepared("made").splits == ("train", "valid", "test")
    written = Path("made", MANIFEST).stat().st_mtime_ns
    assert empty("data", "prepare", *FILES, "--out", "made")[:2] == (0, "pairs:made\n")
    assert Path("made", MANIFEST).stat().st_mtime_ns == written  # what is there is left alone


def test_prepare_makes_up_a_folder_and_takes_plain_text(empty: Run, tmp_path: Path) -> None:
    write_text(tmp_path / "notes.txt")
    status, out, _ = empty("data", "prepare", "--text", "notes.txt", "--vocabulary", str(SIZE))
    assert (status, out) == (0, f"text:.data/notes-{SIZE}\n")
    assert open_prepared(f".data/notes-{SIZE}").splits == ("train",)


def write(name: str, content: bytes) -> None:
    Path(name).write_bytes(content)


@pytest.mark.parametrize("command", [("data", "prepare"), ("train", "translation", *ONE)])
@pytest.mark.parametrize(
    ("files", "options", "says"),
    [
        ({"a": b"a b\nc\n", "b": b"a b\n"}, (), "got 2 and 1: line 2 has no partner"),
        ({"a": b"a b\n", "b": b"a b\nx\n\nz\n"}, (), "got 1 and 4: line 2 has no partner"),
        ({"a": b"a b\nc \xff d\n", "b": b"a\nb\n"}, (), "expected UTF-8 in 'a', got the byte 0xff at byte 3 of line 2"),
        ({"a": b"a b\n"}, (), "expected a text file 'b', found none"),
        ({"b": b"a b\n"}, (), "expected a text file 'a', found none"),
        ({"a": b"", "b": b""}, (), "expected pairs of sentences in 'a' and 'b', got 0 lines"),
        ({"a": b"\n\n", "b": b"\nx\n"}, (), "2 empty in 'a' (lines 1, 2) and 1 empty in 'b' (line 1)"),
        ({"a": b"a b\n", "b": b"a b\n"}, (), "expected a vocabulary of at most"),
        ({"a": b"a b\n", "b": b"a b\n"}, ("--vocabulary", "6"), "expected a vocabulary of more than"),
        ({"a": b"a b\n", "b": b"a b\n"}, ("--text", "a"), "expected --source and --target, or --text alone, got"),
        ({"a.xz": b"not compressed"}, ("--source", "a.xz", "--target", "a.xz"), "damaged"),
    ],
)
def test_files_that_cannot_be_read_are_one_sentence(
    empty: Run, command: tuple[str, ...], files: dict[str, bytes], options: tuple[str, ...], says: str
) -> None:
    for name, content in files.items():
        write(name, content)
    status, out, err = empty(*command, *(() if "--source" in options else ("--source", "a", "--target", "b")), *options)
    errors = [line for line in err.splitlines() if line not in ("reading the text", "training the vocabulary")]
    assert (status, out) == (2, "")
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert says in errors[0]
    assert not Path("runs").exists()
    assert not list(Path().glob(f".data/*/{MANIFEST}"))


@pytest.mark.parametrize("options", [("--source", "a"), ("--target", "b"), ("--text", "a", "--target", "b"), ()])
def test_half_of_the_files_is_refused(empty: Run, options: tuple[str, ...]) -> None:
    write("a", b"a\n")
    write("b", b"a\n")
    status, _, err = empty("data", "prepare", *options)
    assert status == 2
    assert is_one_line_error(err)
    assert "--source and --target, or --text" in err


def test_one_process_prepares(empty: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = empty("train", "translation", *FILES, *ONE)
    assert status == 2
    assert is_one_line_error(err)
    assert "normfree data prepare first" in err


# Training


def test_train_reads_files_and_prints_speed_and_bleu(here: Run) -> None:
    status, out, _ = here("train", "translation", *FILES, *ONE, "--out", "printed")
    assert status == 0
    assert f"transformer-1-1-16-32-2 (fixup) on pairs:.data/made-{SIZE}, 1 of 1 epochs" in out
    assert "tokens/s" in out
    assert "BLEU" in out
    assert "tok:13a" in out
    status, out, _ = here("train", "translation", *FILES, *ONE, "--out", "as-json", "--json")
    assert status == 0
    told = json.loads(out)
    assert told["status"] == "finished"
    assert told["tokens_per_second"] > 0
    assert set(told["bleu"]) == {"score", "signature"}
    shutil.rmtree("printed")
    shutil.rmtree("as-json")


def test_run_on_text_is_diagnosed(here: Run) -> None:
    status, out, err = here("diagnose", "run", "--input", "9")
    assert status == 0, err
    assert "run: " in out
    assert is_one_line_error(here("diagnose", "run", "--input", "3x32")[2])


def test_run_has_what_translation_needs_and_no_folder_of_the_machine(place: Path) -> None:
    run = place / "run"
    names = {path.name for path in run.iterdir()}
    assert {"config.toml", "metrics.jsonl", "result.json", "translations.txt", "vocabulary.model"} <= names
    assert str(place) not in (run / "result.json").read_text()
    result = RunFolder(run).read_result()
    assert result["config"]["data"] == f"pairs:.data/made-{SIZE}"
    assert result["command"].startswith("normfree train translation --set model=transformer-1-1-32-64-4")
    assert len((run / "translations.txt").read_text().splitlines()) == 12


def test_language_model_trains_from_a_file(empty: Run, tmp_path: Path) -> None:
    for number, split in enumerate(("train", "valid", "test")):
        write_text(tmp_path / f"made.{split}.txt", seed=number)
    settings = {"model": "decoder-1-16-32-2", "batch_size": "8", "block": "16", "epochs": "1", "warmup": "2"}
    options = ("--text", "made.train.txt", "--vocabulary", str(SIZE), "--device", "cpu", "--out", "run")
    status, out, _ = empty("train", "language_model", *changed(settings), *options)
    assert status == 0
    assert "BLEU" not in out
    assert RunFolder("run").read_result()["validation"]["loss"] > 0
    status, out, _ = empty("evaluate", "run", "--json")
    assert status == 0
    assert set(json.loads(out)) == {"loss", "accuracy"}
    status, out, err = empty("translate", "run", given=b"a\n")
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert "expected a run on pairs of sentences in 'run', got one on 'text:" in err
    first, again, other = (empty("continue", "run", "--seed", seed, given=b"a b\n\n") for seed in ("0", "0", "1"))
    assert first[0] == 0
    assert first == again != other
    begun, _from_nothing, end = first[1].split("\n")
    assert begun.startswith("a b")
    assert len(begun) > len("a b")
    assert end == ""
    likeliest = empty("continue", "run", "--temperature", "0", "--tokens", "3", given=b"a b\n")
    assert likeliest == empty("continue", "run", "--temperature", "0", "--tokens", "3", "--seed", "5", given=b"a b\n")


@pytest.mark.parametrize(("verb", "said"), [("pairs", "tokens holds all"), ("text", "blocks holds the complete")])
def test_batch_that_takes_all_text_is_told(empty: Run, tmp_path: Path, verb: str, said: str) -> None:
    pytest.importorskip("sacrebleu")
    data = (tiny_pairs if verb == "pairs" else tiny_text)(tmp_path)
    model = TINY["model"] if verb == "pairs" else "decoder-1-16-32-2"
    settings = {"data": f"{verb}:{data.folder}", "model": model, "block": "4", "epochs": "1", "beam": "1"}
    for size, told in ((100_000, True), (60, False)):
        status, out, _ = empty("train", *changed(settings, batch_size=str(size)), "--out", f"run{size}")
        assert status == 0
        assert (f"a batch of {size:,} {said} training" in " ".join(out.split())) == told


@pytest.mark.parametrize("verb", ["translate", "continue"])
def test_run_by_a_method_of_a_plugin_is_read_with_it(
    empty: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    pytest.importorskip("sacrebleu")
    (tmp_path / "mine_plugin.py").write_text(
        "from dataclasses import replace\nfrom normfree.methods import get, register\n"
        "register(replace(get('fixup'), name='mine', options={}))\n"
    )
    data = (tiny_pairs if verb == "translate" else tiny_text)(tmp_path)
    kind, model = ("pairs", TINY["model"]) if verb == "translate" else ("text", "decoder-1-16-32-2")
    config = TrainConfig(data=f"{kind}:{data.folder}", model=model, method="mine", epochs=1, batch_size=200, block=16)
    monkeypatch.setattr(sys, "path", [*sys.path])
    load_plugins(["mine_plugin"])
    fit(config, out="run", picture=False)
    unregister("mine")
    sys.modules.pop("mine_plugin")
    status, _, err = empty(verb, "run", given=b"a b\n")
    assert status == 2
    assert "unknown method 'mine'" in err
    try:
        assert empty(verb, "run", "--plugin", "mine_plugin", given=b"a b\n")[0] == 0
    finally:
        sys.modules.pop("mine_plugin")
        unregister("mine")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"accumulate": "2"}, "expected accumulate=1 for tokens, got 2; make batch_size smaller"),
        ({"model": "resnet8"}, "expected a model 'transformer-…'"),
        ({"model": "decoder-1-16-32-2"}, "expected a model 'transformer-…'"),
        ({"model": "transformer-1-1-16-32-3"}, "expects a width that its heads divide"),
        ({"model": "torchvision:resnet18"}, "expected a model 'transformer-…'"),
        ({"method": "batchnorm"}, "batchnorm"),
        ({"dropout": "1"}, "expected 'dropout' at least 0 and below 1"),
        ({"beam": "0"}, "expected 'beam' at least 1"),
        ({"batch_size": "4"}, "expected room for the longest sentence"),
        ({"data": "pairs:nowhere"}, "expected a prepared folder with 'nowhere/prepared.json', found none"),
        ({"data": f"text:.data/made-{SIZE}"}, "got the other kind; use the name 'pairs:"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(here: Run, changes: dict[str, str], says: str) -> None:
    given = changed({**TINY, "data": f"pairs:.data/made-{SIZE}", **changes})
    status, out, err = here("train", "translation", *given, "--device", "cpu", "--out", "wrong")
    shutil.rmtree("wrong", ignore_errors=True)
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert says in err


# Translating


def test_translations_come_in_the_order_of_the_lines(here: Run) -> None:
    draws = random.Random(1)
    lines = [" ".join(draws.choices(LETTERS, k=draws.randint(1, 9))) for _ in range(700)]
    status, out, err = here("translate", "run", given="".join(f"{line}\n" for line in lines).encode())
    assert (status, err) == (0, "")
    together = out.split("\n")
    assert len(together) == 701
    # The model has learnt to copy, so that the order shows.
    assert sum(line == found for line, found in zip(lines, together, strict=False)) > 350
    for number in (0, 1, 511, 512, 699):
        alone = here("translate", "run", given=f"{lines[number]}\n".encode())
        assert alone == (0, f"{together[number]}\n", "")
    assert here("translate", "run", "--beam", "1", "--length-penalty", "0", given=b"a b c\n")[0] == 0


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (b"", 0),
        (b"\n", 1),
        (b"   \n\t\n", 2),
        (b"a b\n\n\nc\n", 4),
        (b"a b", 1),  # without an end of line
        (b"a\r\nb\r\n", 2),
        (b"a \x0b b\x0c c \xe2\x80\xa8 d \x1c e\rf\n", 1),  # nothing of it ends a line
        (b"\xef\xbb\xbfa b\n", 1),
        ("日本 ß x? <s> </s> \N{GRINNING FACE}\n".encode(), 1),
        (b"\x00 a\n", 1),
    ],
)
def test_every_line_has_one_translation(here: Run, given: bytes, count: int) -> None:
    status, out, err = here("translate", "run", "--device", "cpu", given=given)
    assert (status, err) == (0, "")
    assert out.count("\n") == count
    empty = [not line.strip() for line in given.removeprefix(b"\xef\xbb\xbf").decode().split("\n")[:count]]
    assert all(line == "" for line, nothing in zip(out.split("\n"), empty, strict=False) if nothing)


def test_standard_input_is_read_as_files_are(tmp_path: Path) -> None:
    from normfree.data.text.text_files import read_lines

    given = b"\xef\xbb\xbfa\r\nb\rc\n\n \xe2\x80\xa8d \n\r\ne"
    (tmp_path / "file").write_bytes(given)
    assert list(decode_lines(io.BytesIO(given), "on standard input")) == list(read_lines(tmp_path / "file"))


def test_invalid_input_names_its_line(here: Run) -> None:
    status, out, err = here("translate", "run", given=b"a b\nc d \xff e\n")
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert "expected UTF-8 on standard input, got the byte 0xff at byte 5 of line 2" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("nowhere",), "expected a run in 'nowhere'"),
        (("run", "--length-penalty", "50"), "a length penalty from -10 to 10"),
        (("run", "--length-penalty", "nan"), "a length penalty from -10 to 10"),
        (("run", "--device", "abacus"), "abacus"),
    ],
)
def test_translation_that_cannot_be_is_one_sentence(here: Run, options: tuple[str, ...], says: str) -> None:
    status, out, err = here("translate", *options, given=b"a\n")
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert says in err


def test_run_on_pairs_writes_no_text_on(here: Run) -> None:
    status, out, err = here("continue", "run", given=b"a\n")
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert "expected a language model, which is a run on text, in 'run', got one on 'pairs:" in err


def test_run_on_images_does_not_translate(call: Run, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(normfree.TrainConfig().to_toml())
    status, _, err = call("translate", str(tmp_path), given=b"a\n")
    assert status == 2
    assert is_one_line_error(err)
    assert "got one on 'fashion14'" in err


def damages(content: bytes) -> Iterator[bytes]:
    """What a copy may look like that went wrong."""
    yield b""
    yield b"nothing like a vocabulary"
    for cut in (1, 7, len(content) // 3, len(content) // 2, len(content) - 30, len(content) - 1):
        yield content[:cut]
    draws = random.Random(0)
    for _ in range(12):
        broken = bytearray(content)
        broken[draws.randrange(len(broken))] ^= 1 << draws.randrange(8)
        yield bytes(broken)


def test_damaged_vocabulary_is_refused(altered: Run) -> None:
    path = Path("run/vocabulary.model")
    whole = path.read_bytes()
    for content in damages(whole):
        path.write_bytes(content)
        status, out, err = altered("translate", "run", given=b"a b\n")
        assert (status, out) == (2, "")
        assert is_one_line_error(err)
        assert "'run/vocabulary.model'" in err
    path.unlink()
    assert "found none" in altered("translate", "run", given=b"a b\n")[2]
    path.write_bytes(whole)
    assert altered("translate", "run", given=b"a b\n")[0] == 0


# Evaluating


def test_evaluate_gives_the_score_and_bleu_of_the_run(here: Run) -> None:
    result = RunFolder("run").read_result()
    status, out, err = here("evaluate", "run", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["loss"] == pytest.approx(result["test"]["loss"], rel=1e-6)
    assert found["bleu"] == result["bleu"]
    status, out, _ = here("evaluate", "run", "--device", "auto")
    assert status == 0
    assert f"BLEU {result['bleu']['score']:.2f}  (nrefs:1|case:mixed" in out


def test_evaluate_finds_data_that_moved_and_refuses_other_data(altered: Run, tmp_path: Path) -> None:
    expected = altered("evaluate", "run", "--json")[1]
    Path(".data", f"made-{SIZE}").rename("moved")
    status, _, err = altered("evaluate", "run")
    assert status == 2
    assert is_one_line_error(err)
    assert "prepare the data first" in err
    assert altered("evaluate", "run", "--json", "--data-dir", "moved")[1] == expected
    (tmp_path / "other").mkdir()
    for split, (source, target) in write_pairs(tmp_path / "other").items():
        for path in (source, target):
            path.write_text("".join(f"{line}\n" for line in path.read_text().replace("a", "z").splitlines()))
        assert split
    others = [str(tmp_path / "other" / f"made.train.{side}") for side in "ab"]
    options = ("--source", others[0], "--target", others[1], "--vocabulary", str(SIZE), "--out", "other")
    assert altered("data", "prepare", *options)[0] == 0
    status, _, err = altered("evaluate", "run", "--data-dir", "other")
    assert status == 2
    assert is_one_line_error(err)
    assert "expected 'pairs:other' to have the same vocabulary as the run in 'run', but it differs" in err


@pytest.mark.parametrize("file", ["train.safetensors", "vocabulary.model", "test.target.txt", MANIFEST])
def test_damaged_data_is_refused_by_name(altered: Run, file: str) -> None:
    path = Path(".data", f"made-{SIZE}", file)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    data = changed(TINY, data=f"pairs:{path.parent}")
    for command in (("evaluate", "run"), ("train", "translation", *data, "--device", "cpu", "--out", "new")):
        status, out, err = altered(*command)
        assert (status, out) == (2, "")
        assert is_one_line_error(err)
        assert f"'{path}'" in err
    assert not Path("new/config.toml").exists()
    assert altered("translate", "run", given=b"a b\n")[0] == 0  # which has all that it needs


def test_evaluate_needs_a_test_split(altered: Run) -> None:
    for side in "ab":
        Path(f"made.train.{side}").rename(f"only.train.{side}")
    options = ("--source", "only.train.a", "--target", "only.train.b", "--vocabulary", str(SIZE))
    assert altered("train", "translation", *options, *ONE, "--out", "only")[0] == 0
    assert "bleu" not in RunFolder("only").read_result()
    status, _, err = altered("evaluate", "only")
    assert status == 2
    assert is_one_line_error(err)
    assert "expected a test split" in err
    assert altered("translate", "only", given=b"a\n")[0] == 0


# Comparing


def test_compare_gives_depths_as_layers(here: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("normfree.comparison.comparison_report.save", lambda *_, **__: ())  # pictures take seconds
    models = [part for n in (1, 2) for part in ("--model", f"transformer-{n}-{n}-16-32-2")]
    settings = ("--recipe", "translation", "--set", f"data=pairs:.data/made-{SIZE}", "--set", "epochs=1")
    options = (*settings, "--set", "batch_size=400", "--set", "device=cpu", "--set", "beam=1")
    status, out, err = here(
        "compare", "-m", "fixup", "-m", "layernorm", *models, *options, "--jobs", "1", "--json", "--out", str(tmp_path)
    )
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    depths = {run["model"]: run["depth"] for run in found["runs"]}
    # As people count them: encoder and decoder layers, not the weight layers in them.
    assert depths == {f"transformer-{n}-{n}-16-32-2": 2 * n for n in (1, 2)}
    assert {(run["method"], run["status"]) for run in found["runs"]} == {
        ("fixup", "finished"),
        ("layernorm", "finished"),
    }
    status, _, err = here(
        "compare", "-m", "fixup", "--model", "resnet8", *options, "--jobs", "1", "--out", str(tmp_path)
    )
    assert status == 2
    assert is_one_line_error(err)
    assert read_config(next(tmp_path.glob("*transformer-1*fixup*"))).data == f"pairs:.data/made-{SIZE}"
