import torch

from normfree.train.engine.randomness import seeded_draws


def test_draws_depend_on_the_numbers_alone_and_leave_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    drawn = {}
    for _ in range(2):
        with seeded_draws(torch.device("cpu")) as seed:
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
        with seeded_draws(torch.device("cpu")) as seed:
            seed(1)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert torch.equal(torch.get_rng_state(), before)
