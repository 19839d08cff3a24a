"""Residual plans: numbering, order, printing, errors."""

import copy
import dataclasses
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normfree.models import build
from normfree.plan import Branch, Layer, Position, ResidualPlan, positions

EXPLAINS = r"expect.+, got .+; .+"


def small_plan() -> ResidualPlan:
    """A stem, a projection block of two layers, an identity block of one, two body layers, a classifier."""
    first, second = positions([2], [True, False])
    return ResidualPlan(
        branches=(
            Branch("b1", first, (Layer("b1.conv1"), Layer("b1.conv2")), "projection", (Layer("b1.short"),)),
            Branch("b2", second, (Layer("b2.conv1", reads_activation=True),)),
        ),
        stem=(Layer("stem"),),
        body=(Layer("body1"), Layer("body2")),
        classifier=(Layer("fc"),),
    )


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), max_size=5), data=st.data())
def test_positions_number_every_branch_from_one(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    flags = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    made = positions(sizes, flags)
    assert [p.index for p in made] == list(range(1, total + 1))
    assert {p.total for p in made} <= {total}
    assert [p.transition for p in made] == flags
    assert [(p.stage, p.index_in_stage) for p in made] == [
        (k, b) for k, size in enumerate(sizes, start=1) for b in range(1, size + 1)
    ]
    for p in made:
        assert p.stage_size == sizes[p.stage - 1]
        assert p.index == sum(sizes[: p.stage - 1]) + p.index_in_stage
        assert p.previous_stage_size == (sizes[p.stage - 2] if p.stage > 1 else 0)
    for before, after in pairwise(made):
        assert (after.index_in_stage == 1) == (after.stage == before.stage + 1)
    plan = ResidualPlan(tuple(Branch(f"b{p.index}", p, ()) for p in made))
    assert plan.stage_sizes == tuple(sizes)


@pytest.mark.parametrize("flags", [[], [False] * 2, [False] * 4])
def test_positions_refuse_a_wrong_number_of_flags(flags: list[bool]) -> None:
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        positions([1, 2], flags)
    for part in ("3 for stages [1, 2]", f"got {len(flags)}", "pass a flag for every branch"):
        assert part in str(caught.value)


def test_layers_come_in_the_order_of_the_signal() -> None:
    names = [layer.name for layer in small_plan().layers()]
    assert names == ["stem", "b1.short", "b1.conv1", "b1.conv2", "b2.conv1", "body1", "body2", "fc"]


def test_hidden_layers_are_all_but_the_classifier() -> None:
    plan = small_plan()
    assert [layer.name for layer in plan.hidden()] == [layer.name for layer in plan.layers()][:-1]


def test_branch_degree_and_last_count_weight_layers() -> None:
    first, second = small_plan().branches
    assert first.depth == first.degree  # the name of release 0.1
    assert (first.degree, first.last.name) == (2, "b1.conv2")
    assert (second.degree, second.last.name) == (1, "b2.conv1")


def test_branch_last_of_an_empty_branch_explains() -> None:
    branch = Branch("body.3", positions([1], [False])[0], ())
    assert branch.degree == 0
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        _ = branch.last
    for part in ("'body.3'", "expected at least one", "a removed branch or an outer skip", "use a method"):
        assert part in str(caught.value)


def test_require_branches_explains_and_accepts() -> None:
    with pytest.raises(ValueError, match="expects a network with residual branches") as caught:
        ResidualPlan(classifier=(Layer("fc"),)).require_branches("fixup")
    for part in ("'fixup'", "the plan is empty", "use a method for plain networks", "'he_in'"):
        assert part in str(caught.value)
    small_plan().require_branches("fixup")


def test_plan_prints_as_a_tree() -> None:
    assert str(build("resnet20").plan).splitlines() == [
        "9 residual branches in 3 stages",
        "├─ stem        stem.conv",
        "├─ stage 1: 3 × [branch.conv1, branch.conv2] + identity  (body.0.0 … body.0.2)",
        "├─ stage 2: 1 × [branch.conv1, branch.conv2] + subsample  (body.1.0)",
        "├─ stage 2: 2 × [branch.conv1, branch.conv2] + identity  (body.1.1 … body.1.2)",
        "├─ stage 3: 1 × [branch.conv1, branch.conv2] + subsample  (body.2.0)",
        "├─ stage 3: 2 × [branch.conv1, branch.conv2] + identity  (body.2.1 … body.2.2)",
        "└─ classifier  classifier",
    ]


def test_plan_prints_unlike_neighbours_apart_and_removed_branches() -> None:
    plan = small_plan()
    text = str(plan)
    assert "1 × [conv1, conv2] + projection  (b1)" in text
    assert "1 × [conv1] + identity  (b2)" in text
    assert "├─ body        body2" in text
    bare = ResidualPlan(tuple(dataclasses.replace(branch, layers=()) for branch in plan.branches))
    assert "[no layers of its own]" in str(bare)
    assert "[no layers of its own]" not in text


def test_plan_without_branches_counts_its_layers() -> None:
    assert str(dataclasses.replace(small_plan(), branches=())) == "no residual branches, 4 weight layers"


@pytest.mark.parametrize("plan", [ResidualPlan(), small_plan()], ids=["empty", "small"])
def test_plan_survives_json(plan: ResidualPlan) -> None:
    loaded = json.loads(json.dumps(plan.to_json()))
    branches = tuple(
        Branch(
            branch["name"],
            Position(**branch["position"]),
            tuple(Layer(**layer) for layer in branch["layers"]),
            branch["shortcut"],
            tuple(Layer(**layer) for layer in branch["shortcut_layers"]),
        )
        for branch in loaded["branches"]
    )
    outside = {key: tuple(Layer(**layer) for layer in loaded[key]) for key in ("stem", "body", "classifier")}
    assert ResidualPlan(branches, **outside) == plan


def test_plan_of_a_model_is_json() -> None:
    loaded = json.loads(json.dumps(build("resnet20").plan.to_json()))
    assert [branch["position"]["index"] for branch in loaded["branches"]] == list(range(1, 10))
    assert loaded["classifier"][0]["name"] == "classifier"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (small_plan(), "branches"),
        (small_plan().branches[0], "layers"),
        (small_plan().branches[0].position, "index"),
        (Layer("fc"), "name"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_plan_is_a_frozen_value(value: object, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)
    twin = copy.deepcopy(value)
    assert twin == value
    assert hash(twin) == hash(value)
    assert dataclasses.replace(value, **{field: ()}) != value
