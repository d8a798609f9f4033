"""Any function from token ids to logits as an engine: greedy or scored, without a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .decoding import Decoding
from .protocol import Completion

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableEngine:
    """Runs `function` over one whole unpadded row at a time; greedy only.

    Parameters
    ----------
    function : ids [1, n] int64 -> logits [1, n, vocab_size] or [n, vocab_size]
        Row t is the law of the id after position t; an object with `logits` will do.
    name : what reports call it.
    tokenizer : optional, to decode outputs.
    stop_token_ids : end ids, as nothing else declares any.
    """

    function: Callable[[torch.Tensor], Any]
    name: str = "callable"
    tokenizer: Any = None
    stop_token_ids: tuple[int, ...] = ()
    batch_size: int = 1

    def describe(self) -> dict[str, Any]:
        """What can be said of a function: its name, and that nothing else is known."""
        return {
            "engine": "callable",
            "model_id": self.name,
            "batch_size": 1,
            "logprobs_kind": "raw",
        }

    def resolve(self, decoding: Decoding) -> Decoding:
        """The same settings with this engine's end ids filled in."""
        if decoding.stop_token_ids is not None:
            return decoding
        return replace(decoding, stop_token_ids=self.stop_token_ids)

    def generate(self, prompts: Rows, decoding: Decoding, *, seed: int) -> list[Completion]:
        """Greedy completions with their logits; each step runs the whole row again.

        Raises
        ------
        ValueError
            Where sampling is asked for: a function has no sampler of its own to judge.
        """
        if not decoding.greedy:
            raise ValueError(
                f"`temperature` must be 0 for a callable, got {decoding.temperature}: it gives "
                "logits and has no sampler that could be judged"
            )
        stop = self.resolve(decoding).stop_token_ids or ()
        return [self._complete(list(prompt), decoding.max_new_tokens, stop) for prompt in prompts]

    def score(self, prompts: Rows, outputs: Rows) -> list[torch.Tensor]:
        """Raw logits [n_output, vocab_size] along given outputs, one pass per row."""
        scored = []
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = self._logits([*prompt, *output[:-1]])
            scored.append(logits[len(prompt) - 1 :].clone())
        return scored

    def _complete(self, prompt: list[int], n: int, stop: Sequence[int]) -> Completion:
        began, row, steps = time.perf_counter(), list(prompt), []
        for _ in range(n):
            steps.append(self._logits(row)[-1].clone())  # it may be a buffer used again
            row.append(int(steps[-1].argmax()))
            if row[-1] in stop:
                break
        output = row[len(prompt) :]
        logits = torch.stack(steps)
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0]
        return Completion(
            prompt_ids=tuple(prompt),
            output_ids=tuple(output),
            text=self.tokenizer.decode(output, skip_special_tokens=True) if self.tokenizer else "",
            finish_reason="stop" if output[-1] in stop else "length",
            logprobs=tuple(chosen.tolist()),
            timings={"latency_ms": (time.perf_counter() - began) * 1e3},
            logits=logits,
        )

    def _logits(self, row: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            found = self.function(torch.tensor([row]))
        logits = getattr(found, "logits", found)
        if isinstance(logits, tuple) and isinstance(logits[0], torch.Tensor):
            logits = logits[0]  # what a network returns without names
        if isinstance(logits, np.ndarray | list | tuple):
            logits = torch.as_tensor(np.asarray(logits))
        told = type(logits).__name__
        if isinstance(logits, torch.Tensor):
            told = f"{logits.dtype} {tuple(logits.shape)}"
            shaped = logits[0] if logits.ndim == 3 else logits
            if logits.is_floating_point() and shaped.ndim == 2 and len(shaped) == len(row):
                return shaped.float() if logits.dtype.itemsize == 2 else shaped
        raise ValueError(
            f"`function` must return floating-point logits [1, {len(row)}, vocab_size] for "
            f"{len(row)} ids, or an object with `logits`; got {told}"
        )
