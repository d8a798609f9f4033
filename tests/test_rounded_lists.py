"""What top-k lists still prove of a KL when their log-probabilities were rounded."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import scipy
from scipy.special import kl_div

from lossless_lab.statistical.censored import kl_lower_bound

mpmath.mp.dps = 40


def laws(seed, noise, n=30):
    rng = np.random.default_rng(seed)
    a = rng.normal(0, 3, n)
    return [scipy.special.log_softmax(x) for x in (a, a + rng.normal(0, noise, n))]


def top(logp, k, digits, to=float):
    ids = np.argsort(-logp)[:k]
    return [(int(i), to(round(float(logp[i]), digits))) for i in ids]


def exact_kl(a, b):
    """Of both full laws, in 40 digits."""
    p, q = ([mpmath.e ** mpmath.mpf(float(x)) for x in side] for side in (a, b))
    p, q = ([x / mpmath.fsum(side) for x in side] for side in (p, q))
    return mpmath.fsum(x * mpmath.log(x / y) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("digits", [1, 2, 3])
@pytest.mark.parametrize("to", [float, np.float32])
def test_a_rounded_list_still_bounds_the_kl_from_below(digits, to):
    """Laws nearer to each other than the rounding; taken as exact, the lists overstate the KL."""
    overstated = 0
    for seed, k in itertools.product(range(30), (1, 3, 10, 30)):
        a, b = laws(seed, noise=0.3 * 10.0**-digits)
        lists = top(a, k, digits, to), top(b, k, digits, to)
        truth = exact_kl(a, b)
        assert 0 <= kl_lower_bound(*lists).nats <= truth
        assert kl_lower_bound(*lists, rounding=0.5 * 10.0**-digits).nats <= truth
        if digits > 1:  # of one decimal, what is taken as exact sums to more than 1
            overstated += kl_lower_bound(*lists, rounding=0).nats > truth
    assert digits == 1 or overstated > 30  # mutant: no rounding


def test_far_laws_keep_most_of_their_bound():
    for seed in range(20):
        a, b = laws(seed, noise=2.0)
        exact, rounded = (kl_lower_bound(top(a, 10, d), top(b, 10, d)).nats for d in (15, 2))
        assert 0.9 * exact - 0.01 < rounded <= float(exact_kl(a, b))


def test_the_least_over_all_that_rounds_to_the_lists():
    """By trying every corner and many inner values of two tokens and the rest."""
    reference, candidate = [(0, -0.5), (1, -1.6)], [(1, -0.8), (0, -1.4)]
    found = kl_lower_bound(reference, candidate, rounding=0.05, resolution=0).nats
    grid = np.exp(np.linspace(-0.05, 0.05, 21))
    p0, p1, q0, q1 = np.meshgrid(*(x * grid for x in np.exp([-0.5, -1.6, -1.4, -0.8])))
    cells = [kl_div(p0, q0).min(), kl_div(p1, q1).min()]
    rest = kl_div(np.maximum(1 - p0 - p1, 0), np.maximum(1 - q0 - q1, 0))
    assert found == pytest.approx(sum(cells) + rest.min(), abs=1e-4)


def test_what_is_not_a_rounding_is_refused():
    for wrong in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="`rounding` must be at least 0 nats"):
            kl_lower_bound([(0, -1.0)], [(0, -1.0)], rounding=wrong)
