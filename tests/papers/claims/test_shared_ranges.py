"""Reasons that several claims share."""

import math

import pytest

from normfree_papers.claims.shared_ranges import counted_error, does_not_train, reading, trains


def test_reading_names_the_word_and_the_number_that_refutes_it():
    for why in (reading("on par", "less than 1", "above 1"), trains(), does_not_train("fails")):
        assert why.startswith("our reading of the word '")
        assert why.endswith("refutes it")


@pytest.mark.parametrize(("percent", "images"), [(7.24, 10_000), (24.0, 50_000), (50.0, 4)])
def test_error_of_a_count_is_two_binomial_deviations(percent, images):
    p = percent / 100
    variance = sum(
        math.comb(images, k) * p**k * (1 - p) ** (images - k) * (k / images - p) ** 2 for k in range(images + 1)
    ) if images < 10 else p * (1 - p) / images  # fmt: skip
    assert counted_error(percent, images) == pytest.approx(200 * math.sqrt(variance))
