"""What a rule of speculative decoding is: the laws it is handed, the part that each one plays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from .sampler_laws import sampler_probs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """What a rule is handed: the laws at a position, or at a stack of them [..., vocab_size].

    Parameters
    ----------
    target_probs, draft_probs : laws after temperature and filters.
    target_logits, draft_logits : what they were made of, if known; see `logits`.
    settings : temperature, top_k, top_p, min_p that made them, as in `sampler_probs`.
    previous_probs : the target's law one position earlier; itself where not told.

    Raises
    ------
    ValueError where a row is negative, NaN or sums to 1 only beyond 1e-9 (1e-4 in float32 and
    below), or the two have different vocabularies. Rows are then divided by their sums.
    """

    target_probs: np.ndarray
    draft_probs: np.ndarray
    target_logits: np.ndarray | None = None
    draft_logits: np.ndarray | None = None
    settings: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    previous_probs: np.ndarray | None = None

    def __post_init__(self) -> None:
        sides = [_law(name, getattr(self, name)) for name in ("target_probs", "draft_probs")]
        n_target, n_draft = (side.shape[-1] for side in sides)
        if n_target != n_draft:
            raise ValueError(
                "`draft_probs` must have the target's vocabulary, "
                f"{n_target} tokens; it has {n_draft}"
            )
        sides = np.broadcast_arrays(*sides)
        for name, probs in zip(("target_probs", "draft_probs"), sides, strict=True):
            object.__setattr__(self, name, probs)
        if self.previous_probs is None:
            object.__setattr__(self, "previous_probs", self.target_probs)

    def logits(self, side: str) -> np.ndarray:
        """Raw logits of "target" or "draft"; the logarithms of its law where not known."""
        logits = getattr(self, f"{side}_logits")
        with np.errstate(divide="ignore"):
            return np.log(getattr(self, f"{side}_probs")) if logits is None else logits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roles:
    """Which law plays which part at a position; all [..., vocab_size].

    Parameters
    ----------
    drawn : law the proposal comes from.
    draft, target : laws whose values at the proposal the accept function sees.
    rest : weights that a replacement is drawn from, in proportion.
    bonus : the same for the token after γ accepted ones; None where there is none.
    """

    drawn: np.ndarray
    draft: np.ndarray
    target: np.ndarray
    rest: np.ndarray
    bonus: np.ndarray | None


def standard_roles(at: Position) -> Roles:
    """Draft drawn and judged alike; replacement from (target − draft)+; bonus from target."""
    p, q = at.target_probs, at.draft_probs
    return Roles(drawn=q, draft=q, target=p, rest=np.maximum(p - q, 0), bonus=p)


def standard_accept(target: np.ndarray, draft: np.ndarray, u: np.ndarray) -> np.ndarray:
    """u ≤ target/draft, of the probabilities of the proposed token."""
    return u <= target / draft


def _residual_next(at: Position, roles: Roles) -> Position:
    return replace(at, target_probs=normalised(roles.rest, at.target_probs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An acceptance step.

    Parameters
    ----------
    name, note : what it is called, and what it does in a sentence.
    lossless : whether it emits the target's law, for all laws and settings.
    roles : the laws it uses, from those it is handed.
    accept : (target, draft, u) -> bool, elementwise; u uniform on [0, 1).
    one_uniform : the replacement is drawn with the u that rejected the proposal.
    strikes : the replacement is never the rejected token.
    n_candidates : proposals tried one after the other at a position, each drawn anew.
    then : the position that the next candidate is judged at.

    Source: Leviathan et al. 2023, arXiv 2211.17192; several candidates: Miao et al. 2023,
    arXiv 2305.09781.
    """

    name: str
    note: str = ""
    lossless: bool = False
    roles: Callable[[Position], Roles] = standard_roles
    accept: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] = standard_accept
    one_uniform: bool = False
    strikes: bool = False
    n_candidates: int = 1
    then: Callable[[Position, Roles], Position] = _residual_next


STANDARD = Rule(name="standard", lossless=True, note="min(1, target/draft), else the residual")
RULES = {"standard": STANDARD}


def processed(target_logits: Any, draft_logits: Any, **settings: float) -> Position:
    """The position whose laws `sampler_probs` makes of both logits [..., vocab_size], in float64.

    >>> at = processed([[0.0, 0.0, 9.0]], [[0.0, 9.0, 9.0]], top_k=2, temperature=2)
    >>> at.draft_probs.tolist()
    [[0.0, 0.5, 0.5]]
    """
    logits = [torch.as_tensor(x).double() for x in (target_logits, draft_logits)]
    target, draft = (sampler_probs(x, **settings).numpy() for x in logits)
    return Position(
        target_probs=target,
        draft_probs=draft,
        target_logits=logits[0].numpy(),
        draft_logits=logits[1].numpy(),
        settings=settings,
    )


def normalised(weights: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Rows divided by their sums; `otherwise` where nothing is left to draw from."""
    total = weights.sum(-1, keepdims=True)
    return np.where(total > 0, weights / np.where(total > 0, total, 1), otherwise)


def _law(name: str, probs: Any) -> np.ndarray:
    if isinstance(probs, torch.Tensor):
        probs = probs.detach().to("cpu", torch.promote_types(probs.dtype, torch.float32))
    probs = np.asarray(probs)
    tolerance = 1e-4 if probs.dtype in (np.float16, np.float32) else 1e-9
    probs = probs.astype(np.float64)
    if probs.ndim == 0 or probs.shape[-1] == 0:
        raise ValueError(f"`{name}` must be [..., vocab_size]; got shape {probs.shape}")
    sums = probs.sum(-1)
    bad = ~((np.abs(sums - 1) <= tolerance) & (probs.min(-1) >= 0))
    if bad.any():
        row = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"`{name}` row {row or 0} sums to {sums[row]:.6g}, smallest entry "
            f"{probs[row].min():.3g}; rows must be ≥ 0 and sum to 1 within {tolerance:g}"
        )
    return probs / sums[..., None]
