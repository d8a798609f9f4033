"""Intervals of token means by document: against statsmodels, and their coverage in simulation."""

import math
import zlib

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.stats
import statsmodels.api as sm

from benchmarks import coverage
from lossless_lab.stats.intervals import (
    bounded_mean_interval,
    cluster_mean_interval,
    mean_limits,
    mean_upper_bound,
    token_mean_interval,
)


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_equal_to_statsmodels_with_documents_of_any_length(rng, confidence):
    documents = np.repeat(np.arange(35), rng.integers(1, 90, 35))
    x = rng.gamma(0.5, 1, len(documents)) + rng.gamma(1, 1, 35)[documents]
    fit = sm.OLS(x, np.ones(len(x))).fit(
        cov_type="cluster", cov_kwds={"groups": documents}, use_t=True
    )
    names = [f"document {i}" for i in documents]
    found = token_mean_interval(x, names, confidence=confidence)
    assert found == pytest.approx(fit.conf_int(1 - confidence)[0], rel=1e-9)
    shuffled = rng.permutation(len(x))
    again = token_mean_interval(x[shuffled], np.array(names)[shuffled], confidence=confidence)
    assert again == pytest.approx(found, rel=1e-9)
    side = token_mean_interval(x, names, alternative="less")
    assert side.low == -math.inf and side.high == pytest.approx(
        token_mean_interval(x, names, confidence=0.9).high
    )


def test_documents_of_one_length_count_alike(rng):
    x = rng.normal(size=(31, 7))
    by_token = token_mean_interval(x.ravel(), np.repeat(np.arange(31), 7))
    assert by_token == pytest.approx(cluster_mean_interval(x.mean(1)), rel=1e-9)


@pytest.mark.parametrize("call", [token_mean_interval, lambda x, d: mean_upper_bound(x)])
def test_refused_below_thirty_documents_and_with_nan(call):
    with pytest.raises(ValueError, match="at least 30 clusters for an interval; got 29"):
        call([0.0, 1.0] * 14 + [2.0], range(29))
    with pytest.raises(ValueError, match="nan at position 1"):
        call([0.0, math.nan] * 20, range(40))
    with pytest.raises(ValueError, match="at least 30 clusters for an interval; got 0"):
        call([], [])


@pytest.mark.parametrize("law", ["normal", "gamma", "mirrored", "constant"])
def test_the_bound_solves_halls_equation(rng, law):
    x = {
        "normal": rng.normal(size=40),
        "gamma": rng.gamma(0.5, size=40),
        "mirrored": -rng.gamma(0.5, size=40),
        "constant": np.full(40, 0.25),
    }[law]
    bound = mean_upper_bound(x)
    if law == "constant":
        assert bound == 0.25
        return
    skew = scipy.stats.skew(x, bias=False)

    def transformed(mean):
        u = (x.mean() - mean) / x.std(ddof=1)
        return u + skew * u**2 / 3 + skew**2 * u**3 / 27 + skew / 240

    wanted = -scipy.stats.t.ppf(0.95, 39) / math.sqrt(40)
    spread = 20 * x.std()
    found = scipy.optimize.brentq(
        lambda m: transformed(m) - wanted, x.mean() - spread, x.mean() + spread, xtol=1e-12
    )
    assert bound == pytest.approx(found, rel=1e-6)
    plain = cluster_mean_interval(x, alternative="less").high
    assert (bound > plain) == (skew > 0)


# ---- coverage ----------------------------------------------------------------------------------

CLAIMED = [name for name, (_, level, _) in coverage.CASES.items() if level == level]


@pytest.mark.parametrize("case", CLAIMED)
def test_the_claimed_coverage(case, rng):
    row = coverage.simulated(case, 128, 120, rng)
    assert "holds" in coverage.claim(row), row
    assert row["width"] < 1.25  # of a simple valid one: nothing holds by being idle


def test_iid_intervals_called_clustered_would_be_caught(rng):
    row = coverage.simulated("iid", 128, 60, rng)
    assert row["covered"] < 0.7 and "FAILS" in coverage.claim(row | {"interval": "token mean"})


def test_the_simulated_truth_is_that_of_the_simulation(rng):
    for case in coverage.CASES:
        x, _ = coverage.corpus(rng, 20_000, case)
        if "median" in case or "percentile" in case:
            found = np.percentile(x, 50 if "median" in case else 95)
        else:
            found = x.mean()
        assert found == pytest.approx(coverage.truth(case), rel=0.1), case


def test_the_committed_table_is_of_this_code_and_every_claim_holds():
    table = pd.read_csv(coverage.TABLE)
    assert set(table["code"]) == {coverage.code()}, "run `python -m benchmarks calibrate coverage`"
    assert set(table["interval"]) == set(coverage.CASES)
    assert set(table["n_documents"]) == {32, 128, 150} and (table["n_repetitions"] == 2000).all()
    assert not table["claim"].str.contains("FAILS").any()
    rows = table.set_index(["interval", "n_documents"])["covered"]
    for case in CLAIMED:
        level = coverage.CASES[case][1]
        assert rows[case, 128] >= min(level, 0.93) - 0.01 and rows[case, 150] >= 0.92
    assert rows["iid"].max() < 0.5 and rows["iid of KL"].max() < 0.6


@pytest.mark.parametrize("n", [10, 29, 30, 127, 128, 200])
def test_mean_limits_uses_what_holds_at_this_n(n):
    x = np.random.default_rng(n).beta(1, 60, n)
    low, high = mean_limits(x)
    betting = bounded_mean_interval(x)
    t = scipy.stats.t.ppf(0.95, n - 1) * x.std(ddof=1) / np.sqrt(n)
    assert low == pytest.approx(betting.low if n < 30 else max(x.mean() - t, 0))
    assert high == pytest.approx(betting.high if n < 128 else mean_upper_bound(x))
    assert 0 <= low < x.mean() < high <= 1
