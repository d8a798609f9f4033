"""Is a sampler's law within a margin of the right one? Bounds on TV from counts, and the answer."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import optimize, special

from ..results import Result
from ..stats.power import check_fractions
from ..stats.tv_limits import any_limit, mean_excess, share_limit, spread_limit, weights
from .goodness_of_fit import TINY, checked, checked_pair

_SPLIT_FROM = 100  # draws; with fewer the first limit of `tv_upper_bound` has all the error
_FEW = 4  # possible tokens, of which all sets are tried; of more, sets are chosen by draws
_N_SPLITS = 33
_SMALL = 1e-4  # margin below which numbers of draws are extrapolated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TVBound(Result):
    """Total variation between a sampler's law and the right one, as far as its draws show it.

    Parameters
    ----------
    estimate : ½ Σ |share − prob|, biased upward.
    corrected : √(estimate² − E²), E its mean for a perfect sampler; a point estimate, not a bound.
    low, high : one-sided limits, each at `confidence`.
    n : draws; of two samples n_x·n_y / (n_x + n_y).
    law : the right law, or the two samples' common shares.
    known : whether the right law is known.
    """

    estimate: float
    corrected: float
    low: float
    high: float
    n: int
    confidence: float
    law: np.ndarray
    known: bool = True

    @property
    def perfect_high(self) -> float:
        """What `high` is for a perfect sampler at this n."""
        return _perfect(self, self.n)

    def n_needed(self, margin: float) -> int:
        """Draws (of each of two samples) for which a perfect sampler's mean `high` is the margin.

        A perfect sampler is called EQUIVALENT about half the time at this n; one that is not
        perfect needs more.
        """
        check_fractions(margin=margin)
        if _perfect(self, 1) <= margin:
            return 1 if self.known else 2
        if margin < _SMALL:  # there the margin falls as 1/√n, or as 1/n for one possible token
            power = 2 if (self.law > 0).sum() > 1 or not self.known else 1
            return math.ceil(self.n_needed(_SMALL) * (_SMALL / margin) ** power)
        sure = math.sqrt(-math.log(1 - self.confidence))
        enough = ((math.sqrt(len(self.law)) + 3 + sure) / margin) ** 2
        log_n = optimize.brentq(
            lambda x: math.log(_perfect(self, math.exp(x)) / margin), 0, math.log(enough), xtol=1e-3
        )
        return math.ceil(1.002 * math.exp(log_n) * (1 if self.known else 2))

    def word(self, margin: float) -> str:
        """EQUIVALENT if high ≤ margin, DIFFERENT if low > margin, else INCONCLUSIVE."""
        check_fractions(margin=margin)
        if self.high <= margin:
            return "EQUIVALENT"
        return "DIFFERENT" if self.low > margin else "INCONCLUSIVE"

    def to_frame(self) -> pd.DataFrame:
        """One row, without the law, with the bound of a perfect sampler."""
        row = {name: getattr(self, name) for name in self.__slots__ if name != "law"}
        return pd.DataFrame([row | {"perfect_high": self.perfect_high}])

    def __str__(self) -> str:
        return (
            f"TV {self.corrected:.4g}, at most {self.high:.4g} and at least {self.low:.4g} "
            f"({self.confidence:.0%}, n = {self.n}; a perfect sampler: {self.perfect_high:.4g})"
        )


def tv_upper_bound(counts: ArrayLike, probs: ArrayLike, *, confidence: float = 0.95) -> TVBound:
    """The smaller of two upper limits of TV, which share the error 1 − confidence as 1 : 4.

    Where law and n say beforehand that the second will not help, the first has it all.

    *Any difference.* TV = P(S) − probs(S) for one set S, and P(S) ≤ u(share of S), the exact
    binomial limit, a concave function: so TV ≤ max over all S of u(share of S) − probs(S), found
    by duality. From n = 100 on at most TV̂ + 1.21/√n, where the simple limit TV̂ + √(ln 20 / 2n)
    is at TV̂ + 1.22/√n. Of one possible token S is all the others, and the limit u(their share).

    *Spread over tokens.* 4 TV² ≤ U = Σ (p − probs)²/w for weights w that sum to 1. With w as
    probs^⅔, the unbiased estimate of U errs by little where TV̂ is all noise; U's limit is the
    largest that its own normal error would not reject.

    Parameters
    ----------
    counts : [vocab_size] or any shape (of several tokens jointly), draws of each.
    probs : same shape, the right law, known exactly; sums to 1.

    Raises
    ------
    ValueError
        When `probs` is no law, the counts are not whole, not there, or of another shape, or
        `confidence` is not in [0.5, 1).

    Notes
    -----
    Source: the first from Jensen and Clopper-Pearson; weights of Valiant and Valiant 2017, SIAM J.
    Comput. 46. Simulated coverage and width in data/calibration/samplers.csv.

    `low` is an exact lower limit of P(S) − probs(S). Of 4 possible tokens or fewer the largest
    over all m sets S, each at error α/m. Of more, half of the draws choose the S that the sampler
    prefers and the other half gives the limit at error α/2; of 33 such splits the median limit,
    which all in all errs in α at most (Meinshausen, Meier and Bühlmann 2009, JASA 104).

    >>> bound = tv_upper_bound([500, 500], [0.5, 0.5])
    >>> bound.estimate, bound.low, 0.02 < bound.high < 0.04
    (0.0, 0.0, True)
    """
    _check_confidence(confidence)
    c, q = checked(counts, probs)
    n, alpha = int(c.sum()), 1 - confidence
    stated = {"n": n, "confidence": confidence, "law": q}
    if not n:
        return _bound(math.nan, 0.0, 1.0, **stated)
    share = c / n
    part = _part(q, n, alpha)
    high = any_limit(lambda slope: np.maximum(slope * share - q, 0).sum(), n, part)
    if part < alpha:
        w = weights(q)
        pairs = c * (c - 1.0) / (n * (n - 1.0))
        u = float(((pairs - 2 * q * share + q * q) / w).sum())
        high = min(high, spread_limit(u, float((pairs / w**2).sum()), q, n, alpha - part))
    if (q > 0).sum() == 1:
        high = share_limit(c[q == 0].sum(), n, alpha)

    def lowest(sets: np.ndarray, part: float, draws: np.ndarray) -> np.ndarray:
        return _share_limit(draws, sets, alpha * part) - sets @ q

    low = _low(q > 0, _preferred(q), lowest, c)
    return _bound(np.abs(share - q).sum() / 2, low, high, **stated)


def preferred_sets_pvalue(counts: ArrayLike, probs: ArrayLike) -> float:
    """The test behind `low` of `tv_upper_bound`: below 1 − confidence just where `low` is above 0.

    Parameters
    ----------
    counts, probs : as there.

    >>> round(preferred_sets_pvalue([8, 2], [0.5, 0.5]), 4)  # 2 sets, each P(X ≥ 8) = 56/1024
    0.1094
    """
    c, q = checked(counts, probs)

    def surprise(sets: np.ndarray, part: float, draws: np.ndarray) -> np.ndarray:
        k, n = (draws * sets).sum(-1), draws.sum(-1)
        tail = special.betainc(np.maximum(k, 1), n - k + 1, np.minimum(sets @ q, 1))
        return -np.log(np.clip(np.where(k > 0, tail, 1) / part, TINY, 1))

    return math.exp(-_low(q > 0, _preferred(q), surprise, c))


def tv_upper_bound_two_samples(
    counts_x: ArrayLike, counts_y: ArrayLike, *, confidence: float = 0.95
) -> TVBound:
    """TV̂ + √(ln(1/(1 − confidence)) (1/n_x + 1/n_y) / 2), where neither law is known.

    Parameters
    ----------
    counts_x, counts_y : same shape, draws of each token.

    Notes
    -----
    Source: as `tv_upper_bound`, with Hoeffding 1963 for the difference of two shares.

    >>> round(tv_upper_bound_two_samples([50, 50], [50, 50]).high, 4)
    0.1731
    """
    _check_confidence(confidence)
    x, y = checked_pair(counts_x, counts_y)
    n_x, n_y, alpha = int(x.sum()), int(y.sum()), 1 - confidence
    n = n_x * n_y / max(n_x + n_y, 1)
    law = (x + y) / max(n_x + n_y, 1)
    stated = {"n": int(n), "confidence": confidence, "law": law, "known": False}
    if not n:
        return _bound(math.nan, 0.0, 1.0, **stated)
    estimate = np.abs(x / n_x - y / n_y).sum() / 2

    def preferred(first_x: np.ndarray, first_y: np.ndarray) -> np.ndarray:
        n_x, n_y = (np.maximum(c.sum(-1, keepdims=True), 1) for c in (first_x, first_y))
        return first_x / n_x > first_y / n_y

    def lowest(sets: np.ndarray, part: float, *draws: np.ndarray) -> np.ndarray:
        sides = zip(draws, (sets, ~sets), strict=True)
        return sum(_share_limit(c, side, alpha * part / 2) for c, side in sides) - 1

    low = _low(np.ones(len(x), dtype=bool), preferred, lowest, x, y)
    high = estimate + math.sqrt(-math.log(alpha) / (2 * n))
    return _bound(estimate, low, high, **stated)


def _check_confidence(confidence: float) -> None:
    if not 0.5 <= confidence < 1:  # below, an upper limit would lie under the estimate
        raise ValueError(f"`confidence` must be at least 0.5 and below 1; got {confidence}")


def _part(q: np.ndarray, n: int, alpha: float) -> float:
    """The first limit's part of the error: all of it where the second would rarely be smaller."""
    if n < _SPLIT_FROM:
        return alpha
    rough = 0.4 * np.sqrt(q * (1 - q)).sum() + -special.ndtri(alpha) / 2
    return alpha / 5 if spread_limit(0, 0, q, n, alpha * 0.8) < rough / math.sqrt(n) else alpha


def _perfect(bound: TVBound, n: float) -> float:
    """`high` where the counts are as a perfect sampler's on average."""
    q, n, alpha = bound.law, int(n), 1 - bound.confidence
    if n < 1:
        return 1.0
    if not bound.known:
        return min(1.0, mean_excess(q, n) + math.sqrt(-math.log(alpha) / (2 * n)))
    if (q > 0).sum() == 1:
        return float(share_limit(0, n, alpha))
    part = _part(q, n, alpha)
    high = any_limit(lambda slope: mean_excess(q, n, slope=slope), n, part)
    if part < alpha:
        high = min(high, spread_limit(0.0, 0.0, q, n, alpha - part))
    return min(high, 1.0)


def _preferred(q: np.ndarray) -> Callable:
    return lambda first: first > q * first.sum(-1, keepdims=True)


def _low(possible: np.ndarray, preferred: Callable, lowest: Callable, *counts: np.ndarray) -> float:
    """Lower limit from sets of tokens: of all sets or, where there are many, of split draws.

    Parameters
    ----------
    possible : [vocab_size]; impossible tokens belong to every set, as they can only gain.
    preferred : of some draws of each token to the sets [n_sets, vocab_size] they speak for.
    lowest : of sets, part of the error, and draws to a limit per set.
    """
    if possible.sum() <= _FEW:
        sets = np.ones((2 ** possible.sum(), len(possible)), dtype=bool)
        sets[:, possible] = list(itertools.product((False, True), repeat=possible.sum()))
        sets = sets[:-1][sets[:-1].any(1)]
        return lowest(sets, 1 / max(len(sets), 1), *counts).max(initial=0.0)
    coins = np.random.default_rng(zlib.crc32(np.stack(counts).tobytes()))
    first = [_halves(c, coins) for c in counts]
    second = [c - f for c, f in zip(counts, first, strict=True)]
    return float(np.median(lowest(preferred(*first), 0.5, *second)))


def _halves(counts: np.ndarray, coins: np.random.Generator) -> np.ndarray:
    """binomial(counts, ½), once per split; for fewer than 64 draws the ones among random bits."""
    few, size = counts < 64, (_N_SPLITS, len(counts))
    masks = (np.uint64(1) << np.where(few, counts, 0).astype(np.uint64)) - np.uint64(1)
    ones = np.bitwise_count(coins.integers(0, 1 << 64, size, dtype=np.uint64) & masks)
    return np.where(few, ones, coins.binomial(np.where(few, 0, counts), 0.5, size))


def _share_limit(counts: np.ndarray, sets: np.ndarray, alpha: float) -> np.ndarray:
    """Exact lower limit of the probability of each set of tokens."""
    k, n = (counts * sets).sum(-1), counts.sum(-1)
    return np.where(k > 0, special.betaincinv(np.maximum(k, 1), n - k + 1, alpha), 0.0)


def _bound(estimate: float, low: float, high: float, **stated) -> TVBound:
    noise = mean_excess(stated["law"], stated["n"]) if stated["n"] else 0.0
    limits = {"low": float(max(low, 0.0)), "high": float(min(high, 1.0))}
    corrected = math.sqrt(max(estimate**2 - noise**2, 0.0))
    return TVBound(estimate=float(estimate), corrected=corrected, **limits, **stated)
