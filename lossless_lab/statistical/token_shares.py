"""Tests of one token's share at a time, all tokens at once: which token is wrong?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import special, stats

from ..results import Result
from ..stats.multiplicity import holm, pvalue_text
from .goodness_of_fit import checked, checked_pair


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenShares(Result):
    """Each token's share tested by itself, and corrected by Holm for there being so many.

    Parameters
    ----------
    counts, probs : draws of each token, and the share that they should have.
    pvalues, adjusted : [vocab_size], exact; `adjusted` may be read as if one token were tested.
    """

    counts: np.ndarray
    probs: np.ndarray
    pvalues: np.ndarray
    adjusted: np.ndarray

    @property
    def pvalue(self) -> float:
        """The smallest adjusted one: that no token's share is wrong."""
        return float(self.adjusted.min())

    def to_frame(self) -> pd.DataFrame:
        """One row per token, the least likely first."""
        columns = {name: getattr(self, name) for name in self.__slots__}
        return pd.DataFrame(columns).rename_axis("token").sort_values("pvalues").reset_index()

    def __str__(self) -> str:
        token = int(self.pvalues.argmin())
        share = self.counts[token] / max(self.counts.sum(), 1)
        return (
            f"token {token}: share {share:.4g} for {self.probs[token]:.4g} "
            f"({pvalue_text(self.pvalue)}, over {len(self.probs)} tokens)"
        )


def token_share_tests(counts: ArrayLike, probs: ArrayLike) -> TokenShares:
    """Exact two-sided binomial tests, p = 2·min(P(X ≤ n), P(X ≥ n)), Holm over all tokens.

    Tokens that cannot be and were not drawn are no tests.

    Raises
    ------
    ValueError
        As `chi_square_fit`.

    >>> shares = token_share_tests([15, 5], [0.5, 0.5])
    >>> shares.pvalues.round(4).tolist()
    [0.0414, 0.0414]
    """
    c, q = checked(counts, probs)
    n = c.sum()
    below = np.where(c < n, special.betaincc(c + 1, np.maximum(n - c, 1), q), 1.0)
    above = np.where(c > 0, special.betainc(np.maximum(c, 1), n - c + 1, q), 1.0)
    return _two_sided(c, q, below, above)


def share_difference_tests(counts_x: ArrayLike, counts_y: ArrayLike) -> TokenShares:
    """Fisher's exact test of each token's two shares, 2·min of its tails, Holm over all tokens.

    Parameters
    ----------
    counts_x, counts_y : [vocab_size], draws of each token; x is judged, y gives `probs`.

    >>> share_difference_tests([9, 1], [1, 9]).pvalues.round(4).tolist()
    [0.0011, 0.0011]
    """
    x, y = checked_pair(counts_x, counts_y)
    below, above = np.ones((2, len(x)))
    seen = x + y > 0
    law = stats.hypergeom(x.sum() + y.sum(), (x + y)[seen], x.sum())
    below[seen], above[seen] = law.cdf(x[seen]), law.sf(x[seen] - 1)
    return _two_sided(x, y / max(y.sum(), 1), below, above)


def _two_sided(
    counts: np.ndarray, probs: np.ndarray, below: np.ndarray, above: np.ndarray
) -> TokenShares:
    """Of the probabilities of as few and of as many; floored where they underflow."""
    pvalues = np.clip(2 * np.minimum(below, above), np.finfo(float).tiny, 1)
    tested = (counts > 0) | (probs > 0)
    adjusted = np.ones(len(pvalues))
    adjusted[tested] = holm(pvalues[tested])
    return TokenShares(counts=counts, probs=probs, pvalues=pvalues, adjusted=adjusted)
