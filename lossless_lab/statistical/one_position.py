"""One position's two laws side by side, token by token."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import torch

from .laws import paired, positive


def distribution(
    reference_logits: torch.Tensor,
    candidate_logits: torch.Tensor,
    *,
    tokenizer_decode: Callable[[list[int]], str] | None = None,
    k: int | None = 20,
    temperature: float = 1.0,
) -> pd.DataFrame:
    """ln p of one position's tokens on both sides: the top k of either, likeliest first.

    Parameters
    ----------
    reference_logits, candidate_logits : [vocab_size], raw logits
    tokenizer_decode : ids -> text
        Text is a label only: rows are told apart by id (split characters all decode to U+FFFD).
    k : rows wanted from each side; None for the whole vocabulary.

    Returns
    -------
    DataFrame
        token_id, token, reference_logprob, candidate_logprob, in nats, from float64 logits.

    Examples
    --------
    >>> distribution(torch.tensor([0.0, 0.0, 5.0]), torch.zeros(3), k=1)["token_id"].tolist()
    [2, 0]
    """
    sides = paired(reference_logits, candidate_logits)
    if sides[0].ndim != 1:
        raise ValueError(f"`reference_logits` must be [vocab_size]; got {tuple(sides[0].shape)}")
    t = positive(temperature)
    reference, candidate = (torch.log_softmax(z.cpu().double() / t, -1) for z in sides)
    n = len(reference) if k is None else k
    shown = torch.zeros(len(reference), dtype=torch.bool)
    for z in (reference, candidate):
        shown[z.argsort(descending=True, stable=True)[:n]] = True
    order = reference.argsort(descending=True, stable=True)
    ids = order[shown[order]]
    decode = tokenizer_decode or (lambda ids: str(ids[0]))
    return pd.DataFrame(
        {
            "token_id": ids.numpy(),
            "token": [decode([i]) for i in ids.tolist()],
            "reference_logprob": reference[ids].numpy(),
            "candidate_logprob": candidate[ids].numpy(),
        }
    )
