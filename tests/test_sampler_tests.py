"""Tests of counts and of sequences against scipy, statsmodels and plain formulas; their rates."""

import itertools
import math
import zlib

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import GofChisquarePower

from benchmarks import detection, sampler_power, samplers
from lossless_lab.mutants.speculative import SPECULATIVE_MUTANTS
from lossless_lab.semantic.paired import PairedTable
from lossless_lab.statistical.equivalence import tv_upper_bound_two_samples
from lossless_lab.statistical.goodness_of_fit import (
    SamplerFit,
    chi_square_fit,
    g_fit,
    multinomial_fit,
)
from lossless_lab.statistical.sampler_verdict import judge_sampler
from lossless_lab.statistical.slices import Concentration
from lossless_lab.statistical.token_shares import share_difference_tests, token_share_tests
from lossless_lab.statistical.two_sample import chi_square_two_samples, mmd_test
from lossless_lab.stats import power, sequential
from lossless_lab.stats.multiplicity import benjamini_hochberg, holm


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


ZIPF = samplers.law("zipf", 64)


def test_chi_square_and_g_equal_scipys_where_nothing_is_rare(rng):
    probs = samplers.law("uniform", 6)
    counts = rng.multinomial(600, probs)
    expected = stats.chisquare(counts, 600 * probs)
    fit = chi_square_fit(counts, probs)
    assert fit.statistic == pytest.approx(expected.statistic)
    assert fit.pvalue == pytest.approx(expected.pvalue, rel=1e-6)
    g, williams = g_fit(counts, probs), 1 + (36 - 1) / (6 * 600 * 5)
    expected = stats.power_divergence(counts, 600 * probs, lambda_=0).statistic / williams
    assert g.statistic == pytest.approx(expected)
    assert g.pvalue == pytest.approx(stats.chi2.sf(expected, 5))


def test_the_scale_is_the_exact_variance(rng):
    """Variance of the statistic over 50,000 samplers, and by the formula behind the p-value."""
    probs = np.append(0.5, np.full(11, 0.5 / 11))
    x = ((rng.multinomial(150, probs, 50_000) - 150 * probs) ** 2 / (150 * probs)).sum(1)
    k, n = 12, 150
    exact = 2 * (k - 1) + ((1 / probs).sum() - k**2 - 2 * k + 2) / n
    assert x.var() == pytest.approx(exact, rel=0.05)
    counts = np.round(150 * probs).astype(int)
    counts[0] += 150 - counts.sum() - 9
    counts[1] += 9
    fit, scale = chi_square_fit(counts, probs), exact / (2 * (k - 1))
    assert fit.n_pooled == 0 and scale > 1.01
    assert fit.pvalue == pytest.approx(stats.chi2.sf(fit.statistic / scale, (k - 1) / scale))


def test_rare_tokens_are_pooled_by_what_the_law_expects():
    probs = np.array([0.5, 0.4, 0.06, 0.03, 0.01])
    fit = chi_square_fit([50, 40, 6, 0, 4], probs)
    together = stats.chisquare([50, 40, 6, 4], [50, 40, 6, 4])
    assert fit.n_pooled == 3  # 3 and 1 are below 5, and 4 together still are
    assert fit.statistic == pytest.approx(together.statistic)


def test_one_cell_is_nothing_to_test():
    """Too few draws for two cells of 5: no p-value, and Holm of the judgement has none of it."""
    for fit in (
        chi_square_fit([1, 0], [0.5, 0.5]),
        g_fit([0, 0], [0.5, 0.5]),
        chi_square_two_samples([3, 0], [0, 0]),
    ):
        assert math.isnan(fit.pvalue) and "nothing to test" in str(fit)
    verdict = judge_sampler([8, 0], [0.5, 0.5], margin=0.05)
    assert verdict.test.endswith("; no cells left for chi-square")
    single, sets = 2 / 256 * 2, 2 / 256  # 2 tokens two-sided; 2 sets one-sided
    assert verdict.pvalue == pytest.approx(2 * min(single, sets)) and verdict.pvalue < 0.05


def test_impossible_tokens_are_told_before_anything_is_pooled():
    for test in (chi_square_fit, g_fit, lambda c, q: multinomial_fit(c, q, rng=RNG)):
        fit = test([500, 497, 3], [0.5, 0.5, 0])
        assert fit.n_impossible == 3 and fit.n == 1000 and fit.pvalue > 0.5
        assert "3 impossible" in str(fit)
    shares = token_share_tests([500, 497, 3, 0], [0.5, 0.5, 0, 0])
    assert 0 < shares.adjusted[2] < 1e-200 and shares.adjusted[3] == 1


RNG = np.random.default_rng(0)


def test_the_multinomial_test_equals_enumeration(rng):
    """All outcomes of 6 draws of three tokens, their probabilities summed by hand."""
    probs, counts = np.array([0.5, 0.3, 0.2]), np.array([1, 1, 4])

    def g(x):
        return 2 * sum(k * math.log(k / (6 * p)) for k, p in zip(x, probs, strict=True) if k)

    outcomes = [x for x in itertools.product(range(7), repeat=3) if sum(x) == 6]
    exact = sum(stats.multinomial.pmf(x, 6, probs) for x in outcomes if g(x) >= g(counts) - 1e-9)
    fit = multinomial_fit(counts, probs, n_resamples=20_000, rng=rng)
    assert fit.statistic == pytest.approx(g(counts))
    assert fit.pvalue == pytest.approx(exact, abs=0.01)


def test_ties_count_as_no_less_far():
    """Of a fair coin tossed once, every outcome is as far: p = 1."""
    assert multinomial_fit([1, 0], [0.5, 0.5], n_resamples=99, rng=RNG).pvalue == 1
    x = [[1, 1]] * 3
    assert mmd_test(x, x, n_resamples=99, rng=RNG).pvalue == 1


def test_a_pvalue_is_never_zero():
    far = [10_000, 0], [1e-3, 1 - 1e-3]
    assert 0 < chi_square_fit(*far).pvalue < 1e-100
    assert 0 < g_fit(*far).pvalue < 1e-100
    assert multinomial_fit(*far, n_resamples=99, rng=RNG).pvalue == 0.01
    assert 0 < token_share_tests(*far).pvalue < 1e-100
    assert 0 < chi_square_two_samples([10_000, 0], [0, 10_000]).pvalue < 1e-100
    assert mmd_test([[1]] * 50, [[2]] * 50, n_resamples=99, rng=RNG).pvalue == 0.01


def test_a_floor_is_not_printed_as_a_value():
    far = [10_000, 0], [1e-3, 1 - 1e-3]
    uneven = pd.DataFrame({"kind": ["a", "b"], "n_documents": 30, "failed": [0.5, 0.1]})
    floors = {
        "p ≤ 0.01 (the least": [
            multinomial_fit(*far, n_resamples=99, rng=RNG),
            mmd_test([[1]] * 50, [[2]] * 50, n_resamples=99, rng=RNG),
        ],
        "p ≤ 1e-290 (the least": [
            chi_square_fit(*far),
            g_fit(*far),
            token_share_tests(*far),
            chi_square_two_samples([10_000, 0], [0, 10_000]),
            judge_sampler(*far, margin=0.1),
            sequential.sequential_fit([[10**9, 0]], [0.5, 0.5]),
            SamplerFit(n_tokens=9, pvalue=0.0, n_impossible=0),
            PairedTable(both=0, only_reference=3000, only_candidate=0, neither=0),
        ],
        "p ≤ 0.0001 (the least": [
            Concentration(frame=uneven, pvalue=1e-4, threshold=1.0, least=1e-4),
        ],
    }
    for floor, results in floors.items():
        for result in results:
            assert floor in str(result) and "p = " not in str(result), result
    assert "p = 1)" in str(multinomial_fit([1, 0], [0.5, 0.5], n_resamples=99, rng=RNG))


def test_token_shares_are_binomial_tests(rng):
    counts = rng.multinomial(300, ZIPF)
    shares = token_share_tests(counts, ZIPF)
    for token in (0, 5, 63):
        law = stats.binom(300, ZIPF[token])
        tails = law.cdf(counts[token]), law.sf(counts[token] - 1)
        assert shares.pvalues[token] == pytest.approx(min(1, 2 * min(tails)))
    assert np.allclose(shares.adjusted, multipletests(shares.pvalues, method="holm")[1])
    frame = shares.to_frame()
    assert frame.token[0] == shares.pvalues.argmin() and len(frame) == 64
    assert f"token {frame.token[0]}:" in str(shares)


def test_share_differences_are_fishers(rng):
    x, y = rng.multinomial(80, ZIPF), rng.multinomial(120, ZIPF)
    found = share_difference_tests(x, y)
    for token in (0, 7):
        table = [[x[token], 80 - x[token]], [y[token], 120 - y[token]]]
        tails = [stats.fisher_exact(table, alternative=a).pvalue for a in ("less", "greater")]
        assert found.pvalues[token] == pytest.approx(min(1, 2 * min(tails)))
    unseen = (x + y) == 0
    assert (found.adjusted[unseen] == 1).all()


def test_the_two_sample_chi_square_equals_scipys():
    x, y = [30, 25, 8, 1, 0], [20, 41, 9, 0, 2]
    fit = chi_square_two_samples(x, y)
    expected = stats.chi2_contingency([[30, 25, 9], [20, 41, 11]], correction=False)
    assert fit.statistic == pytest.approx(expected.statistic)
    assert fit.pvalue == pytest.approx(expected.pvalue)


def plain_mmd(x, y):
    """The public package's statistic, pair by pair."""

    def mean(a, b, same):
        values = [np.mean(s == t) for i, s in enumerate(a) for j, t in enumerate(b)
                  if not (same and i == j)]  # fmt: skip
        return np.mean(values)

    return mean(x, x, True) - 2 * mean(x, y, False) + mean(y, y, True)


def test_mmd_equals_the_plain_formula(rng):
    x, y = rng.integers(0, 4, (9, 5)), rng.integers(0, 6, (7, 5))
    assert mmd_test(x, y, n_resamples=9, rng=rng).statistic == pytest.approx(plain_mmd(x, y))


def test_mmds_permutations_equal_a_plain_loop(rng):
    """The share of permutations as far, each by the plain formula."""
    x, y = rng.integers(0, 3, (6, 4)), rng.integers(0, 3, (5, 4)) // 2
    both, observed = np.concatenate([x, y]), plain_mmd(x, y)
    splits = list(itertools.combinations(range(11), 6))
    far = 0
    for split in splits:
        inside = np.isin(np.arange(11), split)
        far += plain_mmd(both[inside], both[~inside]) >= observed - 1e-12
    found = mmd_test(x, y, n_resamples=20_000, rng=rng)
    assert found.pvalue == pytest.approx(far / len(splits), abs=0.015)


def test_mmd_sees_a_difference_of_sequences(rng):
    """Equal shares of tokens at each position, but for one position."""
    x, y = rng.integers(0, 8, (2, 200, 6))
    y[:, 3] = rng.choice(8, 200, p=samplers.law("zipf", 8))
    assert mmd_test(x, y, n_resamples=199, rng=rng).pvalue == 0.005


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: chi_square_fit([1, 2], [0.5, 0.4]), "sums to 0.9"),
        (lambda: chi_square_fit([1, 2], [1.5, -0.5]), "smallest entry -0.5"),
        (lambda: chi_square_fit([1, 2, 3], [0.5, 0.5]), r"\(3,\) and \(2,\)"),
        (lambda: token_share_tests([1, -2], [0.5, 0.5]), r"got -2 at \[1\]"),
        (lambda: g_fit([1, 0.5], [0.5, 0.5]), r"got 0.5 at \[1\]"),
        (lambda: multinomial_fit([], [], rng=RNG), "one per token"),
        (lambda: multinomial_fit([1, 2], [0.5, 0.5], n_resamples=0, rng=RNG), "least 1; got 0"),
        (lambda: multinomial_fit([1, 2], [0.5, 0.5], n_resamples=2.5, rng=RNG), "got 2.5"),
        (lambda: sequential.log_evalue([-1, 1], [0.5, 0.5]), "`counts` must be whole numbers ≥ 0"),
        (lambda: sequential.log_evalue([[2, 1], [0, 0.5]], [0.5, 0.5]), "`counts` must be whole"),
        (lambda: sequential.log_evalue([1, 1, 1], [0.5, 0.5]), r"one per token \(2,\)"),
        (lambda: sequential.sequential_fit([[[1, 1]]], [0.5, 0.5]), "whole .* at 0"),
        (lambda: chi_square_two_samples([1, 2], [1, 2, 3]), "one shape"),
        (lambda: mmd_test([[1, 2]] * 3, [[1]] * 3, rng=RNG), "one width"),
        (lambda: mmd_test([[1]] * 3, [[1]] * 3, n_resamples=0, rng=RNG), "at least 1; got 0"),
        (lambda: holm([0.1, 1.1]), "got 1.1 at 1"),
        (lambda: chi_square_fit([math.inf, 1], [0.5, 0.5]), r"`counts` .* got inf at \[0\]"),
        (lambda: chi_square_fit([2**53, 2], [0.5, 0.5]), "`counts` must be 2⁵³ draws"),
        (lambda: holm([[0.1], [0.2]]), r"\[m\]; got shape \(2, 1\)"),
        (lambda: benjamini_hochberg(0.1), r"\[m\]; got shape \(\)"),
        (lambda: sequential.sequential_fit([[1, 1]], [0.5, 0.4]), "sum to 1; .* sum 0.9"),
        (lambda: sequential.sequential_fit([[1, 1]], [math.nan, 0.5]), "sum nan"),
        (lambda: sequential.sequential_fit([[[1, 1]]], [[0.5, 0.5]]), r"shape \(1, 2\)"),
        (lambda: sequential.sequential_fit([[1, 1], [1]], [0.5, 0.5]), r"\(2,\); got .* at 1"),
        (lambda: sequential.sequential_fit([[-1, 1]], [0.5, 0.5]), "whole numbers ≥ 0"),
        (lambda: sequential.sequential_fit([[0.5, 1]], [0.5, 0.5]), "whole numbers ≥ 0"),
        (lambda: sequential.sequential_fit([], [0.5, 0.5], alpha=0), "`alpha` .* got 0"),
        (lambda: power.n_for_tv(0, n_tokens=4), "got 0"),
        (lambda: power.n_for_tv(0.1, n_tokens=4, power=0.01), "`power` must be above `alpha`"),
        (lambda: power.smallest_tv_detectable(0, n_tokens=4), "`n` must be at least 1; got 0"),
        (lambda: power.smallest_tv_detectable(9, n_tokens=4, power=1), "`power` .* got 1"),
        (lambda: power.smallest_share_change(9, 0.1, n_tests=0), "`n_tests` .* got 0"),
        (lambda: power.smallest_share_change(9, 1.5), "`share` .* got 1.5"),
        (lambda: power.neyman_pearson_limit(0), "`n` must be at least 1; got 0"),
        (lambda: power.smallest_tv_detectable(10, n_tokens=1), "got 1"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_corrections_equal_statsmodels(rng):
    p = rng.random(40) ** 3
    assert np.allclose(holm(p), multipletests(p, method="holm")[1])
    assert np.allclose(benjamini_hochberg(p), multipletests(p, method="fdr_bh")[1])


def test_power_equals_statsmodels():
    tv = power.smallest_tv_detectable(2000, n_tokens=9)
    expected = GofChisquarePower().solve_power(nobs=2000, n_bins=9, alpha=0.05, power=0.8)
    assert 2 * tv == pytest.approx(float(np.squeeze(expected)), rel=1e-4)
    assert power.n_for_tv(tv, n_tokens=9) in (2000, 2001)
    assert math.isnan(power.smallest_tv_detectable(1, n_tokens=9))  # none is: TV ends at 1
    assert math.isnan(power.neyman_pearson_limit(1))
    z = stats.norm.ppf(0.95) + stats.norm.ppf(0.8)
    assert power.neyman_pearson_limit(400, share=0.2) == pytest.approx(z * 0.4 / 20)


def test_the_evalue_is_a_product_of_predictions(rng):
    """Each draw's factor is what the prior's posterior predicts for it, over the law."""
    probs, draws = samplers.law("zipf", 5), rng.integers(0, 5, 30)
    counts, factors = np.zeros(5), np.zeros(7)
    for token in draws:
        a = 10.0 ** np.arange(1, 8)
        factors += np.log((a * probs[token] + counts[token]) / (a + counts.sum()) / probs[token])
        counts[token] += 1
    expected = np.log(np.mean(np.exp(factors)))
    assert sequential.log_evalue(counts, probs) == pytest.approx(expected, abs=1e-6)


def test_the_evalue_is_1_on_average():
    """Over all 3^6 outcomes of six draws, by enumeration."""
    probs = np.array([0.6, 0.3, 0.1])
    draws = np.array(list(itertools.product(range(3), repeat=6)))
    counts = (draws[..., None] == np.arange(3)).sum(1)
    assert probs[draws].prod(1) @ np.exp(sequential.log_evalue(counts, probs)) == pytest.approx(1)


def test_the_sequential_test_stops_early_and_at_the_impossible(rng):
    probs = samplers.law("uniform", 16)
    wrong = samplers.biased(probs, 0.2, "spread")
    fit = sequential.sequential_fit((rng.multinomial(50, wrong) for _ in range(1000)), probs)
    assert fit.stopped and fit.n < 1500 and fit.pvalue <= 0.05
    right = sequential.sequential_fit((rng.multinomial(50, probs) for _ in range(40)), probs)
    assert not right.stopped and right.n == 2000 and "still open" in str(right)
    banned = sequential.sequential_fit([[5, 5, 0], [4, 5, 1], [5, 5, 0]], [0.5, 0.5, 0])
    assert banned.stopped and banned.n == 20 and banned.n_impossible == 1
    assert "1 impossible" in str(banned)


def test_the_sequential_test_takes_any_law():
    """Of float32, of the least probabilities there are; its p-value is never 0."""
    thirds = np.full(3, 1 / 3, np.float32)
    exact = sequential.sequential_fit([[9, 1, 0]], np.full(3, 1 / 3)).log_evalue
    assert sequential.sequential_fit([[9, 1, 0]], thirds).log_evalue == pytest.approx(exact)
    halves = sequential.sequential_fit([[30, 2]], [0.5, 0.5])
    rare = sequential.sequential_fit([[30, 2, 0]], [0.5, 0.5, 1e-320])
    assert rare.stopped and rare.log_evalue == pytest.approx(halves.log_evalue)
    assert 0 < sequential.sequential_fit([[10**9, 0]], [0.5, 0.5]).pvalue < 1e-300


def test_billions_of_draws_are_counted_right():
    """Products of them pass 2⁶³."""
    n = 4 * 10**9
    assert tv_upper_bound_two_samples([n, n], [n, n]).n == n
    fit = chi_square_two_samples([n, n], [n, n + 10**6])
    table = [[n, n], [n, n + 10**6]]
    assert fit.pvalue == pytest.approx(stats.chi2_contingency(table, correction=False).pvalue)
    shares = token_share_tests([n, n + 10**6], [0.5, 0.5])
    normal = 2 * stats.norm.sf(0.5e6 / math.sqrt((2 * n + 10**6) / 4))
    assert shares.pvalues == pytest.approx(normal, rel=1e-2)


@pytest.fixture(scope="module")
def table():
    return pd.read_csv(samplers.TABLE)


def test_the_published_rates_are_those_of_this_code(table):
    assert set(table.code) == {samplers.code()}, "run `python -m benchmarks calibrate samplers`"
    assert (table.n_repetitions >= 2000).all()


def test_no_published_claim_fails(table):
    failed = table[table.claim.str.contains("FAILS")]
    assert failed.empty, failed.to_string()
    assert set(table.what) >= {"false alarms", "family", "peeking", "coverage"}


def test_the_naive_tests_are_worse(table):
    """A chi-square without pooling, and one that is looked at again and again."""
    naive = table[table.case.str.contains("naive")]
    assert (naive.rate > 0.15).all() and len(naive) == 3


@pytest.mark.parametrize("test", samplers.TESTS)
def test_few_false_alarms_reduced(test, rng):
    n = 100
    row = samplers.false_alarms(test, *samplers.TESTS[test][2][1], n, rng)[0]
    assert row["claim"] == "5% holds", row


def test_peeking_reduced(rng):
    assert samplers.peeking("sequential", "zipf", 4, 100, rng)[0]["claim"] == "5% holds"
    assert samplers.peeking(samplers.NAIVE, "uniform", 4, 100, rng)[0]["rate"] > 0.15


def test_a_test_without_correction_is_caught(rng, monkeypatch):
    """Mutant: Holm left out. The reduced form above must see it."""
    monkeypatch.setattr(samplers.multiplicity, "holm", np.asarray)
    assert samplers.family("token shares", "zipf", 16, 100, rng)[0]["claim"] == "5% FAILS"


def test_the_published_power_meets_its_limits():
    found = pd.read_csv(sampler_power.TABLE)
    assert set(found.code) == {sampler_power.code()}, "run `… calibrate sampler_power`"
    claims = found.claim.dropna()
    assert claims.str.contains("holds").sum() == 4 and not claims.str.contains("FAILS").any()
    smallest = found[found.what == "smallest TV found"]
    assert (smallest.tv > smallest.neyman_pearson).all() and (smallest.power >= 0.8).all()
    known = smallest.dropna(subset="predicted")
    assert np.allclose(known.tv, known.predicted, rtol=0.06)


def test_others_rules_pass_what_is_found_here():
    found = pd.read_csv(sampler_power.TABLE).query("what == 'passed by others'")
    at = found.set_index("tv").loc[0.003]
    assert at.passed_by_rule > 0.9 and at.power > 0.15
    assert found.set_index("tv").loc[0.008].power > 0.9
    assert 0.15 < found.temperature_off_by.dropna().item() < 0.2


@pytest.mark.parametrize(
    ("case", "n"), [(("chi-square", "uniform", "spread"), 1000),
                    (("token shares", "one of .05", "one token"), 10_000)],
)  # fmt: skip
def test_power_reduced(case, n, rng):
    test, name, shape = case
    probs = samplers.law(name, 16)
    tv = sampler_power.predicted(test, probs, shape, n)
    n_runs = 150
    share = sampler_power.found(test, probs, samplers.biased(probs, tv, shape), n, n_runs, rng)
    low, high = stats.binomtest(round(share * n_runs), n_runs).proportion_ci(0.999)
    assert low <= 0.83 and high >= 0.77, share


def test_the_published_detections():
    found = pd.read_csv(detection.TABLE)
    assert set(found.code) == {detection.code()}, "run `python -m benchmarks calibrate detection`"
    assert set(found.mutant) == set(SPECULATIVE_MUTANTS)
    assert not found.claim.str.contains("FAILS").any()
    natural = found.groupby("mutant").first().query("kind == 'sampling'")
    assert natural.rejected_100000.min() >= 0.8
    equivalent = found[["wrongly_equivalent_10000", "wrongly_equivalent_100000"]]
    assert (equivalent.max() <= 0.05).all()
    missed = found[(found.rejected_100000 >= 0.8) & (found.vllm_passes >= 0.5)]
    assert len(missed) >= 3  # found here, passed by others


@pytest.mark.parametrize("name", ["bonus-from-draft", "one-uniform", "no-bonus"])
def test_detection_reduced(name, rng):
    mutant = SPECULATIVE_MUTANTS[name]
    row = detection.detected(mutant, mutant.natural, 20, rng)
    if mutant.kind == "lossless":
        assert row["rejected_10000"] <= 0.35
    else:
        assert row["rejected_10000"] == 1 and row["word_100000"] == "DIFFERENT"
