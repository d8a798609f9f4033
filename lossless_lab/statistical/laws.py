"""A law over the vocabulary, and one distance between two: KL, JS, total variation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .distances import distances

_CHUNK = 1 << 18  # logits per chunk and side: a float32 temporary is 1 MiB


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
    rows = max(1, (_CHUNK << 3 * (x.device.type != "cpu")) // x.shape[-1])
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


def _floating(x: Any) -> torch.Tensor:
    """A floating tensor; lists and integers become float64, what is floating stays as it is."""
    x = x.detach() if isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x))
    return x if x.is_floating_point() else x.double()


def positive(temperature: float) -> float:
    """The temperature as a float; ValueError unless it is above 0 and finite."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"`temperature` must be above 0 and finite; got {temperature}")
    return float(temperature)
