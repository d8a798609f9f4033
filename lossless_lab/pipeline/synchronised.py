"""Two samplers given the same noise: how often they part bounds their TV with few samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from lossless_lab.results import Result
from lossless_lab.statistical.laws import from_probs
from lossless_lab.stats.power import check_fractions

_CELLS = 1 << 20  # noise drawn at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised(Result):
    """How often two samplers with shared noise chose different tokens after the same context.

    Under argmax(ln p + Gumbel noise) they differ with a probability D between TV and
    2 TV / (1 + TV); so D / (2 − D) ≤ TV ≤ D, for the mean over contexts too.

    Parameters
    ----------
    n : contexts compared, up to and including the first difference of each sample.
    n_differing : of them.
    """

    n: int
    n_differing: int
    confidence: float = 0.95

    @property
    def limits(self) -> tuple[float, float]:
        """One-sided exact limits of the mean TV, each at `confidence`."""
        test = stats.binomtest(self.n_differing, self.n)
        low, high = test.proportion_ci(2 * self.confidence - 1, method="exact")
        return low / (2 - low), high

    def word(self, margin: float) -> str:
        """EQUIVALENT if the upper limit is within the margin, DIFFERENT if the lower is beyond."""
        check_fractions(margin=margin)
        low, high = self.limits
        return "EQUIVALENT" if high <= margin else "DIFFERENT" if low > margin else "INCONCLUSIVE"

    def __str__(self) -> str:
        low, high = self.limits
        return (
            f"{self.n_differing} of {self.n} tokens differ under shared noise: TV at least "
            f"{low:.3g} and at most {high:.3g}"
        )


def compare_synchronised(reference_ids: Any, candidate_ids: Any) -> Synchronised:
    """Samples of the same seeds, row by row [n, n_tokens]; what follows a difference is left out.

    So is padding, ids below 0, on both sides; on one side alone it is a difference: one stopped.

    Raises
    ------
    ValueError
        When the shapes differ, ids are not whole numbers, or nothing but padding is there.

    >>> str(compare_synchronised([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 9]]))
    '1 of 5 tokens differ under shared noise: TV at least 0.00513 and at most 0.657'
    """
    a, b = np.asarray(reference_ids), np.asarray(candidate_ids)
    if a.shape != b.shape or a.ndim != 2 or not a.size:
        raise ValueError(
            f"`reference_ids` and `candidate_ids` must be [n, n_tokens] alike; got {a.shape} and "
            f"{b.shape}"
        )
    if a.dtype.kind not in "iu" or b.dtype.kind not in "iu":
        raise ValueError(
            f"`reference_ids` and `candidate_ids` must be whole numbers; got {a.dtype}, {b.dtype}"
        )
    there = (a >= 0) | (b >= 0)
    if not there.any():
        raise ValueError("`reference_ids` and `candidate_ids` hold no token ≥ 0")
    parted = there & (a != b)
    same_context = there & (np.cumsum(parted, 1) - parted == 0)
    return Synchronised(n=int(same_context.sum()), n_differing=int(parted.any(1).sum()))


def synchronise(
    reference_probs: Any, candidate_probs: Any, n_seeds: int, *, rng: np.random.Generator
) -> Synchronised:
    """The same between two laws per context [n, vocab_size], each tried with `n_seeds` noises.

    Raises
    ------
    ValueError
        When a row is no law, the shapes differ, or `n_seeds` is no whole number above 0.

    >>> p, q = [[0.7, 0.2, 0.1]], [[0.6, 0.4, 0.0]]  # TV .2, so D from .2 to .333
    >>> found = synchronise(p, q, 20_000, rng=np.random.default_rng(0))
    >>> 0.2 <= found.n_differing / found.n <= 0.334
    True
    """
    sides = [np.asarray(side) for side in (reference_probs, candidate_probs)]
    if sides[0].shape != sides[1].shape or sides[0].ndim != 2 or not sides[0].size:
        raise ValueError(
            f"`reference_probs` and `candidate_probs` must be [n, vocab_size] alike; got "
            f"{sides[0].shape} and {sides[1].shape}"
        )
    if not n_seeds >= 1 or n_seeds % 1:
        raise ValueError(f"`n_seeds` must be at least 1 and a whole number; got {n_seeds}")
    for side in sides:
        from_probs(side)
    differing = 0
    for p, q in zip(*sides, strict=True):
        there = (p > 0) | (q > 0)
        n_there = int(there.sum())
        chunk = max(1, _CELLS // n_there)
        for done in range(0, n_seeds, chunk):
            race = rng.exponential(size=(min(chunk, n_seeds - done), n_there))
            with np.errstate(divide="ignore"):
                firsts = [(race / side[there]).argmin(1) for side in (p, q)]
            differing += int((firsts[0] != firsts[1]).sum())
    return Synchronised(n=n_seeds * len(reference_probs), n_differing=differing)
