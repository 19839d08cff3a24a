"""Torch's generators are seeded and restored; objects are frozen and unfrozen."""

import gc

import pytest
import torch

import normfree
from normfree.train.engine.process_state import objects_frozen, searches_algorithms, seeded_generators


def test_draws_depend_on_the_numbers_alone_and_leave_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    drawn = {}
    for _ in range(2):
        with seeded_generators(torch.device("cpu")) as seed:
            for numbers in ((0,), (0, 0), (0, 1), (1, 0), (2**63 - 1, 10**9)):
                seed(*numbers)
                values = torch.rand(4)
                assert torch.equal(drawn.setdefault(numbers, values), values)
        assert torch.equal(torch.get_rng_state(), before)
        torch.default_generator.set_state(before)
    assert len({tuple(values.tolist()) for values in drawn.values()}) == 5


def test_generator_is_given_back_after_an_error() -> None:
    before = torch.get_rng_state()
    try:
        with seeded_generators(torch.device("cpu")) as seed:
            seed(1)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_frozen_objects_are_unfrozen_at_the_end() -> None:
    assert gc.get_freeze_count() == 0
    with objects_frozen():
        assert gc.get_freeze_count() > 0
        with objects_frozen():
            pass
        assert gc.get_freeze_count() > 0, "the inner one does not own them"
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_search_for_algorithms_depends_on_the_path_that_runs(compiled: bool) -> None:
    # The search takes algorithms by their time, so that two processes may round differently.
    base = normfree.TrainConfig(compile=compiled)
    assert not searches_algorithms(base.with_changes(kernels="stage"))
    assert searches_algorithms(base.with_changes(kernels="compiled"))
    with pytest.raises(ValueError, match="expected kernels 'stage' or 'compiled', got 'auto'"):
        searches_algorithms(base)
