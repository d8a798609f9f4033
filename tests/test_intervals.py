"""Intervals against statsmodels and scipy; their coverage enumerated exactly or simulated."""

import itertools
import math
import zlib

import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import DescrStatsW

from lossless_lab.stats import intervals
from lossless_lab.stats.intervals import (
    bounded_mean_interval,
    cluster_mean_interval,
    n_for_share,
    perfect_bound,
    share_interval,
)

ALPHA = 0.05


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def hoeffding(n):
    """Half-width of the simplest valid one-sided limit of a mean in [0, 1]."""
    return math.sqrt(math.log(1 / ALPHA) / (2 * n))


def exact_miss(limit, n, truth):
    """P(limit(k) < truth), k successes of n at that truth, added up over all k."""
    k = np.arange(n + 1)
    missed = np.array([limit(int(i)) < truth for i in k])
    return float(scipy.stats.binom.pmf(k, n, truth)[missed].sum())


# Shares


@pytest.mark.parametrize("k, n", [(0, 59), (3, 100), (50, 100), (7, 7), (180, 220)])
def test_share_intervals_equal_statsmodels(k, n):
    assert share_interval(k, n) == pytest.approx(proportion_confint(k, n, method="beta"), abs=1e-9)
    low, high = proportion_confint(k, n, alpha=2 * ALPHA, method="beta")
    assert share_interval(k, n, alternative="less") == pytest.approx((0, high), abs=1e-9)
    assert share_interval(k, n, alternative="greater") == pytest.approx((low, 1), abs=1e-9)


def test_share_bounds_miss_at_most_as_often_as_they_say():
    n = 40
    bounds = [share_interval(k, n, alternative="less").high for k in range(n + 1)]
    missed = [exact_miss(bounds.__getitem__, n, p) for p in np.linspace(0.005, 0.995, 199)]
    assert max(missed) <= ALPHA
    assert max(missed) > 0.04  # and is not idle: close to the level at its worst


def test_a_wald_bound_would_be_caught():
    n = 40

    def wald(k):
        return k / n + 1.645 * math.sqrt(k / n * (1 - k / n) / n)

    assert exact_miss(wald, n, 0.05) > 0.1  # zeros alone would have shown a share of 0


def test_three_of_three_still_allow_63_percent():
    assert share_interval(0, 3, alternative="less").high == pytest.approx(0.632, abs=5e-4)
    assert share_interval(0, 30, alternative="less").high == pytest.approx(0.095, abs=5e-4)


@pytest.mark.parametrize("margin", [0.01, 0.02, 0.05, 0.2])
def test_the_number_needed_is_the_smallest_that_suffices(margin):
    n = n_for_share(margin)
    assert share_interval(0, n, alternative="less").high <= margin
    assert share_interval(0, n - 1, alternative="less").high > margin


# Means over clusters


def test_cluster_means_equal_scipy_and_statsmodels(rng):
    x = rng.beta(1, 5, 40)
    assert cluster_mean_interval(x) == pytest.approx(DescrStatsW(x).tconfint_mean(), rel=1e-12)
    test = scipy.stats.ttest_1samp(x, 0, alternative="less")
    high = test.confidence_interval(0.95).high
    assert cluster_mean_interval(x, alternative="less") == pytest.approx((-math.inf, high))
    low = DescrStatsW(x).tconfint_mean(alternative="larger")[0]
    assert cluster_mean_interval(x, alternative="greater") == pytest.approx((low, math.inf))


def test_below_thirty_clusters_there_is_no_interval():
    with pytest.raises(ValueError, match="at least 30 clusters for an interval; got 29"):
        cluster_mean_interval(np.zeros(29))
    with pytest.raises(ValueError, match="finite; got nan at position 2"):
        cluster_mean_interval([0.0, 1.0, math.nan] * 20)


def test_tokens_taken_as_independent_would_be_caught(rng):
    """128 documents of 50 alike tokens: document means cover, single tokens do not."""
    clustered = naive = 0
    for _ in range(200):
        effect = rng.gamma(0.5, 1, 128)
        tokens = effect[:, None] * rng.gamma(2, 0.5, (128, 50))
        low, high = cluster_mean_interval(tokens.mean(1))
        clustered += low <= 0.5 <= high
        low, high = cluster_mean_interval(tokens.ravel())
        naive += low <= 0.5 <= high
    assert scipy.stats.binomtest(clustered, 200).proportion_ci(0.99).high >= 0.95
    assert clustered >= 0.88 * 200 and naive < 0.5 * 200


# Means in [0, 1], by betting

LAWS = {
    "coin": lambda rng, n: rng.integers(0, 2, n) * 1.0,
    "rare": lambda rng, n: (rng.random(n) < 0.02) * 1.0,
    "small": lambda rng, n: rng.beta(0.5, 20, n),
    "heavy": lambda rng, n: np.where(rng.random(n) < 0.01, 1.0, 0.002),
    "uniform": lambda rng, n: rng.random(n),
}
MEANS = {"coin": 0.5, "rare": 0.02, "small": 0.5 / 20.5, "heavy": 0.01198, "uniform": 0.5}


def worst_misses(n):
    """Largest exact P(high < truth) and P(low > truth) over truths, for n values of 0 or 1."""
    bounds = [bounded_mean_interval([1.0] * k + [0.0] * (n - k)) for k in range(n + 1)]
    low, high = np.array(bounds).T
    missed = []
    for truth in np.linspace(0.01, 0.99, 99):
        pmf = scipy.stats.binom.pmf(np.arange(n + 1), n, truth)
        missed.append((pmf[high < truth].sum(), pmf[low > truth].sum()))
    return np.max(missed, axis=0)


@pytest.mark.parametrize("n", [3, 12, 40, 100])
def test_betting_limits_miss_at_most_as_often_as_they_say_exactly(n):
    """No simulation: every outcome of 0/1 values is enumerated, on both sides."""
    assert (worst_misses(n) <= ALPHA).all()


@pytest.mark.parametrize("support", [(0.0, 0.3, 1.0), (0.0, 0.05, 0.1)])
def test_betting_limits_of_three_valued_laws_are_valid_exactly(support):
    n = 6
    outcomes = list(itertools.product(support, repeat=n))
    cache = {key: bounded_mean_interval(key) for key in {tuple(sorted(o)) for o in outcomes}}
    for weights in ((0.9, 0.05, 0.05), (0.5, 0.3, 0.2), (0.1, 0.1, 0.8), (0.3, 0.7, 0.0)):
        law, truth = dict(zip(support, weights, strict=True)), np.dot(support, weights)
        low = high = 0.0
        for outcome in outcomes:
            p, bound = math.prod(law[x] for x in outcome), cache[tuple(sorted(outcome))]
            low += p * (bound.low > truth + 1e-12)
            high += p * (bound.high < truth - 1e-12)
        assert low <= ALPHA and high <= ALPHA


@pytest.mark.parametrize(
    "mutate",
    [
        lambda wealth, x, mean: wealth(x, mean) + math.log(5),  # the wealth starts above 1
        lambda wealth, x, mean: wealth(x, mean) * 2,  # each value counted twice
    ],
)
def test_unfair_bets_are_caught(monkeypatch, mutate):
    wealth = intervals._log_wealth
    monkeypatch.setattr(intervals, "_log_wealth", lambda x, mean: mutate(wealth, x, mean))
    assert worst_misses(40).max() > ALPHA


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("n", [12, 100])
def test_betting_limits_cover_in_simulation(name, n, rng):
    missed = np.zeros(2)
    repetitions = 150
    for _ in range(repetitions):
        low, high = bounded_mean_interval(LAWS[name](rng, n))
        missed += (low > MEANS[name], high < MEANS[name])
    for count in missed.astype(int):  # a claim of 5 % fails when its 99.9 % lower limit passes it
        assert scipy.stats.binomtest(int(count), repetitions).proportion_ci(0.998).low <= ALPHA


def test_betting_limits_against_hoeffdings(rng):
    """Far narrower near 0, where equivalence is decided; at worst half as wide again."""
    for n in (12, 100, 1000):
        assert perfect_bound(n) < hoeffding(n)
    assert perfect_bound(300) < 0.25 * hoeffding(300)
    for name, worst in (("small", 0.5), ("heavy", 0.6), ("uniform", 0.85), ("coin", 1.4)):
        x = LAWS[name](rng, 1000)
        assert bounded_mean_interval(x).high - x.mean() < worst * hoeffding(1000), name


def test_zeros_are_bounded_nearly_as_well_as_an_exact_share():
    for n in (30, 300, 3000):
        exact = share_interval(0, n, alternative="less").high
        assert exact < perfect_bound(n) < 1.45 * exact


def test_betting_limits_do_not_depend_on_order_and_hold_the_mean(rng):
    x = rng.beta(0.5, 3, 50)
    low, high = bounded_mean_interval(x)
    assert bounded_mean_interval(np.sort(x)) == pytest.approx((low, high), abs=1e-9)
    assert 0 <= low < x.mean() < high <= 1
    mirrored = bounded_mean_interval(1 - x)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high), abs=1e-9)
    wider = bounded_mean_interval(x, confidence=0.99)
    assert wider.low < low and wider.high > high


def test_extremes_of_the_unit_interval():
    assert bounded_mean_interval(np.ones(50)).high == 1.0
    assert bounded_mean_interval(np.zeros(50)).low == 0.0
    low, high = bounded_mean_interval([0.3])
    assert low < 0.3 < high and high > 0.9  # one value shows almost nothing


@pytest.mark.parametrize(
    "values, message",
    [
        ([], r"numbers in \[0, 1\]"),
        ([0.5, 1.2], r"in \[0, 1\]"),
        ([0.1, math.nan], "nan at position 1"),
    ],
)
def test_values_outside_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        bounded_mean_interval(values)
