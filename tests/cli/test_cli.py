import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import normfree
from normfree.cli import main, verbs

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process: exit status, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR", "NORMFREE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with the search path as it was restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


def is_one_line_error(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from normfree.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    source = str(Path(normfree.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "methods" in done.stdout


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_interrupt_while_modules_are_imported_is_quiet(module: str) -> None:
    code = (
        "import runpy, sys\n"
        "class Press:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Press())\n"
        "sys.argv[1:] = ['diagnose', 'resnet8']\n"
        "runpy.run_module('normfree', run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("cause", "status", "says"), [(KeyboardInterrupt(), 130, ""), (EOFError("ends"), 2, "ends")])
def test_what_typer_aborts_for_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, cause: BaseException, status: int, says: str
) -> None:
    def abort(*_: object, **__: object) -> None:
        raise typer.Abort from cause  # as for ctrl-C in older versions, and for the end of a file

    monkeypatch.setattr(verbs, "app", abort)
    assert run("methods") == (status, "", f"error: {says}\n" if says else "")


def test_version_is_the_package_version(run: Run) -> None:
    assert run("--version") == (0, f"normfree {normfree.__version__}\n", "")


def test_unknown_verb_names_the_closest(run: Run) -> None:
    status, _, err = run("method")
    assert status == 2
    assert "Did you mean 'methods'?" in err


def test_methods_prints_every_method_plainly(run: Run) -> None:
    from normfree.methods import names

    status, out, _ = run("methods")
    assert status == 0
    assert "\x1b[" not in out
    firsts = [line.split()[0] for line in out.splitlines() if line.split()]
    assert [first for first in firsts if first in names()] == names()
    assert "x ← p(c · (a · h(s) + β · f(e(α · x)) + δ))" in out  # as in the README
    assert all(heading in out for heading in ("h(s)", "α", "β", "weights and initialization", "paper", "options"))


def test_methods_explains_those_that_are_named(run: Run) -> None:
    status, out, err = run("methods", "fixup", "hanin:r=0.8")
    assert (status, err) == (0, "")
    assert out.startswith("fixup: rescaled initialization")
    assert "`scalar_lr` is the learning rate of the scalars" in out
    assert "\nhanin: " in out
    status, out, err = run("methods", "fixupp")
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert "did you mean 'fixup'" in err


def test_methods_json_parses(run: Run) -> None:
    from normfree.methods import names

    status, out, err = run("methods", "--json")
    assert (status, err) == (0, "")
    assert [record["name"] for record in json.loads(out)] == names()


def test_methods_plugin_adds_a_row(run: Run, folder: Path) -> None:
    from normfree.methods.method_registry import unregister

    (folder / "half_branch_plugin.py").write_text(
        "from dataclasses import replace\n"
        "import normfree as nf\n"
        "from normfree.methods import get\n"
        "nf.register(replace(get('he_in'), name='half_branch'))\n"
    )
    try:
        status, out, _ = run("methods", "--plugin", "half_branch_plugin")
    finally:
        unregister("half_branch")
        sys.modules.pop("half_branch_plugin", None)
    assert status == 0
    assert "\nhalf_branch " in out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module", "'no_such_module', which was not found"),
        ("no_such_package.module", "'no_such_package.module', which was not found"),
        ("folder/file.py", "leave out folders and the ending .py"),
        ("", "expected a value for --plugin, got an empty one"),
        ("a..b", "expected the name of a module"),
        ("needs_more", "'needs_more' imports 'no_such_dependency'"),
        ("twice", "error: expected one thing, got another"),
    ],
)
def test_methods_plugin_errors_are_one_line(run: Run, folder: Path, name: str, says: str) -> None:
    (folder / "needs_more.py").write_text("import no_such_dependency\n")
    (folder / "twice.py").write_text("raise ValueError('expected one thing,\\n  got another')\n")
    status, out, err = run("methods", "--plugin", name)
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("reproduce", "--jobs", "0"), "'--jobs': 0 is not in the range x>=1; see normfree reproduce -h"),
        (("train", "--crop", "3"), "No such option: --crop; a setting is given as --set crop=…"),
        (("train", "--zzz", "3"), "No such option: --zzz; see normfree train -h"),
        (("convert", "--jsno"), "--json"),
        (("nosuch",), "No such command 'nosuch'; see normfree -h"),
        (("diagnose",), "Missing argument"),
        (("compare", "fashion"), "(fashion); a recipe is given as --recipe NAME, a model as --model NAME"),
        (("train", "resnet20"), "expected a recipe, got the model 'resnet20'; give it as --model resnet20, or see"),
        (("train", "timm:resnet18"), "give it as --model timm:resnet18"),
        (("train", "--set"), "'--set' requires an argument"),
        (("train", "fashion", "epochs=1"), "(epochs=1); a setting is given as --set NAME=VALUE"),
        (("train", "--set", "method=tiny"), "import your own method's module first (--plugin MODULE)"),
        (("train", "--set", "data=."), "did you mean 'folder:.'?"),
        (("train", "--set", "data=folder:nothere"), "expected a folder of images at 'nothere', found none"),
        (("train", "--device", "gpu"), "expected a device such as cpu or cuda, got 'gpu'"),
        (("reproduce", "robust"), "got the paper 'robust'; name some of: robust/table1, robust/fig2"),
        (("reproduce", "robust/fig2", "--only", "x"), "--only needs claims with training runs; robust/fig2 has none"),
    ],
)
def test_what_cannot_be_typed_is_told_in_one_line(run: Run, arguments: tuple[str, ...], says: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert says in err


def every_value(group: Any) -> list[tuple[tuple[str, ...], str]]:
    """Every option and argument of every verb that takes a text, a folder or a file: the command, and its name."""
    found: list[tuple[tuple[str, ...], str]] = []
    commands = [((name,), verb) for name, verb in group.commands.items() if name != "data"]
    commands += [(("data", name), verb) for name, verb in group.commands["data"].commands.items()]
    for words, verb in commands:
        for parameter in verb.params:
            if parameter.param_type_name == "argument":
                found.append(((*words, ""), parameter.metavar))
            elif not parameter.is_flag:
                found += [((*words, name, ""), max(parameter.opts, key=len)) for name in parameter.opts]
    return found


def test_every_empty_value_is_refused_before_work(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = typer.main.get_command(verbs.app)
    monkeypatch.setattr(verbs, "app", group)  # built once
    values = every_value(group)
    names = {name for _, name in values}
    assert {"--out", "--config", "--resume", "--data-dir", "--tarball", "--write", "FOLDER…", "RUN", "MODEL"} <= names
    for arguments, name in values:
        status, out, err = run(*arguments)
        rest = ", or leave the option out" if name.startswith("--") else ""
        assert (status, out) == (2, ""), arguments
        assert err == f"error: expected a value for {name}, got an empty one; give one{rest}\n"
    assert run("train", "fashion", "--out", " ")[2].startswith("error: expected a value for --out")
    assert run("check", "x", "")[2].startswith("error: expected a value for FOLDER…")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "diagnose"),
        (("train",), "normfree train RECIPE runs one"),
        (("train", "--out", "run"), "normfree train RECIPE runs one"),
        (("reproduce",), "normfree reproduce ID shows one"),
        (("compare",), "For example: normfree compare -m fixup -m batchnorm"),
    ],
)
def test_nothing_typed_is_answered_with_what_can_be(run: Run, arguments: tuple[str, ...], says: str) -> None:
    status, out, err = run(*arguments)
    assert status == 2
    assert says in out + err
    assert "error:" not in out + err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "--lr", "0.1", "--lr", "0.2"), "--lr was given 2 times; give it once"),
        (("train", "-m", "fixup", "--method", "wn"), "--method was given 2 times"),
        (("reproduce", "--data-dir", "a", "--data", "b"), "--data-dir or --data was given 2 times"),
        (("train", "fashion", "--list"), "--list cannot be combined with fashion; leave one of them out"),
        (("train", "--list", "--epochs", "2"), "--list cannot be combined with --epochs"),
        (("train", "fashion", "--show", "--json"), "--show cannot be combined with --json; --show prints TOML"),
        (("train", "fashion", "--vocabulary", "9"), "--vocabulary needs --source and --target, or --text"),
        (("compare", "--draw", "x.json", "-m", "fixup", "--json"), "--draw cannot be combined with --method, --json"),
        (("compare", "--plugin", "mine", "--jobs", "2"), "--plugin cannot be combined with --jobs 2"),
        (
            ("reproduce", "robust/fig2", "robust/fig3", "--list"),
            "cannot be combined with robust/fig2, robust/fig3; leave one",
        ),
        (("reproduce", "--list", "--quick"), "--list cannot be combined with --quick"),
        (("reproduce", "robust/fig2", "--draw", "--again"), "--draw cannot be combined with --again"),
        (("reproduce", "fixup/fig3", "--kept", "--only", "x"), "--kept cannot be combined with --only"),
        (
            ("reproduce", "--write", "x.md", "--again", "--json"),
            "no claim was named for --json, --again",
        ),
        (("diagnose", "resnet8", "--data", "x.npy", "--batch", "4"), "--data cannot be combined with --batch"),
        (("diagnose", "resnet8", "--data", "x.npy", "--input", "3x8x8"), "--data cannot be combined with --input"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    run: Run, folder: Path, arguments: tuple[str, ...], says: str
) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert is_one_line_error(err)
    assert says in err
    assert not list(folder.iterdir())


def test_paragraphs_of_the_help_are_as_wide_as_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = run("reproduce", "--help")[1]
    paragraph = [line.strip() for line in out[out.index("A stored") : out.index("For example")].strip().splitlines()]
    assert min(map(len, paragraph[:-1])) > 80


VERBS = "methods models diagnose convert lr train watch evaluate check translate continue compare tune reproduce demo"


@pytest.mark.parametrize("verb", ["", *VERBS.split(), "data", "data get", "data list", "data prepare"])
def test_help_names_the_value_of_every_option_and_cuts_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = run(*verb.split(), "--help")[1]
    _, _, options = out.partition("Options ─")
    assert "--help" in options
    assert "<" not in options  # the types of Python, such as <int range>
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(r"\w…\s*│$", out, re.M)  # a word that rich has cut


def test_traceback_is_shown_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFREE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no_such_module"):
        main(["methods", "--plugin", "no_such_module"])


@dataclass(frozen=True)
class FakeFamily:
    pattern: str = "wrn-D-W"
    summary: str = "wide residual networks"
    examples: tuple[str, ...] = ("wrn-16-4", "wrn-40-10")
    form: str = "pre"
    skip: str = "residual"
    paper: str = "fixup"

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@pytest.fixture
def fake_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("normfree.models")
    module.catalog = lambda: (FakeFamily(),)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "normfree.models", module)


@pytest.mark.usefixtures("fake_catalog")
def test_models_prints_a_family(run: Run) -> None:
    status, out, _ = run("models")
    assert status == 0
    assert "wrn-D-W  wide residual networks  wrn-16-4, wrn-40-10  pre   residual  fixup" in out


@pytest.mark.usefixtures("fake_catalog")
def test_models_json_parses(run: Run) -> None:
    status, out, _ = run("models", "--json")
    assert status == 0
    assert json.loads(out) == [json.loads(json.dumps(FakeFamily().to_json()))]


def test_models_lists_the_real_catalog(run: Run) -> None:
    from normfree.models import catalog

    status, out, _ = run("models", "--json")
    assert status == 0
    assert [family["pattern"] for family in json.loads(out)] == [family.pattern for family in catalog()]
    assert all(family.pattern in run("models")[1] for family in catalog())
