"""A test of a known law that may be looked at after every draw, and stopped early."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ..results import Result
from .multiplicity import pvalue_text
from .power import check_fractions

_LEAST = 1e-300  # probability; gammaln fails of less
_FIRMNESS = 10.0 ** np.arange(1, 8)  # of the priors: how near the law the other laws lie


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialFit(Result):
    """Where an anytime-valid test stands.

    Parameters
    ----------
    n : draws looked at, until it stopped.
    log_evalue : ln of the largest e-value so far.
    pvalue : min(1, exp(−log_evalue)), valid at any moment of stopping; never 0.
    n_impossible : draws of tokens that the law gives no probability.
    stopped : whether a p-value ≤ α or an impossible token ended it.
    """

    n: int
    log_evalue: float
    pvalue: float
    n_impossible: int
    stopped: bool

    def __str__(self) -> str:
        impossible = f", {self.n_impossible} impossible" if self.n_impossible else ""
        end = "stopped after" if self.stopped else "still open after"
        return f"{end} {self.n} draws{impossible} (anytime {pvalue_text(self.pvalue)})"


def log_evalue(counts: ArrayLike, probs: ArrayLike) -> np.ndarray:
    """ln of the mean over a = 10 … 10⁷ of B(a·q + n) / (B(a·q) Π q^n), a mixture of fair bets.

    Each is the likelihood of all draws so far under laws dealt by Dirichlet(a·q), over that under
    q: a martingale with mean 1 where q is right, so that it ever passes 1/α with probability α at
    most (Ville).

    Parameters
    ----------
    counts : [..., vocab_size], all draws so far; of impossible tokens none are counted.
    probs : [vocab_size], sums to 1.

    Raises
    ------
    ValueError
        When the counts are not whole, not there, or not one per token.

    Notes
    -----
    Source: Robbins 1970; Ville 1939.

    One draw of a fair coin tells nothing, whichever it is.

    >>> abs(round(float(log_evalue([1, 0], [0.5, 0.5])), 6))
    0.0
    """
    q = np.asarray(probs, dtype=np.float64)
    c = _whole("counts", counts, (*np.shape(counts)[:-1], *q.shape))
    c, q = c[..., q > 0], np.maximum(q[q > 0], _LEAST)
    n = c.sum(-1)
    likelihood = c @ np.log(q)
    by_prior = [
        special.gammaln(a) - special.gammaln(a + n)
        + (special.gammaln(a * q + c) - special.gammaln(a * q)).sum(-1)
        for a in _FIRMNESS
    ]  # fmt: skip
    return special.logsumexp(by_prior, axis=0) - math.log(len(_FIRMNESS)) - likelihood


def sequential_fit(
    batches: Iterable[ArrayLike], probs: ArrayLike, *, alpha: float = 0.05
) -> SequentialFit:
    """Draws batch after batch until the law is rejected, or no batch is left.

    Parameters
    ----------
    batches : counts [vocab_size] of new draws at a time; may be a generator that draws them.
    probs : [vocab_size], the law; sums to 1.

    Raises
    ------
    ValueError
        When `probs` is no law (within 1e-9; 1e-4 in float32 and below), a batch is not whole, not
        there or of another shape, or `alpha` is not in (0, 1).

    >>> str(sequential_fit(([9, 1] for _ in range(100)), [0.5, 0.5]))
    'stopped after 30 draws (anytime p = 0.005)'
    """
    check_fractions(alpha=alpha)
    q = np.asarray(probs)
    tolerance = 1e-9 if q.dtype.itemsize >= 8 else 1e-4
    q = q.astype(np.float64)
    if not (q.ndim == 1 and abs(q.sum() - 1) <= tolerance and (q >= 0).all()):
        raise ValueError(
            f"`probs` must be [vocab_size], ≥ 0 and sum to 1; got shape {q.shape}, sum "
            f"{q.sum():.6g}, least {q.min(initial=1):.3g}"
        )
    q, counts, best, stopped = q / q.sum(), np.zeros(len(q)), 0.0, False
    for i, batch in enumerate(batches):
        counts += _whole("batches", batch, q.shape, f" at {i}")
        best = max(best, float(log_evalue(counts, q)))
        stopped = best >= -math.log(alpha) or counts[q == 0].any()
        if stopped:
            break
    return SequentialFit(
        n=int(counts.sum()),
        log_evalue=best,
        pvalue=max(math.exp(-best), np.finfo(float).tiny),
        n_impossible=int(counts[q == 0].sum()),
        stopped=bool(stopped),
    )


def _whole(name: str, counts: ArrayLike, shape: tuple[int, ...], at: str = "") -> np.ndarray:
    c = np.asarray(counts, dtype=np.float64)
    if c.shape != shape or not ((c >= 0) & (c % 1 == 0)).all():
        raise ValueError(f"`{name}` must be whole numbers ≥ 0, one per token {shape}; got {c}{at}")
    return c
