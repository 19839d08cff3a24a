"""A diagnosis as text, table, picture, page and JSON."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import normfree
from normfree.conversion import convert
from normfree.diagnostics.diagnosis import (
    INJECTED,
    Diagnosis,
    diagnose,
    json_data,
    page,
    panels,
    rating,
    save,
    summary,
    table,
)
from normfree.diagnostics.signals import Stats
from normfree.diagnostics.verdict import judge
from normfree.models import build
from normfree.report.page import render_page
from signal_oracles import made_up_signal

EVIL = "<script>alert(1)</script> & [bold]$x$"
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def diagnosed(network: str, method: str, **options: Any) -> Diagnosis:
    model = build(network, method, example=IMAGES, generator=torch.Generator().manual_seed(0))
    return diagnose(model, IMAGES, **options)


@pytest.fixture(scope="module")
def short() -> Diagnosis:
    return diagnosed("resnet8", "fixup", name="short")


@pytest.fixture(scope="module")
def deep() -> Diagnosis:
    return diagnosed("resnet56", "he_in", name="deep")


def broken(diagnosis: Diagnosis) -> Diagnosis:
    """The same with NaN, infinity and zero in it."""
    values = (math.nan, math.inf, 0.0)
    sums = tuple(
        replace(s, sum=Stats(value, value, value)) for s, value in zip(diagnosis.signal.sums, values, strict=False)
    )
    signal = replace(diagnosis.signal, sums=sums)
    return Diagnosis("broken", signal, judge(signal))


def strict(text: str) -> Any:
    """JSON as others read it, without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


class Scripts(HTMLParser):
    """The tags and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_repr_is_one_short_line(deep: Diagnosis) -> None:
    forward, backward = deep.verdict.forward.factor, deep.verdict.backward.factor
    factors = f"forward ×{forward:.3g} and backward ×{backward:.3g} per block"
    word = f"exploding: forward signal ×{forward:.2f} per block"
    assert repr(deep) == f"Diagnosis('deep': {word}; 27 residual sums, {factors})"
    assert repr(deep.signal) == "Signal(27 residual sums, 56 weight layers)"


def test_text_shows_table_verdict_and_advice(deep: Diagnosis) -> None:
    text = str(deep)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110
    assert "deep: exploding" in text
    assert deep.verdict.recommendation in " ".join(text.split())  # long lines are wrapped
    assert "worst place" in text
    assert text == str(deep)


def test_summary_says_where_the_gradient_came_from(short: Diagnosis, deep: Diagnosis) -> None:
    assert "the classifier is zero and lets no gradient through" in summary(short)
    assert "no targets were given" in summary(deep)
    assert summary(deep, short).splitlines()[-2:] == [
        f"(deep: {INJECTED['output']})",
        f"(short: {INJECTED['features']})",
    ]
    assert summary(deep, deep).count(INJECTED["output"]) == 1
    targets = torch.zeros(4, dtype=torch.long)
    assert "gradient was injected" not in summary(diagnosed("resnet8", "he_in", targets=targets))


def recommended(diagnosis: Diagnosis) -> list[str]:
    return re.findall(r"'([a-z_]+)'", diagnosis.verdict.recommendation)


def grown(model: nn.Module, factor: float) -> nn.Module:
    """Weights so large, or small, that some signal explodes or vanishes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", ["decoder-12-16-32-2", "resmlp-24-16", "wrn-28-1"])
def test_model_of_ours_is_recommended_what_it_admits(name: str, factor: float) -> None:
    words = torch.randint(4, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    inputs = words if name.startswith("decoder") else torch.randn(4, 3, 8, 8)
    model = grown(build(name, "he_in", example=inputs), factor)
    for method in recommended(diagnose(model, inputs)):
        build(name, method, example=inputs)


class Mixing(nn.Module):
    """A residual block whose branch is an attention, or two convolutions or linear layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.Identity() if kind == "convolution" else nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if kind == "attention" else None
        make = (lambda: nn.Conv1d(8, 8, 1)) if kind == "convolution" else (lambda: nn.Linear(8, 8))
        self.one, self.two = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.attention is not None:
            return x + self.attention(y, y, y, need_weights=False)[0]  # type: ignore[no-any-return]
        return x + self.two(self.one(y).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("kind", ["attention", "linear", "convolution"])
def test_model_of_others_is_recommended_what_it_can_become(kind: str, factor: float) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = grown(nn.Sequential(*(Mixing(kind) for _ in range(12)), nn.Linear(8, 8)), factor)
        x = torch.randn(4, 8, 8)
    for method in recommended(diagnose(model, x)):
        convert(model, method, x)


def test_name_is_given_or_the_models() -> None:
    assert diagnosed("resnet8", "he_in", name="mine").name == "mine"
    assert diagnosed("resnet8", "he_in").name == "resnet8"

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x + self.layer(x))  # type: ignore[no-any-return]

    assert diagnose(Tiny(), torch.randn(8, 4)).name == "Tiny"


def test_json_holds_every_number(short: Diagnosis, tmp_path: Path) -> None:
    path = short.save(tmp_path / "report.json")
    (record,) = strict(path.read_text(encoding="utf-8"))
    assert record["name"] == "short"
    assert record["verdict"]["status"] == short.verdict.status
    assert record["signal"]["injected"] == "features"
    assert [s["sum"]["variance"] for s in record["signal"]["sums"]] == short.signal.series("sum")
    first = record["signal"]["layers"][0]
    assert first["ratio"] == pytest.approx(first["gradient_norm"] / first["weight_norm"])


def test_json_is_strict_also_with_numbers_it_has_no_word_for(short: Diagnosis, tmp_path: Path) -> None:
    (record,) = strict(broken(short).save(tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [s["sum"]["variance"] for s in record["signal"]["sums"]] == ["nan", "inf", 0.0]
    assert strict(json.dumps(json_data([short]), allow_nan=False))


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PNG", b"\x89PNG")])
def test_picture_is_one(short: Diagnosis, tmp_path: Path, suffix: str, begins: bytes) -> None:
    assert short.save(tmp_path / f"picture{suffix}").read_bytes().startswith(begins)


def test_page_has_a_card_a_chart_and_a_row_for_each(short: Diagnosis, deep: Diagnosis, tmp_path: Path) -> None:
    path = save([short, deep], tmp_path / "report.html", title="Both")
    text = path.read_text(encoding="utf-8")
    shown = page([short, deep], "Both")
    assert [card.status for card in shown.cards] == ["good", "bad"]
    assert len(shown.panels) == 4
    assert all([curve.name for curve in panel.curves] == ["short", "deep"] for panel in shown.panels)
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert "Both" in Scripts(text).text
    assert len(shown.notes) == 2


def test_depths_may_differ(short: Diagnosis, deep: Diagnosis, tmp_path: Path) -> None:
    counts = len(short.signal.sums), len(deep.signal.sums)
    assert counts[0] < counts[1]
    for order in ([short, deep], [deep, short]):
        for panel in panels(order):
            assert {len(curve.values) for curve in panel.curves} == set(counts)
            assert panel.point_names == tuple(s.name for s in deep.signal.sums)
            assert panel.stages == (10, 19)
        assert f"{counts[0]} to {counts[1]} residual sums" in page(order, "").subtitle
        for suffix in ("html", "png", "json"):
            assert save(order, tmp_path / f"both.{suffix}").stat().st_size > 1000
    assert "3 residual sums" in page([short], "").subtitle


@pytest.mark.parametrize("name", ["report.txt", "report", "report.pdf", ".json.bak"])
def test_other_suffix_is_refused(short: Diagnosis, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"expected a file name ending in \.html, \.png, \.svg or \.json, got"):
        short.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_name_with_markup_is_text(short: Diagnosis, tmp_path: Path) -> None:
    evil = replace(short, name=EVIL)
    assert EVIL in summary(evil)
    assert EVIL in str(evil).replace("\n", "") or "<script>" in str(evil)
    assert "[bold]" in str(evil)
    plain_page, evil_page = (Scripts(render_page(page([d], d.name))) for d in (short, evil))
    assert [tag for tag in evil_page.tags if tag != "wbr"] == plain_page.tags  # where the name may break
    assert EVIL in evil_page.text
    svg = ElementTree.parse(evil.save(tmp_path / "evil.svg"))
    assert not [e for e in svg.iter() if e.tag.endswith("script")]
    assert strict(evil.save(tmp_path / "evil.json").read_text())[0]["name"] == EVIL


def test_broken_numbers_are_shown_not_drawn(short: Diagnosis, tmp_path: Path) -> None:
    bad = broken(short)
    for suffix in ("html", "png", "svg"):
        assert bad.save(tmp_path / f"bad.{suffix}").stat().st_size > 1000
    assert "broken: exploding" in str(bad)
    assert "overflows" in str(bad).replace("\n", " ")


def test_table_names_the_worst_place(deep: Diagnosis, short: Diagnosis) -> None:
    rows = table([deep, short]).rows
    assert len(rows) == 2
    places = {deep.verdict.forward.worst, deep.verdict.backward.worst}
    assert rows[0][-1] in places
    dead = replace(short, verdict=replace(short.verdict, dead=("body.1.0",)))
    assert table([dead]).rows[0][-1] == "body.1.0"


def test_table_marks_a_factor_that_falls_with_depth(deep: Diagnosis) -> None:
    assert "↘" not in "".join([*table([deep]).rows[0], table([deep]).caption])
    normalized = diagnosed("resnet56", "batchnorm")
    assert normalized.verdict.backward.status == "growing"
    shown = table([deep, normalized])
    assert shown.rows[1][6] == f"{normalized.verdict.backward.factor:.2f}↘"
    assert "↘" in shown.caption


def test_diagnosis_with_targets_has_a_loss() -> None:
    assert diagnosed("resnet8", "he_in", targets=torch.zeros(4, dtype=torch.long)).signal.loss > 0


def test_gradient_that_was_not_measured_is_not_shown(short: Diagnosis, tmp_path: Path) -> None:
    lost = Stats(math.nan, math.nan, math.nan)
    sums = tuple(
        replace(s, sum=lost if i else s.sum, sum_gradient=lost, branch_gradient=lost, shortcut_gradient=lost)
        for i, s in enumerate(short.signal.sums)
    )
    signal = replace(short.signal, sums=sums, unmeasured=sums[1].name)
    bad = Diagnosis("bad", signal, judge(signal))
    assert table([bad]).rows[0][5:8] == ("not measured", "–", "–")
    assert table([bad]).rows[0][-1] == sums[1].name
    says = f"not measured: the forward signal is not finite from {sums[1].name} on"
    assert says in summary(bad)
    assert [panel.note for panel in panels([bad, short])] == ["", f"bad: {says}", "", ""]
    assert [curve.name for curve in panels([bad, short])[1].curves] == ["short"]
    for suffix in ("html", "png", "svg", "json"):
        assert bad.save(tmp_path / f"bad.{suffix}").stat().st_size > 1000


def test_axes_say_what_is_drawn(short: Diagnosis) -> None:
    assert [panel.y_label for panel in panels([short])] == ["variance", "variance", "squared mean", "variance"]


def test_command_imports_nothing_of_training(tmp_path: Path) -> None:
    words = ["normfree", "diagnose", "resmlp-2-8", "-m", "batchnorm", "-o", str(tmp_path / "report.html")]
    code = f"""
import sys
from normfree.cli import main

sys.argv = {words!r}
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
rooms = {{name.split(".")[1] for name in sys.modules if name.startswith("normfree.")}}
assert not rooms & {{"train", "data", "optim", "comparison"}}, rooms
"""
    source = str(Path(normfree.__file__).parent.parent)
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}, check=True)


def test_layers_losses_and_updates_are_in_the_report(deep: Diagnosis) -> None:
    text = str(deep).replace("\n", " ")
    assert "first loss" in text
    assert "log 10 = 2.3" in text
    assert "dead units: " in text
    assert "update-to-weight ratio at learning rate 1" in text
    (section,) = page([deep], "Deep").sections
    assert [row[0] for row in section.folded[0].rows] == [layer.name for layer in deep.signal.layers]


def test_single_layer_with_a_gradient_is_said_to_be_the_only_one() -> None:
    model = build("resnet8", "fixup", example=IMAGES, generator=torch.Generator().manual_seed(0))
    found = diagnose(model, IMAGES)
    (layer,) = [layer.name for layer in found.signal.layers if 0 < layer.ratio < math.inf]
    others = len(found.signal.layers) - 1
    assert f" in {layer}; gradient or weight of the {others} other weight layers are 0" in summary(found)
    assert "(median)" not in summary(found)


class Recurrent(nn.Module):
    """A network whose only weight layer of the plan is the classifier, or one of two."""

    def __init__(self, *, two: bool) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 16, batch_first=True)
        self.hidden, self.out = nn.Linear(16, 16) if two else nn.Identity(), nn.Linear(16, 4)
        if two:
            nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.lstm(self.embedding(x))[0][:, -1])))  # type: ignore[no-any-return]


@pytest.mark.parametrize("two", [False, True])
def test_other_weight_layers_are_mentioned_only_if_there_are_any(two: bool) -> None:
    torch.manual_seed(0)
    found = summary(diagnose(Recurrent(two=two), torch.randint(50, (16, 12))))
    assert "update-to-weight ratio at learning rate 1:" in found
    assert "0 other" not in found
    assert ("the 1 other weight layer is 0" in found) is two


RUNNING = "measured in evaluation mode: batch norms use their running statistics"


@pytest.mark.parametrize(
    ("norm", "training", "says"),
    [
        (lambda: nn.BatchNorm1d(16), False, True),
        (lambda: nn.BatchNorm1d(16), True, False),
        (lambda: nn.BatchNorm1d(16, track_running_stats=False), False, False),
        (lambda: nn.LayerNorm(16), False, False),
    ],
)
def test_running_statistics_in_evaluation_mode_are_mentioned(norm: Any, training: bool, says: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), norm(), nn.ReLU(), nn.Linear(16, 16), norm(), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(32, 8)
    for _ in range(20):
        model(x)
    found = diagnose(model.train(training), x)
    assert (RUNNING in str(found)) is says
    assert (f"{RUNNING[0].upper()}{RUNNING[1:]}." in found._repr_html_()) is says


def test_summary_says_that_there_are_more_findings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Linear(8, 4), nn.Softmax(1))
    found = diagnose(model, 100 + torch.randn(8, 8), torch.zeros(8, dtype=torch.long))
    first, *others = found.verdict.findings
    assert others
    assert f"each with its remedy in verdict.findings: {others[0]}" in summary(found)
    assert str(first) not in found.verdict.more
    assert replace(found.verdict, findings=(first,)).more == ""
    assert replace(found.verdict, findings=(first,) * 9).more.endswith(", … (8 in all)")


def test_batch_norms_before_training_are_to_be_diagnosed_in_training_mode() -> None:
    model = build("resnet56", "batchnorm", example=IMAGES, generator=torch.Generator().manual_seed(0)).eval()
    found = diagnose(model, IMAGES).verdict
    assert not found.is_healthy
    assert found.recommendation.startswith("call model.train() and diagnose again")
    assert "fixup" not in found.recommendation
    model.train()
    model(IMAGES)  # now the statistics are those of a batch
    assert not diagnose(model.eval(), IMAGES).verdict.recommendation.startswith("call model.train()")


def test_notebook_shows_the_verdict_and_escapes_names(deep: Diagnosis) -> None:
    html = replace(deep, name=EVIL)._repr_html_()
    assert "exploding: forward signal" in html
    assert "<table>" in html
    assert "<script>" not in html


@pytest.mark.parametrize(("method", "status"), [("batchnorm", "good"), ("xavier", "bad"), ("he_in", "bad")])
def test_colour_follows_the_rate_of_growth(method: str, status: str) -> None:
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = build("resnet56", method, generator=torch.Generator().manual_seed(0))
    (card,) = page([diagnose(model, images)], "").cards
    assert card.status == status


def test_large_growth_by_a_power_is_not_green() -> None:
    """A gradient that grows as the fourth power of the depth: × 1e8 in 100 blocks."""
    signal = made_up_signal([1.0] * 100, [float(i) ** -4 for i in range(1, 101)])
    verdict = judge(signal)
    assert verdict.status == "growing"
    assert rating(verdict) == "warn"
    assert rating(judge(made_up_signal([1.0] * 100, [float(i) ** -1 for i in range(1, 101)]))) == "good"


def test_drift_says_at_which_depth_it_fails() -> None:
    verdict = judge(made_up_signal([1.05**i for i in range(100)]))
    assert (verdict.status, rating(verdict)) == ("drifting", "warn")
    assert verdict.forward.fails_at == math.ceil(math.log(1000) / math.log(1.05)) + 1
    assert f"fails from about {verdict.forward.fails_at} blocks on" in verdict.sentence
    assert judge(made_up_signal([1.05**i for i in range(verdict.forward.fails_at)])).status == "exploding"


class NextWord(nn.Module):
    """Predicts the next word from the words so far, by causal attention and two residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.mixed, self.attended, self.inner = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        q, k, v = self.mixed(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).flatten(2))
        return self.head(x + self.inner(x.relu()))


def cost(run: Any, model: nn.Module) -> tuple[int, list[int]]:
    """The floating-point operations of a call, and the batches that go through the model."""
    batches: list[int] = []
    handle = model.register_forward_pre_hook(lambda _m, args: batches.append(len(args[0])))
    try:
        with FlopCounterMode(display=False) as counter:
            run()
    finally:
        handle.remove()
    return counter.get_total_flops(), batches


@pytest.mark.parametrize("method", ["batchnorm", "fixup"])
@pytest.mark.parametrize(("batch", "few"), [(4, []), (11, []), (12, [2, 2]), (32, [2, 2])])
def test_sound_network_costs_one_pass_and_two_of_two_samples(method: str, batch: int, few: list[int]) -> None:
    """At most 1.3 of a plain pass: the passes of few samples may not grow, and no second pass takes the whole batch."""
    model = build("resnet20", method)
    x = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    plain, _ = cost(lambda: model(x).sum().backward(), model)
    measured, batches = cost(lambda: diagnose(model, x), model)
    assert batches == [batch, *few]
    assert 0.99 * plain <= measured <= 1.3 * plain  # Fixup's gradient starts before the classifier


def test_sound_network_for_sequences_costs_at_most_a_third_more() -> None:
    torch.manual_seed(0)
    model, words = NextWord(), torch.randint(40, (12, 17))
    x, y = words[:, :-1], words[:, 1:]
    plain, _ = cost(lambda: model(x).sum().backward(), model)
    plan = normfree.discover(model, x)  # on the meta device, which computes nothing
    measured, batches = cost(lambda: diagnose(model, x, y, plan=plan), model)
    assert batches == [12, 2, 2, 2, 2]  # and both samples with other words at later positions
    assert plain <= measured <= 1.3 * plain
