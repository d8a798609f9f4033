"""Do emitted tokens follow a known law? Tests of counts, and one that needs a token of each law."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import special, stats

from ..results import Result
from ..stats.multiplicity import LEAST, pvalue_text
from .laws import from_probs
from .sampler_laws import sampler_probs

SIZE = 0.01  # share of honest samplers that are rejected
_SLACK = 1e-4  # by which engines may round a filter's border
_LEAST = 5  # expected count of a cell, or it is pooled with the others that have less
_CELLS = 1 << 21  # simulated counts at a time
TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerFit(Result):
    """Whether tokens look as if drawn from their laws.

    Parameters
    ----------
    n_tokens : tokens tried.
    pvalue : of the two tests together (smaller one, times two); NaN without tokens.
    n_impossible : tokens that the law gives no probability.
    """

    n_tokens: int
    pvalue: float
    n_impossible: int

    @property
    def rejected(self) -> bool:
        """A token that cannot be, or a p-value below SIZE; an honest sampler has one in 100."""
        return self.n_impossible > 0 or self.pvalue < SIZE

    def __str__(self) -> str:
        impossible = f", {self.n_impossible} of them impossible" if self.n_impossible else ""
        return f"{self.n_tokens} tokens{impossible} ({pvalue_text(self.pvalue)})"


def sampler_fit(
    pieces: Iterable[tuple[torch.Tensor, Sequence[int]]],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    rng: np.random.Generator,
) -> SamplerFit:
    """Kolmogorov-Smirnov test of u = F(token − 1) + V·p(token), uniform if the sampler is honest.

    V is uniform, F sums p over the tokens before this one: once in the order of likelihood, which
    sees a wrong temperature or filter, and once in the order of ids, which sees ids preferred or
    banned. Each u is uniform given all before it, so that every token counts as independent.

    Parameters
    ----------
    pieces : (logits [n, vocab_size], the n token ids drawn from them), a chunk at a time.
    temperature, top_k, top_p, min_p : the sampler's settings, as in `sampler_probs`.
    rng : deals V.

    Raises
    ------
    ValueError
        When there is not one token id of the vocabulary for each row of logits.

    Source: Rosenblatt 1952, Ann. Math. Statist. 23, randomised for laws with atoms.

    >>> piece = (torch.zeros(1, 4), [1])  # u lies in [1/4, 1/2], so D >= 1/2
    >>> str(sampler_fit([piece], rng=np.random.default_rng(0)))
    '1 tokens (p = 1)'
    """
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    loose = {"top_k": top_k, "top_p": min(1.0, top_p + _SLACK), "min_p": min_p * (1 - _SLACK)}
    found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    n_impossible = 0
    for i, (logits, tokens) in enumerate(pieces):
        ids = torch.as_tensor(list(tokens), device=logits.device)
        outside = ids[(ids < 0) | (ids >= logits.shape[-1])].tolist()
        if ids.shape != logits.shape[:-1] or outside:
            raise ValueError(
                "`pieces` must have one id of the vocabulary for each row of logits; got "
                f"{(outside or [len(ids)])[0]} {'as an id' if outside else 'ids'} for logits "
                f"{tuple(logits.shape)} in piece {i}"
            )
        if not len(chosen := ids[:, None]):
            continue
        probs = sampler_probs(logits, temperature=temperature, **filters)
        possible = sampler_probs(logits, temperature=temperature, **loose).gather(1, chosen) > 0
        n_impossible += int((~possible).sum())
        own = probs.gather(1, chosen)
        before_it = torch.arange(probs.shape[1], device=probs.device) < chosen
        likelier = (probs > own) | (probs == own) & before_it
        v = torch.as_tensor(rng.random(len(chosen)), dtype=probs.dtype, device=probs.device)
        for us, before in zip(found, (likelier, before_it), strict=True):
            u = (probs * before).sum(1) + v * own[:, 0]
            us.append(u.clamp(0, 1).double().cpu().numpy())
    n = sum(map(len, found[0]))
    each = [stats.kstest(np.concatenate(us), "uniform").pvalue for us in found if n]
    pvalue = min(1.0, 2 * float(np.min(each))) if n else math.nan
    return SamplerFit(n_tokens=n, pvalue=pvalue, n_impossible=n_impossible)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTest(Result):
    """Whether counts look as if drawn from a law, or from one law with other counts.

    Parameters
    ----------
    test, statistic, pvalue : of the tokens that the law allows; the p-value is never 0, and NaN
        where all of them were pooled into one cell, so that nothing is tested.
    n : draws, the impossible ones included.
    n_pooled : tokens that were counted together, having expected counts below 5.
    n_impossible : draws of tokens that the law gives no probability.
    least : p-value below which this test cannot go.
    """

    test: str
    statistic: float
    pvalue: float
    n: int
    n_pooled: int = 0
    n_impossible: int = 0
    least: float = LEAST

    def __str__(self) -> str:
        impossible = f", {self.n_impossible} impossible" if self.n_impossible else ""
        p = pvalue_text(self.pvalue, least=self.least)
        return f"{self.test}: {self.n} draws{impossible} ({p})"


def chi_square_fit(counts: ArrayLike, probs: ArrayLike) -> FitTest:
    """Σ (n − e)²/e over tokens, those with e < 5 as one; χ² scaled up to its variance here.

    That variance is 2(k − 1) + (Σ 1/p − k² − 2k + 2)/n: with many rare tokens plain χ² tails are
    too thin, by half where 40 positions are tested at .05/40 each.

    Parameters
    ----------
    counts : [vocab_size] or any shape (of several tokens jointly), draws of each.
    probs : same shape, their law; sums to 1.

    Raises
    ------
    ValueError
        When `probs` is no law, or the counts are not whole, not there, or of another shape.

    Notes
    -----
    Source: Pearson 1900; variance of Haldane 1937, Biometrika 29.

    >>> fit = chi_square_fit([60, 40], [0.5, 0.5])
    >>> fit.statistic, round(fit.pvalue, 4)
    (4.0, 0.0455)
    """
    return _fit(counts, probs, "chi-square")


def g_fit(counts: ArrayLike, probs: ArrayLike) -> FitTest:
    """2 Σ n ln(n/e) / w, pooled as `chi_square_fit`; w = 1 + (Σ 1/p − 1)/(6n(k − 1)), χ²(k − 1).

    Notes
    -----
    Source: Williams 1976, Biometrika 63. Without w, 8 % of lossless Zipf samplers are rejected.

    >>> round(g_fit([60, 40], [0.5, 0.5]).statistic * (1 + 3 / 600), 4)
    4.0271
    """
    return _fit(counts, probs, "G")


def multinomial_fit(
    counts: ArrayLike, probs: ArrayLike, *, n_resamples: int = 999, rng: np.random.Generator
) -> FitTest:
    """G over all tokens, none pooled, against simulated counts: p = (1 + k)/(1 + n_resamples).

    Exact at any n, however rare the tokens are.

    Raises
    ------
    ValueError
        As `chi_square_fit`, and when `n_resamples` is not a whole number of at least 1.

    >>> multinomial_fit([0, 9], [0.9, 0.1], n_resamples=999, rng=np.random.default_rng(0)).pvalue
    0.001
    """
    check_resamples(n_resamples)
    c, q = checked(counts, probs)
    possible = q > 0
    kept, law = c[possible], q[possible]
    n = int(kept.sum())

    def statistic(x: np.ndarray) -> np.ndarray:
        return 2 * special.xlogy(x, x / max(n, 1)).sum(-1) - 2 * x @ np.log(law)

    observed = statistic(kept)
    chunk = max(1, _CELLS // len(law))
    sizes = [min(chunk, n_resamples - start) for start in range(0, n_resamples, chunk)]
    as_far = observed - 1e-9 * max(1.0, abs(observed))  # sums of the same terms in another order
    k = sum(int((statistic(rng.multinomial(n, law, size)) >= as_far).sum()) for size in sizes)
    return FitTest(
        test="multinomial",
        statistic=float(observed),
        pvalue=(1 + k) / (1 + n_resamples),
        n=int(c.sum()),
        n_impossible=int(c.sum()) - n,
        least=1 / (1 + n_resamples),
    )


def check_resamples(n_resamples: int) -> None:
    """Refuses what is no number of resamples."""
    if not (n_resamples >= 1 and n_resamples % 1 == 0):
        raise ValueError(f"`n_resamples` must be a whole number of at least 1; got {n_resamples}")


def checked(counts: ArrayLike, probs: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both flat, counts as int64, law as float64 summing to 1."""
    c, q = _whole("counts", counts), np.asarray(probs)
    if q.shape != c.shape:
        raise ValueError(f"`counts` and `probs` must have one shape; got {c.shape} and {q.shape}")
    from_probs(q.reshape(1, -1))
    q = q.astype(np.float64).ravel()
    return c.ravel(), q / q.sum()


def checked_pair(counts_x: ArrayLike, counts_y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both flat, as int64."""
    x, y = _whole("counts_x", counts_x), _whole("counts_y", counts_y)
    if x.shape != y.shape:
        raise ValueError(f"`counts_x` and `counts_y` must have one shape; got {x.shape}, {y.shape}")
    return x.ravel(), y.ravel()


def _whole(name: str, counts: ArrayLike) -> np.ndarray:
    c = np.asarray(counts, dtype=np.float64)
    bad = ~((c >= 0) & (c == np.round(c)) & (c < np.inf))
    if c.size == 0 or bad.any():
        where = f"; got {c[bad][0]:g} at {np.argwhere(bad)[0].tolist()}" if bad.any() else ""
        raise ValueError(f"`{name}` must be whole numbers ≥ 0, one per token{where}")
    if c.sum() > 2**53:
        raise ValueError(f"`{name}` must be 2⁵³ draws in all at most; got {c.sum():g}")
    return c.astype(np.int64)


def pool(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Counts [..., vocab_size] and expected ones, the rarest as one cell of at least 5."""
    order = np.argsort(expected, kind="stable")
    n = int((expected < _LEAST).sum())
    if n:
        n = max(n, int(np.searchsorted(expected[order].cumsum(), _LEAST)) + 1)
    n = min(n, len(order))
    first, rest = order[:n], order[n:]
    together = [
        np.concatenate([x[..., first].sum(-1, keepdims=True), x[..., rest]], -1) if n else x
        for x in (counts, expected)
    ]
    return together[0], together[1], n


def _fit(counts: ArrayLike, probs: ArrayLike, test: str) -> FitTest:
    c, q = checked(counts, probs)
    possible = q > 0
    n = int(c[possible].sum())
    observed, expected, n_pooled = pool(c[possible], n * q[possible])
    k = len(observed)
    statistic, pvalue = 0.0, math.nan
    if k > 1:
        inverse = float((n / expected).sum())
        if test == "G":
            w = 1 + (inverse - 1) / (6 * n * (k - 1))
            statistic, scale = 2 * special.xlogy(observed, observed / expected).sum() / w, 1.0
        else:
            scale = max(1.0, 1 + (inverse - k * k - 2 * k + 2) / (2 * n * (k - 1)))
            statistic = ((observed - expected) ** 2 / expected).sum()
        pvalue = max(float(special.chdtrc((k - 1) / scale, statistic / scale)), TINY)
    return FitTest(
        test=test,
        statistic=float(statistic),
        pvalue=pvalue,
        n=int(c.sum()),
        n_pooled=n_pooled,
        n_impossible=int(c.sum()) - n,
    )
