"""Number formats of vectors, and late interaction."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import InvalidRequest
from shoal.runtimes.vectors import as_dtype, leading, maxsim, normalized


def vectors(n: int = 20, d: int = 37) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(n, d)).astype(np.float32)


def test_int8_scales_each_vector_to_its_own_largest_number():
    """The largest is 127 whatever the vector's length; every number is within half a step."""
    given = vectors() * np.logspace(-3, 3, 20, dtype=np.float32)[:, None]
    small = as_dtype(given, "int8")
    assert small.dtype == np.int8
    assert (np.abs(small.astype(int)).max(axis=1) == 127).all()
    steps = np.abs(given).max(axis=1, keepdims=True) / 127
    assert (np.abs(small * steps - given) <= steps * 0.501).all()


def test_int8_of_a_unit_vector_is_had_back_by_scaling():
    """Directions survive, which is all that a cosine asks."""
    unit = normalized(vectors())
    again = normalized(as_dtype(unit, "int8").astype(np.float32))
    assert np.einsum("nd,nd->n", unit, again).min() > 0.9999


def test_binary_packs_signs_eight_to_a_byte():
    """Bit 1 is a number above zero, the first number the highest bit; the rest is filled up."""
    given = vectors(3, 11)
    bits = np.unpackbits(as_dtype(given, "binary"), axis=1)
    assert bits.shape == (3, 16)
    assert np.array_equal(bits[:, :11], given > 0)
    assert not bits[:, 11:].any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "binary"])
def test_zero_vectors_stay_zero_in_every_format(dtype):
    """Nothing is divided by nothing."""
    assert not as_dtype(np.zeros((2, 16), np.float32), dtype).any()


def test_float16_refuses_what_it_cannot_hold():
    """A number past its range would be an infinity in an answer."""
    with pytest.raises(InvalidRequest) as caught:
        as_dtype(np.full((1, 2), 1e5, np.float32), "float16")
    assert caught.value.param == "dtype"


def test_leading_dimensions_are_bounded():
    """More than there are, or none, is the caller's fault."""
    assert leading(vectors(2, 8), 3, "m").shape == (2, 3)
    for dimensions in (0, 9):
        with pytest.raises(InvalidRequest):
            leading(vectors(2, 8), dimensions, "m")


def test_maxsim_is_the_sum_of_each_query_token_best_match():
    """The definition, written out; an order of document tokens does not matter."""
    query, document = normalized(vectors(5, 8)), normalized(vectors(9, 8)[2:])
    by_hand = sum(max(float(q @ t) for t in document) for q in query)
    assert maxsim(query, document) == pytest.approx(by_hand, rel=1e-6)
    assert maxsim(query, document[::-1]) == pytest.approx(by_hand, rel=1e-6)
    assert maxsim(query, query) == pytest.approx(len(query), rel=1e-6)
