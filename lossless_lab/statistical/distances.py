"""All distances between two rows of logits in one pass, without cancellation: KL, JS, TV, H."""

from __future__ import annotations

import math

import torch
from torch.linalg import vecdot

MEASURES = (
    "kl_reference_candidate_nats",
    "kl_candidate_reference_nats",
    "js_nats",
    "total_variation",
)
MORE = ("hellinger", "reference_entropy_nats", "candidate_entropy_nats")
LOGPROBS = ("reference_logprob", "candidate_logprob")


def distances(
    a: torch.Tensor, b: torch.Tensor, tokens: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """MEASURES and MORE of each row, in float64; p = softmax(a), q = softmax(b), δ = ln(q/p).

    With M the larger of p and q, w = −|δ| and e = e^w − 1, every term is M times a function of w
    that is ≥ 0: e − w for the KL from the larger side, e·w − (e − w) for the one from the smaller,
    −e/2 for TV, and so on. Nothing overflows, and what cancels is of relative size 1e-16/|δ|.
    A token masked (−inf) on both sides adds nothing, on one side its mass.

    Parameters
    ----------
    a, b : [rows, vocab_size]; as few rows as `laws.chunks` gives, since temporaries are float64
        Of a row with NaN, +inf or no finite entry comes nothing useful: `laws.why_undefined`.
    tokens : [rows] of token ids, optional
        Adds LOGPROBS, ln p and ln q of this token.

    Returns
    -------
    dict of [rows]
        Hellinger is √(½ Σ (√p − √q)²); entropies are −Σ p ln p.

    Examples
    --------
    >>> row = torch.tensor([[1.0, 2.0]])
    >>> [float(v) for v in distances(row, row).values()][:5]
    [0.0, 0.0, 0.0, 0.0, 0.0]
    """
    (p, ln_p), (q, ln_q) = _law(a), _law(b)
    delta = ln_q - ln_p
    sides = zip(MORE[1:], (p, q), (ln_p, ln_q), strict=True)
    rest = {name: -vecdot(x, ln_x.clamp(min=-1e4)) for name, x, ln_x in sides}
    if tokens is not None:
        pairs = zip(LOGPROBS, (ln_p, ln_q), strict=True)
        rest |= {name: x.gather(-1, tokens[:, None])[:, 0] for name, x in pairs}
    masked = None if (finite := torch.isfinite(delta)).all() else ~finite
    alone = p_alone = q_alone = 0.0
    if masked is not None:
        p_alone, q_alone = ((x * masked).sum(-1) for x in (p, q))
        alone = p_alone + q_alone
        p, q, delta = (x.masked_fill_(masked, 0) for x in (p, q, delta))
    larger, upper = torch.maximum(p, q), (delta > 0).double()
    w = delta.abs_().neg_()
    e = torch.expm1(w)
    half = torch.log1p(e / 2)  # ln of the mean of both, over the larger
    from_larger = e - w
    from_smaller = (e * w).sub_(from_larger)
    js_term = torch.sub(w, half, alpha=2).add_(w.sub_(half).mul_(e))
    tv = -vecdot(larger, e) / 2
    js = vecdot(larger, js_term) / 2
    forward, backward = vecdot(larger, from_larger), vecdot(larger, from_smaller)
    q_larger = upper.mul_(larger)
    moved = vecdot(q_larger, from_smaller) - vecdot(q_larger, from_larger)
    forward, backward = forward + moved, backward - moved
    hellinger = vecdot(larger, e.div_((e + 1).sqrt_().add_(1)).square_()) / 2
    forward, backward = forward + q_alone, backward + p_alone
    if masked is not None:
        forward = forward.masked_fill((masked & (a > b)).any(-1), math.inf)
        backward = backward.masked_fill((masked & (b > a)).any(-1), math.inf)
    values = (
        forward.clamp(min=0),
        backward.clamp(min=0),
        (js + math.log(2) / 2 * alone).clamp(0, math.log(2)),
        (tv + alone / 2).clamp(0, 1),
    )
    squared = (hellinger + alone / 2).clamp(0, 1)
    return dict(zip(MEASURES, values, strict=True)) | {MORE[0]: squared.sqrt()} | rest


def _law(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and their logarithms in float64."""
    x = logits.double()
    x = x - x.amax(-1, True)
    p = x.exp()
    total = p.sum(-1, True)
    return p.div_(total), x.sub_(total.log())
