"""Do emitted tokens follow a law? A test that needs one token of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from ..results import Result
from .sampler_laws import sampler_probs

SIZE = 0.01  # share of honest samplers that are rejected
_SLACK = 1e-4  # by which engines may round a filter's border


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
        return f"{self.n_tokens} tokens{impossible} (p = {self.pvalue:.2g})"


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

    Source: Rosenblatt 1952, Ann. Math. Statist. 23, randomised for laws with atoms.

    >>> piece = (torch.zeros(1, 4), [1])  # u lies in [1/4, 1/2], so D >= 1/2
    >>> str(sampler_fit([piece], rng=np.random.default_rng(0)))
    '1 tokens (p = 1)'
    """
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    loose = {"top_k": top_k, "top_p": min(1.0, top_p + _SLACK), "min_p": min_p * (1 - _SLACK)}
    found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    n_impossible = 0
    for logits, tokens in pieces:
        chosen = torch.as_tensor(list(tokens), device=logits.device)[:, None]
        if not len(chosen):
            continue
        probs = sampler_probs(logits, temperature=temperature, **filters)
        possible = sampler_probs(logits, temperature=temperature, **loose).gather(1, chosen) > 0
        n_impossible += int((~possible).sum())
        own = probs.gather(1, chosen)
        ids = torch.arange(probs.shape[1], device=probs.device)
        equal_but_before = (probs == own) & (ids < chosen)
        v = torch.as_tensor(rng.random(len(chosen)), dtype=probs.dtype, device=probs.device)
        for us, before in zip(found, ((probs > own) | equal_but_before, ids < chosen), strict=True):
            u = (probs * before).sum(1) + v * own[:, 0]
            us.append(u.clamp(0, 1).double().cpu().numpy())
    n = sum(map(len, found[0]))
    each = [stats.kstest(np.concatenate(us), "uniform").pvalue for us in found if n]
    pvalue = min(1.0, 2 * float(np.min(each))) if n else math.nan
    return SamplerFit(n_tokens=n, pvalue=pvalue, n_impossible=n_impossible)
