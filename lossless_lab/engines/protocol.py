"""What an engine is: token ids in; token ids, text, logprobs, finish reason and timings out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .decoding import Decoding

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One output of one prompt.

    Parameters
    ----------
    prompt_ids, output_ids : tuple of int
        The stop id is kept as the last output id; the pad tail is not.
    text : str
        Output decoded as one sequence, special tokens skipped ("" without a tokenizer).
    finish_reason : {"stop", "length"}
    logprobs : tuple of float or None
        ln p of each output id under the raw logits, before any sampling parameter.
    top_logprobs : tuple of tuple of (id, logprob) or None
        The k likeliest ids of each position, likeliest first.
    timings : dict
        first_token_ms, latency_ms (to this row's last token), batch_ms, batch_rows; under
        speculation also rounds, drafted and accepted (tokens), rejections (rounds with one).
    logits : Tensor [n_output, vocab_size] float32 or None
        Raw logits, row t being the law of output_ids[t]; only from engines that keep them.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    timings: dict[str, float] = field(default_factory=dict)
    logits: torch.Tensor | None = None

    def __str__(self) -> str:
        return f"{len(self.output_ids)} tokens, {self.finish_reason}: {self.text!r}"


@runtime_checkable
class Engine(Protocol):
    """Runs one batch at a time; whoever calls it decides what a batch is."""

    batch_size: int

    def describe(self) -> dict[str, Any]:
        """The manifest fields that this engine knows."""
        ...

    def resolve(self, decoding: Decoding) -> Decoding:
        """The same settings with the end ids filled in."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, *, seed: int
    ) -> list[Completion]:
        """One batch; `decoding.n_samples` completions per prompt, prompt by prompt."""
        ...

    def score(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Raw logits [n_output, vocab_size] along given outputs, through the same decode path."""
        ...


def batches(n_rows: int, batch_size: int) -> list[range]:
    """Row numbers of each batch, in order; the last may be short.

    Examples
    --------
    >>> batches(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(i, min(i + batch_size, n_rows)) for i in range(0, n_rows, batch_size)]


def batch_seed(seed: int, batch_index: int) -> int:
    """Seed of one batch: first 63 bits of SHA-256("seed/batch_index").

    Examples
    --------
    >>> batch_seed(0, 1) == batch_seed(0, 1), batch_seed(0, 1) == batch_seed(1, 0)
    (True, False)
    """
    import hashlib

    digest = hashlib.sha256(f"{seed}/{batch_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], decoding: Decoding, *, start: int = 0
) -> Iterator[tuple[int, list[Completion]]]:
    """Batch after batch of all (prompt, sample) rows, prompt by prompt, as (index, completions).

    The partition depends on the prompts, `n_samples` and `engine.batch_size` alone, and each
    batch has a seed of its own, so that `start` may leave out any number of batches.
    """
    rows = [prompt for prompt in prompts for _ in range(decoding.n_samples)]
    single = replace(decoding, n_samples=1)
    for index, numbers in enumerate(batches(len(rows), engine.batch_size)):
        if index >= start:
            seed = batch_seed(decoding.seed, index)
            yield index, engine.generate([rows[i] for i in numbers], single, seed=seed)


def score_batches(
    engine: Engine, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """`engine.score` over all rows, split into the engine's own batches."""
    scored: list[torch.Tensor] = []
    for rows in batches(len(prompts), engine.batch_size):
        scored += engine.score([prompts[i] for i in rows], [outputs[i] for i in rows])
    return scored
