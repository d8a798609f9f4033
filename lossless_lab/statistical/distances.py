"""All distances between two rows of logits in one pass, without cancellation: KL, JS, TV, H."""

from __future__ import annotations

import math

import torch

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

    KL(p‖q) = Σ p (e^δ − 1 − δ) has no negative term, and an error in δ's normaliser enters it
    only squared. δ comes from the difference of the raw logits; its normaliser from the rule
    that Σ (q − p) = 0. A token masked (−inf) on both sides adds nothing, on one side its mass.

    Parameters
    ----------
    a, b : [rows, vocab_size], both float32 or both float64
        Of a row with NaN, +inf or no finite entry comes nothing useful: `laws.why_undefined`.
    tokens : [rows] of token ids, optional
        Adds LOGPROBS, ln p and ln q of this token: ln q as ln p + δ, so that equal is equal.

    Returns
    -------
    dict of [rows]
        Hellinger is √(½ Σ (√p − √q)²), from the same q − p; entropies are −Σ p ln p.

    Examples
    --------
    >>> row = torch.tensor([[1.0, 2.0]])
    >>> [float(v) for v in distances(row, row).values()][:5]
    [0.0, 0.0, 0.0, 0.0, 0.0]
    """
    lse_a, lse_b = torch.logsumexp(a, -1, True), torch.logsumexp(b, -1, True)
    p, q = (a - lse_a).exp_(), (b - lse_b).exp_()
    entropies = [torch.special.entr(z).sum(-1).double() for z in (p, q)]
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
        (gain / (p.sqrt() + q.sqrt()).clamp_min(1e-30)).square() / 2,
    )
    forward, backward, js, tv, hellinger = (term.sum(-1).double() for term in terms)
    if masked is not None:
        p_alone, q_alone = p_alone[:, 0].double(), q_alone[:, 0].double()
        forward = (forward + q_alone).masked_fill((masked & (a > b)).any(-1), math.inf)
        backward = (backward + p_alone).masked_fill((masked & (b > a)).any(-1), math.inf)
        js = js + math.log(2) / 2 * (p_alone + q_alone)
        tv = tv + (p_alone + q_alone) / 2
        hellinger = hellinger + (p_alone + q_alone) / 2
    within = js.clamp(max=math.log(2)), tv.clamp(max=1)  # float32 laws sum to 1 within 3e-6
    values = forward, backward, *within, hellinger.clamp(max=1).sqrt(), *entropies
    found = dict(zip((*MEASURES, *MORE), values, strict=True))
    if tokens is None:
        return found
    ids = tokens[:, None]
    ln_p, ln_q = ((z.gather(-1, ids) - lse)[:, 0].double() for z, lse in ((a, lse_a), (b, lse_b)))
    shift = delta.gather(-1, ids)[:, 0].double()
    ln_q = torch.where(torch.isfinite(ln_p) & torch.isfinite(ln_q), ln_p + shift, ln_q)
    return found | dict(zip(LOGPROBS, (ln_p, ln_q), strict=True))


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
