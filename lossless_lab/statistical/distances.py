"""All distances between two rows of logits in one pass, without cancellation: KL, JS, TV, H."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
LOGITS = ("logit_rms", "logit_peak")
_BLOCK = 128  # logits whose maximum stands for them while the largest are sought
# δ − 2 tanh(δ/2) and ln cosh(δ/2) cancel where δ is small: below these values δ³/12 and δ²/8.
_ODD, _EVEN = 0.05**3 / 12, 0.02**2 / 8
_FAR = -800.0  # below it e^δ is 0 in float64


def distances(
    a: torch.Tensor,
    b: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    room: Sequence[torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """MEASURES, MORE and LOGITS of each row; p = softmax(a), q = softmax(b), δ = ln(q/p).

    Everything follows from e = e^δ − 1 and t = tanh(δ/2): with w = q − p = p·e ≥ 0 where δ ≥ 0,
    Σ w·δ is the sum of both KL, Σ (p + q)(δ − 2t) their difference, and no term cancels. δ comes
    from the raw difference b − a, less Σ p (b − a), less ln of what is then missing from 1.
    Rows in float32 that this cannot give to 5e-5 (tokens masked, an offset between both sides far
    above their distance, |δ| ≥ 40) are computed again in float64.

    Parameters
    ----------
    a, b : [rows, vocab_size]; as few rows as `laws.chunks` gives, so that all stays in the cache
        Of a row with NaN, +inf or no finite entry comes nothing useful: `laws.why_undefined`.
    tokens : [rows] of token ids, optional
        Adds LOGPROBS, ln p and ln q of this token.
    room : six tensors like a, optional
        Where intermediate results go; the same for every chunk saves most of the time.

    Returns
    -------
    dict of [rows], float64
        Hellinger is √(½ Σ (√p − √q)²); entropies are −Σ p ln p; logit_rms and logit_peak are RMS
        and largest absolute value over the vocabulary of the centred difference of the logits.

    Examples
    --------
    >>> row = torch.tensor([[1.0, 2.0]])
    >>> [float(v) for v in distances(row, row).values()][:5]
    [0.0, 0.0, 0.0, 0.0, 0.0]
    """
    if a.dtype == torch.float64:
        return _in_float64(a, b, tokens)
    found, sure = _in_float32(a, b, likeliest(a, 1)[0][:, None], tokens, room)
    if len(rows := torch.nonzero(~sure)[:, 0]):
        again = _in_float64(a[rows], b[rows], None if tokens is None else tokens[rows])
        for name, value in again.items():
            found[name][rows] = value
    return found


def likeliest(z: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`argmax`, and values and ids of the k largest entries of each row, largest first.

    They lie in the k blocks with the largest maxima; only those are sorted. NaN counts as largest.

    Examples
    --------
    >>> first, values, ids = likeliest(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
    >>> first.tolist(), values.tolist(), sorted(ids[0].tolist())
    ([1], [[3.0, 3.0, 2.0]], [1, 2, 3])
    """
    if missing := -z.shape[-1] % _BLOCK:
        z = torch.nn.functional.pad(z, (0, missing), value=-math.inf)
    blocks = z.unflatten(-1, (-1, _BLOCK))
    largest = blocks.amax(-1)
    block = largest.argmax(-1)
    inside = blocks[torch.arange(len(z), device=z.device), block].argmax(-1)
    where = largest.topk(min(k, largest.shape[-1]), -1).indices
    kept = blocks.gather(1, where[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    values, i = kept.topk(k, -1)
    ids = where.gather(1, i // _BLOCK) * _BLOCK + i % _BLOCK
    return block * _BLOCK + inside, values, ids


def _in_float32(
    a: torch.Tensor,
    b: torch.Tensor,
    top: torch.Tensor,
    tokens: torch.Tensor | None,
    room: Sequence[torch.Tensor] | None,
    expm1: Callable[..., torch.Tensor] = torch.expm1,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The distances, and which rows of them hold; top: [rows, 1], a likeliest token of a.

    Without room torch makes new tensors, and a compiler can fuse everything. It must be given
    another expm1 then: torch.compile writes exp(x) − 1 on CPUs, which is 0 for small x.
    """
    x, p, d, e, w, z = [None] * 6 if room is None else room

    def sum_of(f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return torch.mul(f, g, out=z).sum(-1)

    x = torch.sub(a, a.gather(-1, top), out=x)
    p = torch.softmax(x, -1, out=p)
    d = torch.sub(b, a, out=d)
    offset = sum_of(p, d)
    d.sub_(offset[:, None])
    mean, low, high = d.mean(-1), d.amin(-1), d.amax(-1)
    peak = torch.maximum(high - mean, mean - low)
    rms = (sum_of(d, d) / d.shape[-1] - mean * mean).clamp_(min=0).sqrt()
    e = expm1(d, out=e)
    missing = sum_of(p, e)[:, None]
    d.sub_(missing.log1p())
    e.sub_(missing).div_(missing + 1)
    w = torch.mul(p, e, out=w)
    p_x, w_x, both_ways = sum_of(p, x), sum_of(w, x), sum_of(w, d)
    if tokens is not None:
        ln_p, change = (y.gather(-1, tokens[:, None])[:, 0].double() for y in (x, d))
    p_top = p.gather(-1, top)
    rest = p.scatter_(-1, top, 0).sum(-1)  # 1 − p(top), to all its digits
    x = torch.mul(d, 0.5, out=x).exp_().add_(1)
    squared = sum_of(p, torch.div(e, x, out=x).square_()).double()  # p ((√q − √p) / √p)²
    both = p.scatter_(-1, top, p_top).mul_(2).add_(w)
    x = torch.mul(e, 0.5, out=x).log1p_().sub_(d, alpha=0.5)  # ln cosh(δ/2)
    x.sub_(_EVEN).clamp_(min=0)
    x.add_(torch.mul(d, d, out=z).mul_(1 / 8).clamp_(max=_EVEN))
    js = both_ways / 4 - sum_of(both, x) / 2
    e.div_(torch.add(e, 2, out=z))
    x = torch.sub(d, e, alpha=2, out=x)
    x.sub_(torch.clamp(x, -_ODD, _ODD, out=z))
    x.add_(torch.mul(d, d, out=z).mul_(d).mul_(1 / 12).clamp_(-_ODD, _ODD))
    asymmetry = sum_of(both, x)
    w.scatter_(-1, top, 0)
    up = torch.clamp(w, min=0, out=z).sum(-1)
    moved = w.sum(-1).double()  # to the others; w of the top token has no digits where it is near 1
    tv = torch.maximum(up, up - moved)
    h_top = moved / p_top[:, 0] / (torch.exp(d.gather(-1, top)[:, 0].double() / 2) + 1)
    squared += p_top[:, 0] * h_top**2
    forward, backward = (both_ways - asymmetry) / 2, (both_ways + asymmetry) / 2
    total = p_top[:, 0].double() + rest  # 1 to the few digits that a softmax in float32 has
    ln_total = -torch.log1p(-rest / total)
    forward, backward, js, tv, squared, p_x, w_x = (
        v / total for v in (forward, backward, js, tv, squared, p_x, w_x)
    )
    entropy = ln_total - p_x
    values = (forward, backward, js, tv, (squared / 2).clamp(max=1).sqrt(), entropy)
    values = (*values, entropy - w_x - backward, rms, peak)
    found = {n: v.double() for n, v in zip((*MEASURES, *MORE, *LOGITS), values, strict=True)}
    for name, most in zip(MEASURES, (math.inf, math.inf, math.log(2), 1), strict=True):
        found[name].clamp_(0, most)
    if tokens is not None:
        found |= zip(LOGPROBS, (ln_p - ln_total, ln_p - ln_total + change), strict=True)
    slip = offset.abs() * 2**-23  # of δ, from the rounding of b − a
    sure = (
        (torch.maximum(high, -low) < 40)
        & (slip * rest <= 5e-5 * tv)
        & (slip**2 <= 4e-4 * (js + 2e-13))
    )
    return found, sure & (slip * tv <= 5e-5 * torch.minimum(forward, backward))


def _in_float64(
    a: torch.Tensor, b: torch.Tensor, tokens: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The same by float64, tokens masked (−inf) included: on both sides they add nothing.

    With M the larger of p and q, v = −|δ| and e = e^v − 1, every term is M times a function of v
    that is ≥ 0: e − v for the KL from the larger side, e·v − (e − v) for the one from the smaller,
    −e/2 for TV, and so on. Nothing overflows, and what cancels is of relative size 1e-16/|δ|.
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
    w.clamp_(min=_FAR)  # where the smaller is 0: digits of −1e38 would be all that is left
    from_smaller = (e * w).sub_(e - w)
    js_term = torch.sub(w, half, alpha=2).add_(w.sub_(half).mul_(e))
    tv = -vecdot(larger, e) / 2
    js = vecdot(larger, js_term) / 2
    q_larger = upper.mul_(larger)
    p_larger = larger - q_larger
    forward = vecdot(p_larger, from_larger) + vecdot(q_larger, from_smaller)
    backward = vecdot(p_larger, from_smaller) + vecdot(q_larger, from_larger)
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
    return (
        dict(zip(MEASURES, values, strict=True)) | {MORE[0]: squared.sqrt()} | rest | _centred(a, b)
    )


def _centred(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """LOGITS, as numerical.noise's centred_rms and centred_peak, in the chunk's own precision."""
    both = torch.isneginf(a) & torch.isneginf(b)
    d = (b - a).masked_fill_(both, 0)
    n = a.shape[-1] - both.sum(-1, True)
    centred = d.sub_(d.sum(-1, True) / n).masked_fill_(both, 0)
    peak = centred.abs().amax(-1).double()
    rms = (centred.square_().sum(-1).double() / n[:, 0]).sqrt()
    found = zip(LOGITS, (rms, peak), strict=True)  # NaN where −inf on one side only
    return {name: torch.where(x.isnan(), math.inf, x) for name, x in found}


def _law(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and their logarithms in float64."""
    x = logits.double()
    x = x - x.amax(-1, True)
    p = x.exp()
    total = p.sum(-1, True)
    return p.div_(total), x.sub_(total.log())
