"""Paired items: McNemar and Tango against statsmodels, R and exact enumeration."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.proportion import proportions_ztest

from lossless_lab.semantic.paired import (
    PairedTable,
    finding,
    items_needed,
    mcnemar,
    non_inferiority,
    paired_table,
    score_interval,
    smallest_margin,
)


def table(gained, lost, n):
    return PairedTable(
        both=n - gained - lost, only_reference=lost, only_candidate=gained, neither=0
    )


def accepted_rate(n, discordance, difference, margin, decide):
    """P(decide(gained, lost)) where items are gained or lost at fixed rates: by enumeration."""
    lost_rate, gained_rate = (discordance - difference) / 2, (discordance + difference) / 2
    total = 0.0
    for lost in range(int(stats.binom.isf(1e-9, n, lost_rate)) + 2):
        low, high = 0, n - lost + 1  # more gained items never turn a pass into a failure
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if decide(middle, lost) else (middle + 1, high)
        gained = stats.binom.sf(low - 1, n - lost, gained_rate / (1 - lost_rate))
        total += stats.binom.pmf(lost, n, lost_rate) * gained
    return total


def not_inferior(n, margin):
    return lambda gained, lost: (
        non_inferiority(table(gained, lost, n), margin=margin) == "EQUIVALENT"
    )


counts = st.integers(0, 60)


@given(counts, counts, counts, counts)
def test_mcnemar_is_that_of_statsmodels(both, lost, gained, neither):
    if both + lost + gained + neither == 0:
        return
    ours = PairedTable(both=both, only_reference=lost, only_candidate=gained, neither=neither)
    theirs = statsmodels_mcnemar([[both, lost], [gained, neither]], exact=True).pvalue
    assert mcnemar(ours) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize(
    "gained, lost, n, confidence, low, high",
    [
        (7, 0, 14, 0.975, 0.177034, 0.732008),  # R, PropCIs 0.3, scoreci.mp(0, 7, 14)
        (28, 25, 618, 0.95, -0.0148, 0.0247),  # the same, scoreci.mp(25, 28, 618) at 90 %
        (1, 7, 21, 0.975, -0.517, -0.026),  # Fagerland et al. 2014, airway responsiveness
    ],
)
def test_score_interval_is_the_published_one(gained, lost, n, confidence, low, high):
    digits = 6 if abs(low * 1e4 - round(low * 1e4)) > 1e-6 else 4 if n == 618 else 3
    found = score_interval(table(gained, lost, n), confidence=confidence)
    assert found == pytest.approx((low, high), abs=0.6 * 10**-digits)


@given(counts, counts, st.integers(1, 200))
def test_swapping_the_sides_negates_the_interval_and_keeps_mcnemar(gained, lost, rest):
    n = gained + lost + rest
    ours, swapped = table(gained, lost, n), table(lost, gained, n)
    (low, high), (other_low, other_high) = score_interval(ours), score_interval(swapped)
    assert (low, high) == pytest.approx((-other_high, -other_low), abs=1e-7)
    assert low <= ours.difference <= high
    assert mcnemar(ours) == pytest.approx(mcnemar(swapped), abs=1e-12)
    assert ours.flip_rate == swapped.flip_rate


@pytest.mark.parametrize("gained, lost", [(14, 0), (0, 14), (0, 0)])
def test_all_items_on_one_side_still_have_an_interval(gained, lost):
    low, high = score_interval(table(gained, lost, 14))
    assert -1 <= low < high <= 1


@pytest.mark.parametrize("n", [100, 300, 1500])
@pytest.mark.parametrize("discordance", [0.02, 0.05, 0.10])
def test_false_non_inferiority_at_the_margin(n, discordance):
    """Exact, no simulation: a score interval's true size oscillates and is allowed 6.5 %."""
    rate = accepted_rate(n, discordance, -0.02, 0.02, not_inferior(n, 0.02))
    assert rate <= 0.065
    if (n, discordance) == (300, 0.02):
        assert rate == pytest.approx(0.0602, abs=5e-5)  # the published true size


def score_test(n, margin):
    """The same rule from the likelihood: its maximum under "the loss is `margin`", then z."""

    def decide(gained, lost):
        rest = n - gained - lost
        middle = lost * (1 + 3 * margin) + gained * (1 + margin) + 2 * rest * margin
        share_lost = np.roots([-2 * n, middle, -lost * margin * (1 + margin)]).real.max()
        spread = math.sqrt(n * (2 * share_lost - margin * (1 + margin)))
        return gained - lost + n * margin > stats.norm.ppf(0.95) * spread

    return decide


@pytest.mark.parametrize("n", [100, 300, 1500])
@pytest.mark.parametrize("discordance", [0.02, 0.05, 0.10])
def test_power_is_that_of_the_score_test_and_equal_candidates_raise_few_alarms(n, discordance):
    found = accepted_rate(n, discordance, 0.0, 0.02, not_inferior(n, 0.02))
    theory = accepted_rate(n, discordance, 0.0, 0.02, score_test(n, 0.02))
    assert found >= 0.95 * theory and found == pytest.approx(theory, abs=1e-6)

    def no_alarm(gained, lost):
        return non_inferiority(table(gained, lost, n), margin=0.02) != "DIFFERENT"

    assert 1 - accepted_rate(n, discordance, 0.0, 0.02, no_alarm) <= 0.05
    # Called worse than the margin when exactly at it: the upper limit's size, up to 8.2 %.
    assert 1 - accepted_rate(n, discordance, -0.02, 0.02, no_alarm) <= 0.085


@pytest.mark.parametrize("n", [100, 300, 1500])
@pytest.mark.parametrize("discordance", [0.02, 0.05, 0.10])
def test_mcnemar_raises_few_false_alarms(n, discordance):
    """Exact: of m flips, each is a fair coin's."""
    rate, cut = 0.0, -1  # the largest smaller half that is called unlike a fair coin's
    for flips in range(int(stats.binom.isf(1e-12, n, discordance)) + 2):
        while mcnemar(table(cut + 1, flips - cut - 1, n)) <= 0.05:
            cut += 1
        rejected = 2 * stats.binom.cdf(cut, flips, 0.5)
        rate += stats.binom.pmf(flips, n, discordance) * rejected
    assert 0 <= rate <= 0.05


@pytest.mark.parametrize("n", [300, 1500])
@pytest.mark.parametrize("discordance", [0.02, 0.05, 0.10])
def test_power_is_that_of_the_normal_theory(n, discordance):
    """An equal candidate is cleared as often as the score test can: "inconclusive" is no answer."""
    margin, half = 0.02, discordance / 2
    found = accepted_rate(n, discordance, 0.0, margin, not_inferior(n, margin))
    # The share lost that is likeliest if the difference were −margin, from Tango's equation.
    lost = np.roots([2, -discordance - 2 * margin, half * margin * (1 + margin)])
    under_margin = math.sqrt(2 * lost.max() - margin * (1 + margin))
    z = (margin * math.sqrt(n) - stats.norm.ppf(0.95) * under_margin) / math.sqrt(discordance)
    assert found >= 0.95 * stats.norm.cdf(z)


def test_1319_items_resolve_1_60_points_where_an_unpaired_rule_needs_4_84():
    assert accepted_rate(1319, 0.05, 0.0, 0.016, not_inferior(1319, 0.016)) >= 0.8
    assert accepted_rate(1319, 0.05, 0.0, 0.0153, not_inferior(1319, 0.0153)) < 0.8
    unpaired = (stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) * math.sqrt(2 * 0.25 / 1319)
    assert unpaired == pytest.approx(0.0484, abs=5e-5)


def test_wald_and_bootstrap_would_pass_what_is_inferior():
    """The mutants: with few flips they call an inferior candidate as good far too often."""

    def wald(gained, lost, n=100):
        d = (gained - lost) / n
        spread = math.sqrt(((gained + lost) / n - d**2) / n)
        return d - 1.645 * spread > -0.02

    assert accepted_rate(100, 0.02, -0.02 + 1e-12, 0.02, wald) > 0.10
    rng = np.random.default_rng(7)
    lost = rng.binomial(100, 0.02, 2000)
    drawn = rng.binomial(100, np.tile(lost / 100, (400, 1))) / 100
    assert (np.quantile(drawn, 0.95, axis=0) < 0.02).mean() > 0.10
    assert accepted_rate(100, 0.02, -0.02 + 1e-12, 0.02, not_inferior(100, 0.02)) <= 0.05


def test_paired_sees_what_unpaired_does_not():
    seen = PairedTable(both=180, only_reference=15, only_candidate=3, neither=22)
    assert seen.accuracies == pytest.approx((0.886, 0.832), abs=5e-4)
    unpaired = proportions_ztest([195, 183], [220, 220])[1]
    assert unpaired == pytest.approx(0.100, abs=1.5e-2) and unpaired > 0.05 > mcnemar(seen)
    assert mcnemar(seen) == pytest.approx(0.0075, abs=5e-5)


def test_equal_accuracy_is_not_equal_behaviour():
    same = PairedTable(both=150, only_reference=20, only_candidate=20, neither=30)
    assert same.accuracies == pytest.approx((0.773, 0.773), abs=5e-4) and mcnemar(same) == 1
    assert same.flip_rate == pytest.approx(0.182, abs=5e-4)
    assert "18.2 % flipped" in str(same)
    assert finding(same) == "the same accuracy, not the same behaviour"


@pytest.mark.parametrize(
    "gained, lost, n, only, said",
    [
        (20, 20, 220, None, True),  # equal as counted
        (21, 20, 1500, None, True),  # equal within two points
        (21, 20, 220, None, False),  # 220 items cannot show that
        (2, 2, 220, None, False),  # four flips may as well be a re-ordering's: 1/16
        (3, 3, 220, None, True),  # six: 1/64
        (20, 20, 220, (25, 15), False),  # a re-ordering flips almost as many
        (20, 20, 220, (30, 8), True),
        (0, 0, 220, None, False),
        (60, 10, 1500, None, False),  # better by more than the margin: not the same accuracy
    ],
)
def test_same_accuracy_other_behaviour_needs_both_halves(gained, lost, n, only, said):
    assert bool(finding(table(gained, lost, n), only=only)) == said


@pytest.mark.parametrize("flips", [0.01, 0.03, 0.10])
@pytest.mark.parametrize("n", [100, 300, 1500])
def test_a_harmless_candidate_is_said_to_behave_otherwise_at_most_5_times_in_100(n, flips):
    """Exact: candidate and re-ordering flip independently at one rate, as many lost as gained."""
    one_sided = 2 * flips * (1 - flips)  # an item flips on one side alone
    rate, cut = 0.0, 0  # the fewest flips of the candidate alone, of m, that are said
    for m in range(int(stats.binom.isf(1e-9, n, one_sided)) + 2):
        while cut <= m and not finding(table(9, 9, 999), only=(cut, m - cut)):
            cut += 1
        rate += stats.binom.pmf(m, n, one_sided) * stats.binom.sf(cut - 1, m, 0.5)
    assert rate <= 0.05
    if flips * n >= 30:
        assert rate > 0.02, "and it is no empty promise"


def test_items_needed():
    assert 3000 < items_needed(0.01, 0.05) < 3200
    assert smallest_margin(300, 0.05) == pytest.approx(0.032, abs=5e-4)
    assert smallest_margin(300, 0.10) == pytest.approx(0.045, abs=5e-4)
    n = items_needed(0.02, 0.05)
    assert accepted_rate(n, 0.05, 0.0, 0.02, not_inferior(n, 0.02)) == pytest.approx(0.8, abs=0.03)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="same items"):
        paired_table([True], [True, False])
    with pytest.raises(ValueError, match="one item at least"):
        paired_table([], [])
    with pytest.raises(ValueError, match="0 or more"):
        PairedTable(both=-1, only_reference=0, only_candidate=0, neither=3)
    for margin in (0, -0.02, 2):
        with pytest.raises(ValueError, match="`margin` must be above 0"):
            non_inferiority(table(0, 0, 9), margin=margin)
    with pytest.raises(ValueError, match="`margin` and `discordance`"):
        items_needed(0.01, 0)
