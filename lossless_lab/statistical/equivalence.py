"""Is a sampler's law within a margin of the right one? Bounds on TV from counts, and the answer."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import optimize, special

from ..results import Result
from ..stats.tv_limits import any_limit, mean_excess, spread_limit, weights
from .goodness_of_fit import checked, checked_pair

_SPLIT_FROM = 100  # draws; with fewer the first limit of `tv_upper_bound` has all the error


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
        """Draws (of each of two samples) for which a perfect sampler's `high` is the margin.

        A sampler that is not perfect needs more.
        """
        if not 0 < margin < 1:
            raise ValueError(f"`margin` must be above 0 and below 1; got {margin}")
        if _perfect(self, 1) <= margin:
            return 1 if self.known else 2
        enough = ((math.sqrt(len(self.law)) + 3) / margin) ** 2
        log_n = optimize.brentq(
            lambda x: math.log(_perfect(self, math.exp(x)) / margin), 0, math.log(enough), xtol=1e-3
        )
        return math.ceil(1.002 * math.exp(log_n) * (1 if self.known else 2))

    def word(self, margin: float) -> str:
        """EQUIVALENT if high ≤ margin, DIFFERENT if low > margin, else INCONCLUSIVE."""
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
    is at TV̂ + 1.22/√n.

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
        When `probs` is no law, or the counts are not whole, not there, or of another shape.

    Notes
    -----
    Source: the first from Jensen and Clopper-Pearson; weights of Valiant and Valiant 2017, SIAM J.
    Comput. 46. `low`: half of the draws choose the set S of tokens that the sampler prefers, the
    other half gives the exact lower limit of P(S) − probs(S). Simulated coverage and width in
    data/calibration/samplers.csv.

    >>> bound = tv_upper_bound([500, 500], [0.5, 0.5])
    >>> bound.estimate, bound.low, 0.02 < bound.high < 0.04
    (0.0, 0.0, True)
    """
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
    first, second = _halves(c)
    more = first > q * first.sum()
    low = _share_limit(second, more, alpha) - q[more].sum()
    return _bound(np.abs(share - q).sum() / 2, low, high, **stated)


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
    x, y = checked_pair(counts_x, counts_y)
    both, alpha = x.sum() + y.sum(), 1 - confidence
    n = x.sum() * y.sum() / max(both, 1)
    law = (x + y) / max(both, 1)
    stated = {"n": int(n), "confidence": confidence, "law": law, "known": False}
    if not n:
        return _bound(math.nan, 0.0, 1.0, **stated)
    estimate = np.abs(x / x.sum() - y / y.sum()).sum() / 2
    (first_x, second_x), (first_y, second_y) = _halves(x), _halves(y)
    more = first_x * first_y.sum() > first_y * first_x.sum()
    low = _share_limit(second_x, more, alpha / 2) - 1 + _share_limit(second_y, ~more, alpha / 2)
    high = estimate + math.sqrt(-math.log(alpha) / (2 * n))
    return _bound(estimate, low, high, **stated)


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
    part = _part(q, n, alpha)
    high = any_limit(lambda slope: mean_excess(q, n, slope=slope), n, part)
    if part < alpha:
        high = min(high, spread_limit(0.0, 0.0, q, n, alpha - part))
    return min(high, 1.0)


def _halves(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The draws dealt to two halves, independent given their sizes; the same ones each time."""
    coins = np.random.default_rng(zlib.crc32(counts.tobytes()))
    first = coins.binomial(counts, 0.5)
    return first, counts - first


def _share_limit(counts: np.ndarray, tokens: np.ndarray, alpha: float) -> float:
    """Exact lower limit of the probability of these tokens together."""
    k, n = counts[tokens].sum(), counts.sum()
    return float(special.betaincinv(k, n - k + 1, alpha)) if k else 0.0


def _bound(estimate: float, low: float, high: float, **stated) -> TVBound:
    noise = mean_excess(stated["law"], stated["n"]) if stated["n"] else 0.0
    limits = {"low": float(max(low, 0.0)), "high": float(min(high, 1.0))}
    corrected = math.sqrt(max(estimate**2 - noise**2, 0.0))
    return TVBound(estimate=float(estimate), corrected=corrected, **limits, **stated)
