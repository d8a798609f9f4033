"""Limits of TV: against brute force over all sets, coverage, width, words; one judgement."""

import itertools
import math
import zlib

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks import samplers
from lossless_lab.statistical import equivalence
from lossless_lab.statistical.equivalence import tv_upper_bound, tv_upper_bound_two_samples
from lossless_lab.statistical.sampler_verdict import judge_sampler
from lossless_lab.stats.tv_limits import any_limit, mean_excess, spread_limit, weights


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def simple(bound):
    return bound.estimate + math.sqrt(math.log(20) / (2 * bound.n))


def test_the_first_limit_is_near_the_largest_over_all_sets(rng):
    """Never below the maximum over 2^8 sets of the exact binomial limit, and little above it."""
    probs = samplers.law("zipf", 8)
    for n in (20, 300, 5000):
        share = rng.multinomial(n, probs) / n
        found = any_limit(lambda slope, s=share: np.maximum(slope * s - probs, 0).sum(), n, 0.05)
        sets = np.array(list(itertools.product((False, True), repeat=8)))
        hits = np.round(sets @ share * n)
        upper = np.where(hits < n, stats.beta.ppf(0.95, hits + 1, np.maximum(n - hits, 1)), 1)
        largest = (upper - sets @ probs).max()
        assert largest - 1e-9 <= found <= largest + 0.1 / math.sqrt(n)


def test_the_estimate_of_the_spread_distance_is_unbiased(rng):
    """Σ (p − q)²/w on average over 20,000 samples of 40 draws."""
    probs, n = samplers.law("zipf", 6), 40
    candidate, w = samplers.biased(probs, 0.1, "spread"), weights(probs)
    c = rng.multinomial(n, candidate, 20_000)
    u = ((c * (c - 1) / (n * (n - 1)) - 2 * probs * c / n + probs**2) / w).sum(1)
    assert u.mean() == pytest.approx(((candidate - probs) ** 2 / w).sum(), abs=4 * stats.sem(u))


def test_the_mean_of_a_perfect_sampler(rng):
    for name, n in itertools.product(("uniform", "zipf", "dominant"), (300, 20_000)):
        probs = samplers.law(name, 64)
        drawn = np.abs(rng.multinomial(n, probs, 2000) / n - probs).sum(1).mean() / 2
        assert drawn <= mean_excess(probs, n) * 1.01 and mean_excess(probs, n) <= 1.08 * drawn


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_never_wider_than_the_simple_bound(confidence, rng):
    slack = math.sqrt(-math.log(1 - confidence) / 2)
    for n in [*range(1, 130), 1000, 100_000]:
        for name in ("uniform", "dominant"):
            probs = samplers.law(name, 16)
            for candidate in (probs, samplers.law("zipf", 16), np.eye(16)[3]):
                bound = tv_upper_bound(rng.multinomial(n, candidate), probs, confidence=confidence)
                assert bound.high <= bound.estimate + slack / math.sqrt(n) + 1e-9, (n, name)
                assert bound.low <= bound.estimate <= bound.high + 1e-9


@pytest.mark.parametrize(
    ("law", "n", "tv", "shape"),
    [
        (("uniform", 16), 10_000, 0, "none"),
        (("zipf", 512), 10_000, 0.025, "spread"),
        (("zipf", 16), 10_000, 0.05, "one token"),
        (("uniform", 512), 10_000, 0.05, "temperature"),
    ],
)
def test_coverage_reduced(law, n, tv, shape, rng):
    for row in samplers.coverage(law, n, tv, shape, 150, rng):
        assert row["claim"] == "95% holds", row
        assert row.get("widest", 0) <= 1


def test_a_bound_of_the_corrected_estimate_is_caught(rng, monkeypatch):
    """Mutant: the point estimate taken as the bound. It covers too rarely, and is seen to."""

    def wrong(counts, probs):
        bound = tv_upper_bound(counts, probs)
        return type(bound)(
            **{f: getattr(bound, f) for f in bound.__slots__} | {"high": bound.corrected}
        )

    monkeypatch.setattr(samplers.equivalence, "tv_upper_bound", wrong)
    row = samplers.coverage(("zipf", 16), 10_000, 0.05, "spread", 150, rng)[0]
    assert row["claim"] == "95% FAILS"


def test_the_spread_limit_holds_where_hardly_a_token_is_drawn_twice(rng):
    """Its own error is 4 %.

    Mutant: Σ(p/w)² as the draws alone say it, which is too small when U is; it misses in 7 %.
    """
    n, tv, n_tokens, missed = 700, 0.4, 20_000, np.zeros(2)
    probs = samplers.law("uniform", n_tokens)
    for c in rng.multinomial(n, samplers.biased(probs, tv, "spread"), 1000):
        pairs = (c * (c - 1.0)).sum() / (n * (n - 1)) * n_tokens
        limit = spread_limit(pairs - 1, pairs * n_tokens, probs, n, 0.04)
        variance = 16 * (1 + 2 * tv) * tv**2 / n + 2 * max(1, pairs) * n_tokens / n**2
        naive = 4 * tv**2 - stats.norm.isf(0.04) * math.sqrt(variance) > max(pairs - 1, 0)
        missed += limit < tv, naive
    assert missed[0] <= 0.04 * 1000 and missed[1] >= 0.05 * 1000, missed


def test_the_published_coverage_and_width():
    table = pd.read_csv(samplers.TABLE).query("what == 'coverage'")
    upper = table[table.case == "upper limit of TV"]
    assert set(upper.n_tokens) >= {16, 512, 4096, 20_000} and (upper.widest <= 1).all()
    assert upper[(upper.n_tokens == 20_000) & (upper.tv >= 0.4)].claim.eq("95% holds").sum() >= 6
    upper = upper[upper.n >= 10_000]
    for n_tokens, width in ((16, 0.85), (512, 0.87), (4096, 0.61)):
        perfect = upper[(upper.tv == 0) & (upper.n_tokens == n_tokens)]
        assert (perfect.width < width).all()
    assert (
        upper.query("law == 'uniform' and n_tokens == 4096 and bias == 'spread'").width < 0.4
    ).all()


@pytest.mark.parametrize(
    ("law", "true", "n", "tv"),
    [(0.0, 0.05, 100, 0.05), (0.01, 0.04, 500, 0.03), (0.5, 0.53, 400, 0.03)],
)
def test_the_exact_size_of_different_between_two_tokens(law, true, n, tv):
    """How often the lower limit passes the true TV, over all counts: at most in 5 %."""
    k = np.arange(n + 1)
    low = np.array([tv_upper_bound([n - x, x], [1 - law, law]).low for x in k])
    assert stats.binom.pmf(k, n, true)[low > tv + 1e-12].sum() <= 0.05
    assert (np.diff(low[k >= law * n]) >= 0).all()  # monotone in what is too many


def test_the_exact_size_of_different_between_two_samples():
    """Over all pairs of counts of 40 draws each."""
    n, p, q = 40, 0.2, 0.5
    k = np.arange(n + 1)
    low = [[tv_upper_bound_two_samples([n - x, x], [n - y, y]).low for y in k] for x in k]
    chance = np.outer(stats.binom.pmf(k, n, p), stats.binom.pmf(k, n, q))
    assert chance[np.array(low) > 0.3 + 1e-12].sum() <= 0.05


def test_the_size_of_different_with_few_typical_counts(rng):
    """Five tokens, four of them rare: sets are chosen by splits of the draws."""
    law, true = np.array([0.96, *[0.01] * 4]), np.array([0.93, 0.04, *[0.01] * 3])
    drawn, often = np.unique(rng.multinomial(100, true, 2000), axis=0, return_counts=True)
    low = np.array([tv_upper_bound(c, law).low for c in drawn])
    assert often[low > 0.03 + 1e-12].sum() <= 0.05 * 2000
    assert tv_upper_bound([60, 40, 0, 0, 0], law).low > 0.2


def test_one_possible_token_has_the_exact_binomial_limits():
    """TV is the share of the others."""
    bound = tv_upper_bound([97, 1, 2], [1, 0, 0])
    exact = stats.binomtest(3, 100).proportion_ci(0.9, method="exact")
    assert (bound.low, bound.high) == pytest.approx((exact.low, exact.high))
    assert bound.perfect_high == pytest.approx(1 - 0.05 ** (1 / 100))
    assert bound.n_needed(0.05) in (59, 60)
    assert tv_upper_bound([0, 5], [1, 0]).high == 1


def test_words():
    probs = samplers.law("uniform", 4)
    even = tv_upper_bound([25_000] * 4, probs)
    assert [even.word(m) for m in (0.01, 0.001)] == ["EQUIVALENT", "INCONCLUSIVE"]
    far = tv_upper_bound([60_000, 20_000, 10_000, 10_000], probs)
    assert far.word(0.3) == "DIFFERENT" and far.low <= 0.35 <= far.high
    assert far.word(0.36) == "EQUIVALENT"
    assert far.word(0.35) == "INCONCLUSIVE"


def test_the_draws_needed_are_enough_and_not_many_too_many():
    for name, n_tokens in (("uniform", 16), ("zipf", 512), ("dominant", 16)):
        bound = tv_upper_bound(np.ones(n_tokens), samplers.law(name, n_tokens))
        assert bound.word(0.01) == "INCONCLUSIVE"
        n = bound.n_needed(0.01)
        highs = [equivalence._perfect(bound, m) for m in (n, 0.98 * n)]
        assert highs[0] <= 0.01 < highs[1]
        tiny = bound.n_needed(1e-7)
        assert tiny == pytest.approx(bound.n_needed(2e-4) * 4e6, rel=0.01)
    assert bound.n_needed(0.97) <= 2
    sure = tv_upper_bound([5, 5], [0.5, 0.5], confidence=1 - 1e-14)
    assert sure.n_needed(0.01) > 10 * tv_upper_bound([5, 5], [0.5, 0.5]).n_needed(0.01)
    certain = tv_upper_bound([5, 0], [1, 0])
    assert certain.n_needed(1e-12) == pytest.approx(math.log(20) * 1e12, rel=0.01)


def test_a_perfect_sampler_gets_the_bound_that_is_printed_beside(rng):
    for name, n_tokens in (("uniform", 16), ("zipf", 512)):
        probs = samplers.law(name, n_tokens)
        bounds = [tv_upper_bound(c, probs) for c in rng.multinomial(20_000, probs, 40)]
        assert np.median([b.high for b in bounds]) == pytest.approx(bounds[0].perfect_high, rel=0.1)
        assert f"{bounds[0].perfect_high:.4g}" in str(bounds[0])


def test_no_draws_say_nothing():
    bound = tv_upper_bound([0, 0], [0.5, 0.5])
    assert (bound.low, bound.high, bound.word(0.01)) == (0, 1, "INCONCLUSIVE")
    assert bound.n_needed(0.01) > 1000
    two = tv_upper_bound_two_samples([0, 0], [3, 4])
    assert (two.low, two.high, two.word(0.5)) == (0, 1, "INCONCLUSIVE")


def test_two_samples_reduced(rng):
    for tv in (0, 0.05):
        for row in samplers.two_sample_coverage("zipf", 64, tv, 150, rng):
            assert row["claim"] == "95% holds", row
    bound = tv_upper_bound_two_samples([900, 100], [100, 900])
    assert bound.word(0.5) == "DIFFERENT" and bound.estimate == pytest.approx(0.8)
    assert bound.high == pytest.approx(0.8 + math.sqrt(math.log(20) / 2 * (2 / 1000)))


def test_a_joint_law_is_judged_as_one(rng):
    first, then = samplers.law("zipf", 8), samplers.law("uniform", 8)
    law = np.outer(first, then)
    verdict = judge_sampler(rng.multinomial(50_000, law.ravel()).reshape(8, 8), law, margin=0.05)
    assert verdict.word == "EQUIVALENT" and not verdict.rejected
    together = np.eye(8) * first[:, None]  # the right marginals, but tied to each other
    verdict = judge_sampler(
        rng.multinomial(50_000, (0.9 * law + 0.1 * together).ravel()).reshape(8, 8),
        law,
        margin=0.05,
    )
    assert verdict.word == "DIFFERENT" and verdict.rejected
    assert verdict.to_frame().high[0] == verdict.bound.high
    assert verdict.worst_token % 9 == 0  # on the diagonal


@pytest.mark.parametrize("n_tokens", [3, 16, 300, 4000])
def test_the_pvalue_goes_with_the_word(n_tokens, rng):
    """The lower limit is above 0 just where its own test says so; DIFFERENT is always rejected."""
    probs = samplers.law("uniform", n_tokens)
    seen = set()
    for n, tv in itertools.product((40, 400, 4000), (0, 0.1, 0.15, 0.3)):
        counts = rng.multinomial(n, samplers.biased(probs, tv, "spread"))
        p = equivalence.preferred_sets_pvalue(counts, probs)
        for confidence in (0.9, 0.95, 1 - p * 1.001, 1 - p * 0.999):
            if not 0.5 <= confidence < 1:
                continue
            assert (tv_upper_bound(counts, probs, confidence=confidence).low > 0) == (
                p < 1 - confidence
            )
            verdict = judge_sampler(counts, probs, margin=0.001, confidence=confidence)
            assert verdict.rejected or verdict.word != "DIFFERENT"
            assert f"by {verdict.test}" in str(verdict)
            assert ("no cells left for chi-square" in str(verdict)) == (n < 10 or n < 5 * n_tokens)
            seen.add(verdict.word)
    assert seen >= {"DIFFERENT", "INCONCLUSIVE"}


def test_the_pvalue_of_sets_by_hand():
    """Of three tokens there are 6 sets: the smallest of their binomial tails, times 6."""
    counts, probs = np.array([9, 6, 1]), np.array([0.2, 0.3, 0.5])
    sets = [s for s in itertools.product((0, 1), repeat=3) if 0 < sum(s) < 3]
    tails = [stats.binom.sf(counts @ s - 1, 16, probs @ s) for s in sets]
    assert equivalence.preferred_sets_pvalue(counts, probs) == pytest.approx(6 * min(tails))
    assert equivalence.preferred_sets_pvalue([0, 0], [0.5, 0.5]) == 1
    assert equivalence.preferred_sets_pvalue([7, 0], [1.0, 0.0]) == 1
    assert equivalence.preferred_sets_pvalue([0, 1, 0], [1.0, 0.0, 0.0]) < 1e-290


def test_a_wide_law_is_rejected_where_it_is_called_different(rng):
    """2,000 draws of 4,000 tokens: chi-square has no cells, no token stands out, but sets do."""
    probs = samplers.law("uniform", 4000)
    verdict = judge_sampler(rng.multinomial(2000, samplers.biased(probs, 0.3, "spread")), probs,
                            margin=0.001)  # fmt: skip
    assert verdict.word == "DIFFERENT" and verdict.rejected and verdict.worst_token_pvalue == 1
    assert verdict.test == "sets of tokens; no cells left for chi-square"


def test_surely_different_by_less_than_the_margin(rng):
    probs = samplers.law("uniform", 16)
    counts = rng.multinomial(1_000_000, samplers.biased(probs, 0.005, "spread"))
    verdict = judge_sampler(counts, probs, margin=0.01)
    assert verdict.word == "EQUIVALENT" and verdict.rejected


def test_one_impossible_draw_rejects():
    verdict = judge_sampler([5000, 4999, 1], [0.5, 0.5, 0], margin=0.05)
    assert verdict.n_impossible == 1 and verdict.rejected and "1 draws impossible" in str(verdict)


def test_too_few_draws_are_told_how_many_are_needed(rng):
    verdict = judge_sampler(
        rng.multinomial(100, samplers.law("zipf", 64)), samplers.law("zipf", 64), margin=0.01
    )
    assert verdict.word == "INCONCLUSIVE" and f"{verdict.n_needed} draws needed" in str(verdict)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tv_upper_bound([1, 2], [0.5, 0.4]), "sums to 0.9"),
        (lambda: tv_upper_bound([1, 2], [-0.5, 1.5]), "smallest entry -0.5"),
        (lambda: judge_sampler([1, 2, 3], [0.5, 0.5], margin=0.1), "one shape"),
        (lambda: tv_upper_bound_two_samples([1, 2], [1]), "one shape"),
        (lambda: tv_upper_bound([1, 2], [0.5, 0.5]).n_needed(0), "got 0"),
        (lambda: tv_upper_bound([1, 2], [0.5, 0.5]).word(-1), "`margin` .* got -1"),
        (lambda: tv_upper_bound([1, 2], [0.5, 0.5], confidence=95), "`confidence` .* got 95"),
        (lambda: tv_upper_bound_two_samples([1], [1], confidence=0), "`confidence` .* got 0"),
        (lambda: judge_sampler([1, 2], [0.5, 0.5], margin=0.1, confidence=0.2), "got 0.2"),
        (lambda: judge_sampler([1, 2], [0.5, 0.5], margin=1), "`margin` .* got 1"),
        (lambda: judge_sampler([1, 2], [0.5, 0.5], margin=math.nan), "`margin` .* got nan"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
