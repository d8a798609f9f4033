"""NaN and infinities are counted by side and place, and no aggregate loses one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lossless_lab.numerical.nonfinite import count_nonfinite, largest

NAN, INF = math.nan, math.inf
VALUES = st.sampled_from([0.0, 1.0, NAN, INF, -INF])


def test_a_nan_equal_in_place_is_on_both_sides():
    x = torch.tensor([1.0, NAN])
    found = count_nonfinite(x, x.clone())
    assert found.summary == "same positions on both sides"
    assert found.reference == found.candidate == {"nan": 1}
    assert found.first is None and found.total == 2


def test_a_new_nan_is_the_candidates_and_is_located():
    x, y = torch.zeros(2, 3), torch.zeros(2, 3)
    y[1, 2] = NAN
    found = count_nonfinite(x, y)
    assert found.summary == "only candidate" and found.first == (1, 2)
    assert "only candidate, first at (1, 2)" in str(found)


def test_equal_minus_infinities_are_no_difference():
    x = torch.tensor([[0.0, -INF]])
    assert torch.isnan(x - x).any()  # what a plain subtraction makes of equal rows
    assert count_nonfinite(x, x).first is None


def test_a_nan_against_an_infinity_differs_on_both_sides():
    found = count_nonfinite(torch.tensor([NAN]), torch.tensor([INF]))
    assert found.summary == "only reference and candidate"


def test_three_masked_attentions():
    """A fully masked first row: zeros with −inf, a mean with finfo.min, NaN written by hand."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
    mask = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    least = torch.finfo(torch.float32).min
    attend = torch.nn.functional.scaled_dot_product_attention
    infinite = attend(q, k, v, attn_mask=torch.zeros(3, 3).masked_fill(~mask, -INF))
    lowest = attend(q, k, v, attn_mask=torch.zeros(3, 3).masked_fill(~mask, least))
    scores = (q @ k.mT / 2).masked_fill(~mask, -INF)
    by_hand = scores.softmax(-1) @ v
    assert count_nonfinite(infinite, lowest).total == 0
    found = count_nonfinite(infinite, by_hand)
    assert found.summary == "only candidate" and found.candidate == {"nan": 4}
    assert found.first == (0, 0, 0, 0)
    real = (slice(None), slice(None), slice(1, None))  # without the pad row nothing is left
    assert count_nonfinite(infinite[real], by_hand[real]).total == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(pairs=st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=12))
def test_counts_equal_numpys(dtype, pairs):
    x, y = (np.array(side) for side in zip(*pairs, strict=True))
    found = count_nonfinite(torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype))
    for counted, z in ((found.reference, x), (found.candidate, y)):
        assert counted.get("nan", 0) == np.isnan(z).sum()
        assert counted.get("+inf", 0) == np.isposinf(z).sum()
        assert counted.get("-inf", 0) == np.isneginf(z).sum()
    kinds = [[repr(v) if not math.isfinite(v) else "finite" for v in z] for z in (x, y)]
    differing = [i for i, (a, b) in enumerate(zip(*kinds, strict=True)) if a != b]
    assert found.first == ((differing[0],) if differing else None)


def test_the_largest_value_keeps_a_nan_wherever_it_stands():
    assert max([0.1, NAN]) == 0.1  # Python's own depends on the order
    assert math.isnan(largest([0.1, NAN])) and math.isnan(largest([NAN, 0.1]))
    assert largest([0.1, 0.3]) == 0.3
    with pytest.raises(ValueError):
        largest([])


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"`candidate` must have the shape.*\(2,\); got \(3,\)"):
        count_nonfinite(torch.zeros(2), torch.zeros(3))
