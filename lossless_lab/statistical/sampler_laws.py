"""The law that a sampler draws from: temperature, filters and penalties, in an engine's order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch

from .laws import from_logits

_ALLOWED = {  # setting -> rule in words, and whether a value keeps to it
    "temperature": ("0 (greedy) or above, and finite", lambda x: 0 <= x < math.inf),
    "top_k": ("a whole number of at least 0 (0 is off)", lambda x: x >= 0 and x % 1 == 0),
    "top_p": ("above 0 and at most 1 (1 is off)", lambda x: 0 < x <= 1),
    "min_p": ("at least 0 and at most 1 (0 is off)", lambda x: 0 <= x <= 1),
}
_CHUNK = 1 << 20  # logits at a time
# vLLM filters by min-p first; llama.cpp divides by the temperature last.
ORDERS = {
    "transformers": ("temperature", "top_k", "top_p", "min_p"),
    "vllm": ("temperature", "min_p", "top_k", "top_p"),
    "llama.cpp": ("top_k", "top_p", "min_p", "temperature"),
}


def sampler_probs(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    order: Sequence[str] = ORDERS["transformers"],
) -> torch.Tensor:
    """Law after temperature, then top-k, top-p and min-p, each renormalised.

    Parameters
    ----------
    logits : [..., vocab_size]; float64 gives the law in float64, anything else in float32.
    temperature : 0 puts all on the likeliest, the first of several; towards 0 they share alike.
    top_k : the k likeliest, and what ties with the last of them; 0 for all.
    top_p : the likeliest until their sum reaches it, the one that does included.
    min_p : those of at least this share of the likeliest one's probability.
    order : of the four; ORDERS has those of the engines that differ.

    Raises
    ------
    ValueError
        Naming the setting, its rule and the value; for a row with NaN or inf, or all −inf.

    >>> sampler_probs(torch.tensor([[0.0, 0.0, 9.0, 9.0]]), top_k=2).tolist()
    [[0.0, 0.0, 0.5, 0.5]]
    """
    logits = from_logits(logits).logits
    exact = logits.dtype == torch.float64
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, (rule, allowed) in _ALLOWED.items():
        if name not in order:
            raise ValueError(f"`order` must hold {', '.join(_ALLOWED)}; got {', '.join(order)}")
        if not (isinstance(settings[name], Real) and allowed(settings[name])):
            raise ValueError(f"`{name}` must be {rule}; got {settings[name]!r}")
    probs = torch.empty(
        logits.shape, dtype=torch.float64 if exact else torch.float32, device=logits.device
    )
    rows = max(1, _CHUNK // logits.shape[-1])
    flat = (x.reshape(-1, x.shape[-1]).split(rows) for x in (probs, logits))
    for i, (out, x) in enumerate(zip(*flat, strict=True)):
        if not (largest := x.amax(-1)).isfinite().all():
            row = int((~largest.isfinite()).nonzero()[0])
            raise ValueError(
                f"`logits`: row {i * rows + row} is no law; its largest logit is {largest[row]}"
            )
        x = x if exact else x.float()
        for name in order:
            x = _STEPS[name](x, settings[name])
        out.copy_(x.softmax(-1))
    return probs


def penalised(
    logits: torch.Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int], penalty: float
) -> torch.Tensor:
    """Logits after the repetition penalty: of each id seen before, l / penalty, l · penalty if < 0.

    Parameters
    ----------
    logits : [n, vocab_size]; row t is the law of output_ids[t].

    >>> penalised(torch.tensor([[2.0, -2.0, 1.0]]), [0, 1], [2], 2.0).tolist()
    [[1.0, -4.0, 1.0]]
    """
    if penalty == 1:
        return logits
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for t in range(len(logits)):
        seen[t, torch.tensor([*prompt_ids, *output_ids[:t]], dtype=torch.long)] = True
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _tempered(x: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature:
        scaled = x / temperature
        if not scaled.amax(-1).isfinite().all():  # too small for the dtype, not for the law
            scaled = (x.double() - x.double().amax(-1, keepdim=True)) / temperature
        return scaled
    return torch.full_like(x, -math.inf).scatter(-1, x.argmax(-1, keepdim=True), 0.0)


def _top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    if not k:
        return x
    return x.masked_fill(x < x.topk(min(int(k), x.shape[-1]), -1).values[..., -1:], -math.inf)


def _top_p(x: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p >= 1:
        return x
    ranked, ids = x.sort(-1)
    lost = ranked.softmax(-1).cumsum(-1) <= 1 - top_p  # what lies below counts, as in transformers
    lost[..., -1] = False
    return x.masked_fill(torch.zeros_like(lost).scatter(-1, ids, lost), -math.inf)


def _min_p(x: torch.Tensor, min_p: float) -> torch.Tensor:
    if not min_p:
        return x
    probs = x.softmax(-1)
    return x.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -math.inf)


_STEPS = {"temperature": _tempered, "top_k": _top_k, "top_p": _top_p, "min_p": _min_p}
