"""How sure a share or a mean is: exact, clustered and assumption-free intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

MIN_CLUSTERS = 30
BOUND_CLUSTERS = 128  # from here on `mean_upper_bound` covers as stated (calibration/coverage.csv)


class Interval(NamedTuple):
    """Lower and upper limit, in the unit of what was estimated."""

    low: float
    high: float


def share_interval(
    n_hits: int, n: int, *, confidence: float = 0.95, alternative: str = "two-sided"
) -> Interval:
    """Exact (Clopper–Pearson) interval of a share n_hits / n.

    Parameters
    ----------
    n_hits, n : counts, 0 ≤ n_hits ≤ n, n ≥ 1.
    confidence : coverage, at least this much for every true share.
    alternative : "two-sided"; "less" bounds the share from above only, "greater" from below only.

    Raises
    ------
    ValueError
        For counts out of range (scipy's own message).

    Notes
    -----
    Source: Clopper and Pearson 1934, through scipy.stats.binomtest.

    Examples
    --------
    No hit in 59: the share is below 5 % with 95 % confidence.

    >>> round(share_interval(0, 59, alternative="less").high, 4)
    0.0495
    """
    test = stats.binomtest(n_hits, n, alternative=alternative)
    return Interval(*map(float, test.proportion_ci(confidence, method="exact")))


def n_for_share(margin: float, *, confidence: float = 0.95) -> int:
    """Smallest n whose upper bound after no hit at all is within `margin`: ln(1−c) / ln(1−margin).

    Examples
    --------
    >>> n_for_share(0.05), n_for_share(0.01)
    (59, 299)
    """
    if not 0 < margin < 1:
        raise ValueError(f"`margin` must be above 0 and below 1; got {margin}")
    return math.ceil(math.log(1 - confidence) / math.log(1 - margin))


def cluster_mean_interval(
    cluster_means: Sequence[float], *, confidence: float = 0.95, alternative: str = "two-sided"
) -> Interval:
    """Student's t interval of the mean over clusters (documents, prompts), each counted once.

    Tokens of one document go together, so the document is the unit. From 32 clusters on it
    covers 91–94 % at a nominal 95 % with skewed clusters, and less below.

    Raises
    ------
    ValueError
        For fewer than MIN_CLUSTERS clusters, where no such interval is honest, or a NaN or inf.

    Examples
    --------
    >>> low, high = cluster_mean_interval([0.0, 1.0] * 15)
    >>> round((low + high) / 2, 6), round(high - low, 4)
    (0.5, 0.3798)
    """
    values = _finite(cluster_means)
    if len(values) < MIN_CLUSTERS:
        raise ValueError(
            f"`cluster_means` must hold at least {MIN_CLUSTERS} clusters for an interval; "
            f"got {len(values)}"
        )
    tail = (1 - confidence) / (2 if alternative == "two-sided" else 1)
    half = float(stats.t.isf(tail, len(values) - 1) * stats.sem(values))
    mean = float(values.mean())
    return Interval(
        -math.inf if alternative == "less" else mean - half,
        math.inf if alternative == "greater" else mean + half,
    )


def token_mean_interval(
    values: Sequence[float],
    documents: Sequence[object],
    *,
    confidence: float = 0.95,
    alternative: str = "two-sided",
) -> Interval:
    """mean ± t √(D/(D−1) Σ (S − n·mean)²) / N: the mean over all N tokens of D documents.

    S and n are a document's sum and number of tokens: the cluster-robust error of a mean, with t
    on D − 1. A long document weighs more than a short one, as in the mean itself.

    Parameters
    ----------
    values : [tokens].
    documents : [tokens], the name of each token's document.

    Raises
    ------
    ValueError
        As `cluster_mean_interval`: for fewer than MIN_CLUSTERS documents, or a NaN or inf.

    Notes
    -----
    Source: Liang and Zeger 1986; the same as statsmodels' OLS on a constant with clusters.

    Examples
    --------
    With one token each it is the ordinary t interval.

    >>> low, high = token_mean_interval([0.0, 1.0] * 15, range(30))
    >>> round((low + high) / 2, 6), round(high - low, 4)
    (0.5, 0.3798)
    """
    x = _finite(values)
    _, codes = np.unique(np.asarray(documents), return_inverse=True)
    mean = x.mean() if len(x) else math.nan
    sums = np.bincount(codes, x - mean)
    return cluster_mean_interval(
        mean + sums * len(sums) / max(len(x), 1), confidence=confidence, alternative=alternative
    )


def mean_upper_bound(cluster_means: Sequence[float], *, confidence: float = 0.95) -> float:
    """One-sided upper limit of the mean over clusters: Student's t with the skewness γ removed.

    With u = (x̄ − μ)/s, u + γu²/3 + γ²u³/27 + γ/6n is nearly symmetric where u is not: distances
    have a long right tail, which a plain t bound misses too often.

    Raises
    ------
    ValueError
        As `cluster_mean_interval`.

    Notes
    -----
    Source: Hall 1992, On the removal of skewness by transformation. Simulated coverage in
    data/calibration/coverage.csv.

    Examples
    --------
    Without skewness it is Student's; with a right tail it lies higher.

    >>> x, tail = [0.0, 1.0] * 15, [0.0, 1.0] * 15 + [9.0]
    >>> [round(cluster_mean_interval(v, alternative="less").high, 3) for v in (x, tail)]
    [0.658, 1.264]
    >>> [round(mean_upper_bound(v), 3) for v in (x, tail)]
    [0.658, 2.635]
    """
    plain = cluster_mean_interval(cluster_means, confidence=confidence, alternative="less").high
    x = np.asarray(cluster_means, dtype=np.float64)
    n, skew = len(x), float(stats.skew(x, bias=False)) if np.ptp(x) else 0.0
    if abs(skew) < 1e-9:
        return plain
    low = -stats.t.isf(1 - confidence, n - 1) / math.sqrt(n) - skew / (6 * n)
    return float(x.mean() - 3 / skew * (np.cbrt(1 + skew * low) - 1) * x.std(ddof=1))


def mean_limits(cluster_means: Sequence[float]) -> Interval:
    """Limits of a mean in [0, 1] over clusters, each one-sided at 95 %, by what holds at this n.

    The lower one is Student's t from MIN_CLUSTERS on (cautious where the tail is on the right, as
    that of distances is), the upper one `mean_upper_bound` from BOUND_CLUSTERS on, since below that
    its simulated coverage falls short; else the betting bound, which always holds and is wide.

    Examples
    --------
    >>> [round(x, 3) for x in mean_limits([0.0, 0.1] * 64)]
    [0.043, 0.057]
    """
    n = len(cluster_means)
    cautious = bounded_mean_interval(cluster_means) if n < BOUND_CLUSTERS else None
    low = high = None
    if n >= MIN_CLUSTERS:
        low = cluster_mean_interval(cluster_means, alternative="greater").low
    if n >= BOUND_CLUSTERS:
        high = mean_upper_bound(cluster_means)
    return Interval(
        max(cautious.low if low is None else low, 0.0),
        min(cautious.high if high is None else high, 1.0),
    )


def bounded_mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Limits, each one-sided at `confidence`, of the mean of values in [0, 1]; valid at any n.

    Betting: a wealth Π(1 + λ(x − m)) is fair under mean m, so by Markov it passes 1/(1−c) with
    probability at most 1−c. The wealth is spread over a grid of λ > 0 for the lower limit, and of
    λ < 0 for the upper one. Nothing is assumed of the values but independence.

    Parameters
    ----------
    values : [n], each in [0, 1].

    Notes
    -----
    Source: Waudby-Smith and Ramdas 2024 (betting, with an arcsine mixture in place of a
    predictable λ, so the order of the values does not matter). Distance to the mean against
    Hoeffding's √(ln(1/α)/2n): .20 of it for 300 values near 0, .02 for 30,000; up to 1.5 for fair
    coin flips, for which Hoeffding's is meant.

    Examples
    --------
    Zeros alone never prove a mean of 0: 59 of them leave about 3/n.

    >>> low, high = bounded_mean_interval([0.0] * 59)
    >>> low, 0.045 < high < 0.08
    (0.0, True)
    """
    x = _finite(values)
    if len(x) == 0 or x.min() < 0 or x.max() > 1:
        raise ValueError(f"`values` must be one or more numbers in [0, 1]; got {values!r:.80}")
    high = 1 - _lower_limit(1 - x, 1 - confidence)
    return Interval(_lower_limit(x, 1 - confidence), high)


def perfect_bound(n: int, *, confidence: float = 0.95) -> float:
    """Upper limit of `bounded_mean_interval` after n zeros: what a perfect candidate would get.

    Examples
    --------
    >>> perfect_bound(1000) < perfect_bound(100) < 0.05
    True
    """
    return bounded_mean_interval(np.zeros(n), confidence=confidence).high


# Of the largest bet that cannot lose everything; an arcsine grid, dense at both ends.
_FRACTIONS = np.sin(np.pi * (np.arange(32) + 0.5) / 64) ** 2


def _log_wealth(x: np.ndarray, mean: float) -> float:
    """ln of the mean over bets λ in (0, 1/mean) of Π(1 + λ(x − mean))."""
    bets = _FRACTIONS / mean
    by_bet = np.log1p(bets[:, None] * (x - mean)).sum(1)
    return float(np.logaddexp.reduce(by_bet) - math.log(len(bets)))


def _lower_limit(x: np.ndarray, alpha: float) -> float:
    """Smallest mean that a bet on a larger one does not reject."""
    target = -math.log(alpha)
    top = float(x.mean())
    tiny = 1e-12
    if top <= tiny or _log_wealth(x, tiny) <= target:
        return 0.0
    return float(optimize.brentq(lambda m: _log_wealth(x, m) - target, tiny, top, xtol=1e-12))


def _finite(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(x))
    if len(bad):
        raise ValueError(f"values must be finite; got {x[bad[0]]} at position {bad[0]}")
    return x
