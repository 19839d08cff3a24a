"""The settings that a search varies: what is parsed, and what is refused."""

import pytest

from normfree.train import TrainConfig
from normfree.tuning.search_space import (
    SearchChoices,
    SearchRange,
    grid_of,
    grid_size,
    parse_search,
    require_valid,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr=0.001..1:log", SearchRange("lr", 0.001, 1.0, log=True)),
        (" weight_decay = 0..1e-3 ", SearchRange("weight_decay", 0.0, 0.001)),
        ("batch_size=32..96:step=32", SearchRange("batch_size", 32, 96, step=32, whole=True)),
        ("inner_dropout=0..0.5", SearchRange("inner_dropout", 0.0, 0.5)),
        ("method=fixup,he_in", SearchChoices("method", ("fixup", "he_in"))),
        (
            "method=fixup:scalar_lr=1/L,slow_biases=false; he_in",
            SearchChoices("method", ("fixup:scalar_lr=1/L,slow_biases=false", "he_in")),
        ),
        ("nesterov=true,false", SearchChoices("nesterov", ("true", "false"))),
        ("lr=0.1,0.01", SearchChoices("lr", ("0.1", "0.01"))),
    ],
)
def test_settings_are_parsed_and_written_alike(text: str, found: SearchRange | SearchChoices) -> None:
    assert parse_search([text]) == (found,)
    assert parse_search([str(found)]) == (found,)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], "expected a setting to search for, such as 'lr="),
        (["lr"], "expected a search such as 'lr=0.001..1:log', .*, got 'lr'"),
        (["lr="], "expected a search such as"),
        (["rate=0..1"], "unknown setting 'rate'"),
        (["lr=0..1", "lr=1..2"], "got 'lr' twice"),
        (["lr=1..0.1"], r"expected a range of 'lr' from low to high, got 1\.\.0\.1"),
        (["lr=1..1"], "from low to high"),
        (["lr=0..1:log"], "expected a logarithmic range of 'lr' above 0, got 0"),
        (["lr=0.1..nan"], "expected a finite number in the range of 'lr', got 'nan'"),
        (["lr=a..b"], "got 'a'"),
        (["lr=0..1:cube"], "expected 'log' or 'step=N' after the range of 'lr', got 'cube'"),
        (["lr=0..1:step=0.3"], r"expected a step of 'lr' that divides 0\.\.1, got 0\.3"),
        (["lr=0..1:step=0"], "expected a step"),
        (["epochs=1..2.5"], "expected a whole number in the range of 'epochs', got '2.5'"),
        (["method=a..b"], "expected choices for 'method', which is no number"),
        (["method=fixup"], "expected at least two choices for 'method'"),
        (["method=fixup,fixup"], "each once"),
        (["optimizer=sgd,adamm"], "unknown value of 'optimizer' 'adamm'"),
        (["lr=0.1,fast"], "expected a number for 'lr', got 'fast'"),
        (["device=cpu,cuda"], "got 'device'; it changes no score"),
        (["data=mnist,cifar10"], "got 'data'; scores on other data cannot be compared"),
    ],
)
def test_wrong_searches_are_refused(texts: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_search(texts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr=0..1", "expected 'lr' above 0, got 0"),
        ("momentum=0.5..1", "expected 'momentum' at least 0 and below 1, got 1"),
        ("epochs=1..200000000", "expected 'epochs' at least 0"),
        ("lr=0.1,-1", "expected 'lr' above 0"),
    ],
)
def test_values_outside_of_a_setting_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        require_valid(TrainConfig(), parse_search([text]))


def test_grid_has_all_values() -> None:
    space = parse_search(["lr=0.1..0.4:step=0.1", "batch_size=32..96:step=32", "method=fixup,he_in"])
    grid = grid_of(space)
    assert grid["lr"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert (grid["batch_size"], grid["method"]) == ([32, 64, 96], ["fixup", "he_in"])
    assert grid_size(space) == 24


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.0001..1:log", [0.0001, 1.0]),
        ("weight_decay=0..0.001", [0.0, 0.001]),
        ("epochs=2..200000000:log", [2, 200_000_000]),
    ],
)
def test_grid_of_a_range_without_a_step_names_a_form_that_it_accepts(text: str, values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"expected choices or a step for .* in a grid, got .*; list its") as caught:
        grid_of(parse_search([text]))
    (printed,) = parse_search([str(caught.value).rpartition("as in ")[2]])
    (choices,) = grid_of((printed,)).values()
    assert [printed.parse(choice) for choice in choices] == values
