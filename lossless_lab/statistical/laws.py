"""A law over the vocabulary, and the distances between two: KL both ways, JS, total variation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_CHUNK = 1 << 18  # logits per chunk and side: a float32 temporary is 1 MiB
MEASURES = (
    "kl_reference_candidate_nats",
    "kl_candidate_reference_nats",
    "js_nats",
    "total_variation",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Law:
    """One law or a stack of them: softmax(logits) over the last axis, −inf meaning impossible.

    Made by `from_logits` or `from_probs`, so that no one has to guess which an array holds.
    """

    logits: torch.Tensor


def from_logits(logits: Any) -> Law:
    """The law softmax(logits); logits [..., vocab_size], tensor, array or list.

    Examples
    --------
    >>> float(kl_divergence(from_logits([0.0, 0.0]), from_logits([7.0, 7.0])))
    0.0
    """
    x = _floating(logits)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"`logits` must be [..., vocab_size]; got shape {tuple(x.shape)}")
    return Law(logits=x)


def from_probs(probs: Any) -> Law:
    """The law with these probabilities [..., vocab_size]; each row must sum to 1.

    Raises
    ------
    ValueError
        When an entry is negative or NaN, or a row does not sum to 1 within 1e-9 (1e-4 in
        float32 and below, whose own softmax is nearly that far off); with the row.

    Examples
    --------
    >>> round(float(kl_divergence(from_probs([0.5, 0.5, 0]), from_probs([0.25, 0.25, 0.5]))), 4)
    0.6931
    """
    p = _floating(probs)
    tolerance = 1e-9 if p.dtype == torch.float64 else 1e-4
    for i, row in enumerate(p.reshape(-1, p.shape[-1]).double()):
        if not ((row.sum() - 1).abs() <= tolerance and (row >= 0).all()):
            raise ValueError(
                f"`probs` row {i} sums to {row.sum():.6g}, smallest entry {row.min():.3g}; "
                f"rows must be ≥ 0 and sum to 1 within {tolerance:g}"
            )
    return Law(logits=p.log())


def kl_divergence(reference: Law, candidate: Law) -> np.ndarray:
    """KL(reference‖candidate) = Σ p ln(p/q), in nats, one value per law; +inf where q = 0 < p.

    Examples
    --------
    A token that both sides mask adds nothing (the textbook sum gives NaN).

    >>> reference, candidate = [2, 1, 0, -math.inf], [2, 1.5, 0, -math.inf]
    >>> round(float(kl_divergence(from_logits(reference), from_logits(candidate))), 5)
    0.02499
    """
    return _measure(reference, candidate, "kl_reference_candidate_nats")


def js_divergence(reference: Law, candidate: Law) -> np.ndarray:
    """½ KL(p‖m) + ½ KL(q‖m), m = (p + q)/2, in nats; at most ln 2. Not its square root.

    Examples
    --------
    >>> round(float(js_divergence(from_probs([1, 0]), from_probs([0, 1]))), 6)
    0.693147
    """
    return _measure(reference, candidate, "js_nats")


def total_variation(reference: Law, candidate: Law) -> np.ndarray:
    """½ Σ |p − q|: the largest difference in probability that any event can have.

    Examples
    --------
    >>> round(float(total_variation(from_probs([0.7, 0.2, 0.1]), from_probs([0.6, 0.4, 0]))), 12)
    0.2
    """
    return _measure(reference, candidate, "total_variation")


def distances(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """MEASURES of each row, in float64; p = softmax(a), q = softmax(b), δ = ln(q/p).

    KL(p‖q) = Σ p (e^δ − 1 − δ) has no negative term, and an error in δ's normaliser enters it
    only squared. δ comes from the difference of the raw logits; its normaliser from the rule
    that Σ (q − p) = 0. A token masked (−inf) on both sides adds nothing, on one side its mass.

    Parameters
    ----------
    a, b : [rows, vocab_size], both float32 or both float64
        Of a row with NaN, +inf or no finite entry nothing useful comes out: see `why_undefined`.

    Examples
    --------
    >>> row = torch.tensor([[1.0, 2.0]])
    >>> [float(v) for v in distances(row, row).values()]
    [0.0, 0.0, 0.0, 0.0]
    """
    lse_a, lse_b = torch.logsumexp(a, -1, True), torch.logsumexp(b, -1, True)
    p, q = (a - lse_a).exp_(), (b - lse_b).exp_()
    d = b.double() - a.double()  # rounding d in float32 would cost a shifted pair its digits
    finite = torch.isfinite(d)
    masked = None if finite.all() else ~finite
    p_alone = q_alone = torch.zeros_like(lse_a)
    if masked is not None:
        p_alone, q_alone = ((z * masked).sum(-1, True) for z in (p, q))
        p, q, d = (z.masked_fill(masked, 0) for z in (p, q, d))
    delta = (d - (lse_b - lse_a)).to(a.dtype)
    near = delta.abs() < 1
    excess = _gain(p, q, delta, near).sum(-1, True) + (q_alone - p_alone)
    delta = (delta - torch.log1p(excess)).masked_fill((a == b).all(-1, True), 0)
    gain = _gain(p, q, delta, near)
    q = torch.where(near, p + gain, q)
    series, small = delta.abs() < 0.1, delta.clamp(-1, 1)
    js_term = (p * q).sqrt() * _js_near(small / 2)
    if not near.all():
        js_term = torch.where(near, js_term, _js_far(p, q, delta))
    terms = (
        torch.where(series, p * _expm1_minus(small), gain - p * delta),
        torch.where(series, q * _expm1_minus(-small), q * delta - gain),
        js_term,
        gain.abs() / 2,
    )
    forward, backward, js, tv = (term.sum(-1).double() for term in terms)
    if masked is not None:
        p_alone, q_alone = p_alone[:, 0].double(), q_alone[:, 0].double()
        forward = (forward + q_alone).masked_fill((masked & (a > b)).any(-1), math.inf)
        backward = (backward + p_alone).masked_fill((masked & (b > a)).any(-1), math.inf)
        js = js + math.log(2) / 2 * (p_alone + q_alone)
        tv = tv + (p_alone + q_alone) / 2
    within = js.clamp(max=math.log(2)), tv.clamp(max=1)  # float32 laws sum to 1 within 3e-6
    return dict(zip(MEASURES, (forward, backward, *within), strict=True))


def why_undefined(row: torch.Tensor) -> str:
    """Why these logits define no law: "n NaN", "n +inf" or "all -inf"; "" where they do.

    Examples
    --------
    >>> why_undefined(torch.tensor([0.0, math.nan])), why_undefined(torch.tensor([0.0, -math.inf]))
    ('1 NaN', '')
    """
    if math.isfinite(row.amax()):  # amax lets NaN through
        return ""
    nan, inf = int(torch.isnan(row).sum()), int(torch.isposinf(row).sum())
    return f"{nan} NaN" if nan else f"{inf} +inf" if inf else "all -inf"


def chunks(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Start row and the two sides of each chunk of rows, on x's device, in their own dtypes."""
    rows = max(1, _CHUNK // x.shape[-1])
    for start in range(0, len(x), rows):
        yield start, x[start : start + rows], y[start : start + rows].to(x.device)


def paired(reference: Any, candidate: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as floating tensors; ValueError when their shapes, and so vocabularies, differ."""
    x, y = _floating(reference), _floating(candidate)
    if x.shape != y.shape:
        raise ValueError(
            "`reference` and `candidate` must have one shape, and so one vocabulary; "
            f"got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    return x, y


def wide(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float32, or float64 where either is."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(dtype), y.to(dtype)


def _measure(reference: Law, candidate: Law, name: str) -> np.ndarray:
    for side, law in (("reference", reference), ("candidate", candidate)):
        if not isinstance(law, Law):
            raise TypeError(
                f"`{side}` must be from_logits(...) or from_probs(...); got {type(law).__name__}"
            )
    x, y = paired(reference.logits, candidate.logits)
    values = np.empty(math.prod(x.shape[:-1]))
    for start, a, b in chunks(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])):
        values[start : start + len(a)] = distances(*wide(a, b))[name].cpu()
        bad = [start + i for i in range(len(a)) if why_undefined(a[i]) or why_undefined(b[i])]
        values[bad] = math.nan
    return values.reshape(x.shape[:-1])


def _gain(
    p: torch.Tensor, q: torch.Tensor, delta: torch.Tensor, near: torch.Tensor
) -> torch.Tensor:
    """q − p; from δ where |δ| < 1, so that nothing cancels."""
    return torch.where(near, p * torch.expm1(delta.clamp(-1, 1)), q - p)


def _expm1_minus(x: torch.Tensor) -> torch.Tensor:
    """e^x − 1 − x for |x| ≤ 0.1, by its series."""
    series = torch.ones_like(x)
    for k in (8, 7, 6, 5, 4, 3):
        series = 1 + series * x / k
    return series * x * x / 2


def _js_near(h: torch.Tensor) -> torch.Tensor:
    """JS per √(pq), with h = δ/2: h sinh h − cosh h ln cosh h, which does not cancel."""
    s = torch.sinh(h)
    return h * s - torch.cosh(h) * torch.log1p(s * s) / 2


def _js_far(p: torch.Tensor, q: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    soft = torch.nn.functional.softplus
    return (p * (math.log(2) - soft(delta)) + q * (math.log(2) - soft(-delta))) / 2


def _floating(x: Any) -> torch.Tensor:
    """A floating tensor; lists and integers become float64, what is floating stays as it is."""
    x = x.detach() if isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x))
    return x if x.is_floating_point() else x.double()
