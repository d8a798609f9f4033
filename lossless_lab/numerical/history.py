"""Does an output depend on the calls before it, or is it overwritten by a later call?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..results import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Result):
    """What repeating calls in other orders showed.

    Parameters
    ----------
    n_calls : calls made.
    changed : (input, input called just before, largest |difference|) of each repeat that was not
        bitwise the first answer.
    overwritten : inputs whose returned tensor held other numbers after later calls: the output
        is a buffer that is used again (CUDA graphs, hand-kept buffers).
    """

    n_calls: int
    changed: tuple[tuple[int, int, float], ...]
    overwritten: tuple[int, ...]

    @property
    def independent(self) -> bool:
        """No answer depended on the calls before it, and none was overwritten."""
        return not (self.changed or self.overwritten)

    def __str__(self) -> str:
        if self.independent:
            return f"{self.n_calls} calls: no output depends on call history"
        parts = [f"input {i} moved by {d:.3g} after input {j}" for i, j, d in self.changed[:1]]
        parts += [f"output of input {i} was overwritten later" for i in self.overwritten[:1]]
        return f"{self.n_calls} calls: outputs depend on call history: {'; '.join(parts)}"


def call_history(
    call: Callable[[torch.Tensor], torch.Tensor], inputs: Sequence[torch.Tensor]
) -> History:
    """Call every input in turn, then again after every other one, and compare bitwise.

    The first answers are the standard; then each input is called right after each other one
    (A, B, A among them), and after itself. Stale buffers, state kept between calls and in-place
    caches all show; a fault that alters every call in the same way does not.

    Parameters
    ----------
    call : ids [batch_size, seq_len] -> logits of any shape; deterministic by its own claim.
    inputs : at least two different ones, shapes free.

    Raises
    ------
    ValueError
        For fewer than two inputs.

    Examples
    --------
    >>> seen = []
    >>> def stateful(x): seen.append(x); return x + len(seen)
    >>> call_history(stateful, [torch.zeros(1), torch.ones(1)]).independent
    False
    """
    if len(inputs) < 2:
        raise ValueError(f"`inputs` must hold at least two; got {len(inputs)}")
    returned, first = [], []
    for x in inputs:
        returned.append(call(x))
        first.append(returned[-1].clone())
    overwritten = [
        i for i, (now, then) in enumerate(zip(returned, first, strict=True)) if not _same(now, then)
    ]
    changed, before, n_calls = [], len(inputs) - 1, len(inputs)
    for previous in range(len(inputs)):
        for i in range(len(inputs)):
            if before != previous:
                call(inputs[previous])
                n_calls += 1
            again = call(inputs[i])
            n_calls, before = n_calls + 1, i
            if not _same(again, first[i]):
                changed.append((i, previous, _distance(again, first[i])))
    return History(n_calls=n_calls, changed=tuple(changed), overwritten=tuple(overwritten))


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).abs().max()) if x.shape == y.shape else float("inf")
