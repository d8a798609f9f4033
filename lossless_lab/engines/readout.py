"""Reading what one call of generate left: true lengths, logprobs, arrival times."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers.generation.streamers import BaseStreamer


def true_length(row: Sequence[int], stop: Sequence[int]) -> int:
    """Tokens up to and including the first end id; what follows is padding.

    Examples
    --------
    >>> true_length([17, 22, 71, 77, 0, 0], (77, 96)), true_length([17, 22], ())
    (4, 2)
    """
    return next((i + 1 for i, token_id in enumerate(row) if token_id in stop), len(row))


def chosen_logprobs(
    logits: Sequence[torch.Tensor], sequences: Sequence[Sequence[int]]
) -> list[list[float]]:
    """ln p of each chosen id, l[id] - logsumexp(l), under the raw logits.

    Parameters
    ----------
    logits : one Tensor [batch_size, vocab_size] per step
    sequences : chosen ids [batch_size][n_steps]

    Examples
    --------
    >>> chosen_logprobs([torch.tensor([[0.0, 0.0]])], [[1]])  # -ln 2
    [[-0.6931471824645996]]
    """
    chosen = torch.tensor(sequences, device=logits[0].device).T[..., None]
    steps = zip(logits, chosen, strict=True)
    return torch.stack(
        [step.gather(1, i)[:, 0] - step.logsumexp(1) for step, i in steps]
    ).T.tolist()


def likeliest(logits: Sequence[torch.Tensor], k: int) -> list[list[tuple[tuple[int, float], ...]]]:
    """The k likeliest (id, logprob) per step and row, likeliest first; nothing for k = 0."""
    found = []
    for step in logits if k else ():
        values, ids = (step - step.logsumexp(1, keepdim=True)).topk(min(k, step.shape[1]))
        rows = zip(ids.tolist(), values.tolist(), strict=True)
        found.append([tuple(zip(i, v, strict=True)) for i, v in rows])
    return found


class Clock(BaseStreamer):
    """Stamps each token as it arrives on the host; the first `put` is the prompt."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.prompt_seen = False
        self.began = self.ended = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """Note one step: a row of ids per batch [B], or several accepted at once [1, n]."""
        if self.prompt_seen:
            n_tokens = value.shape[1] if value.dim() == 2 else 1
            self.stamps += [time.perf_counter()] * n_tokens
        self.prompt_seen = True

    def end(self) -> None:
        """Note the end of the batch."""
        self.ended = time.perf_counter()

    def timings(self, n_tokens: int, *, n_rows: int) -> dict[str, float]:
        """Milliseconds to the first token, to token `n_tokens`, and of the whole batch."""
        ends = (self.stamps[0], self.stamps[n_tokens - 1], self.ended)
        names = ("first_token_ms", "latency_ms", "batch_ms")
        taken = (round((end - self.began) * 1e3, 3) for end in ends)
        return dict(zip(names, taken, strict=True)) | {"batch_rows": n_rows}
