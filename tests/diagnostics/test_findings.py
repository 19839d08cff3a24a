"""The examples of findings in docs/diagnosis.md: each prints the headline and the advice that stand beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from normfree.diagnostics import diagnose
from normfree.diagnostics.rules.findings import FINDINGS, finding

TEXT = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("## One example per finding")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (.+?) \| `(.+?)` \| (.+?) \| (.+?) \|$", SECTION, flags=re.MULTILINE)
DEFINITIONS = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)[0]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        exec(DEFINITIONS, found)
    return found


def test_there_are_examples() -> None:
    assert len(ROWS) >= 70
    assert len({printed for printed, *_ in ROWS}) >= 70


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("printed", "code", "meaning", "advice"), ROWS)
def test_example_prints_its_row(names: dict[str, Any], printed: str, code: str, meaning: str, advice: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        arguments = eval(f"({code},)", names)
        made = diagnose(*arguments[:3], loss=arguments[3] if len(arguments) > 3 else None)
    assert made.verdict.word == printed
    assert made.verdict.recommendation == advice
    assert meaning


def test_sound_networks_of_the_definitions_have_no_finding(names: dict[str, Any]) -> None:
    """The control: the same networks without a fault."""
    sound = ["net(), x, y", "Blocks(), x", "Reader(), words", "Pool(1), words", "Pool(None), words", "Attend(), words"]
    sound += ["Cosines(16.0), x, y", "Padded(False), padded", "Routed(), x"]
    rows = "Call(lambda z: z.movedim(1, -1).reshape(-1, 10))"
    sound += [f"nn.Sequential(nn.Conv2d(3, 10, 1), {rows}), images, torch.arange(1024) % 10"]
    sound += ["Next(causal=True), words, words.roll(-1, 1), by_token"]
    sound += ["Committee(copies=False), x, y", "net(start=nn.BatchNorm1d(32)), x, y", "net(start=nn.ReLU()), x, y"]
    sound += ["Mixer(), images", "Latents(1.0), words", "Flow(2.0), x, None, lambda out, _: -out.mean()"]
    sound += ["net(nn.Softmax(1)), x, y, dice", "net(nn.LogSoftmax(1)), x, y, F.nll_loss"]
    sound += ["Code(), x, x, elbo", "Code(), x, x, lambda out, x: len(x) * elbo(out, x)"]
    sound += ["Recurrent(1.0), torch.randn(16, 30, 32)", "PostNorm(4), torch.randn(16, 8, 32)"]
    for code in sound:
        with torch.random.fork_rng(devices=[]):
            arguments = eval(f"({code},)", names)
            loss = arguments[3] if len(arguments) > 3 else None
            assert diagnose(*arguments[:3], loss=loss).verdict.findings == (), code


def test_table_has_every_finding_with_its_severity_and_limit() -> None:
    section = TEXT.partition("## The findings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", section, flags=re.MULTILINE)[1:]
    known = [(row.severity, row.found_if) for row in FINDINGS.values() if row.word != "{change}"]
    assert [(severity, limit) for _, severity, limit in rows if severity != "---"] == known


def test_fault_of_a_parameter_of_the_model_itself_names_the_model() -> None:
    found = finding("zero weights", "")
    assert str(found).startswith("zero weights")
    assert "look at the model: " in found.remedy
