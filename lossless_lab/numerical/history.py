"""Does an output depend on the calls before it, or is it overwritten by a later call?"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from ..results import Result
from .nonfinite import same_bits


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


@torch.no_grad()
def prefix_reuse(
    network: Any, prefix: Sequence[int], suffixes: Sequence[Sequence[int]]
) -> pd.DataFrame:
    """Continuations of one prefix from a warm cache, against cold passes over all of each text.

    One object is handed on from call to call as it is, and a copy of it is made for each: a cache
    is extended in place, so that only copies start each time where the prefix ends.

    Parameters
    ----------
    network : decoder-only Hugging Face model, or result of `load`.
    prefix : token ids that all texts begin with.
    suffixes : token ids of each continuation, in the order of the calls.

    Returns
    -------
    DataFrame
        call, handed ("a copy" or "the same object"), cached_tokens (that the cache held before the
        call; more than the prefix is the fault) and max_abs_difference (of the logits of the suffix
        against the cold pass: a copy differs by rounding alone).
    """
    network, n = getattr(network, "network", network), len(prefix)
    kept, rows = network(torch.tensor([[*prefix]]), use_cache=True)["cache"], []
    for handed in ("a copy", "the same object"):
        for call, suffix in enumerate(suffixes):
            cold = network(torch.tensor([[*prefix, *suffix]]), use_cache=False).logits[:, n:]
            cache = copy.deepcopy(kept) if handed == "a copy" else kept
            held = int(cache.get_seq_length())
            warm = network(torch.tensor([[*suffix]]), cache=cache, use_cache=True).logits
            moved = float((warm.double() - cold.double()).abs().max())
            rows.append((call, handed, held, moved))
    return pd.DataFrame(rows, columns=["call", "handed", "cached_tokens", "max_abs_difference"])


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
        For fewer than two inputs or equal ones, and for an output that is no tensor.

    Examples
    --------
    >>> seen = []
    >>> def stateful(x): seen.append(x); return x + len(seen)
    >>> call_history(stateful, [torch.zeros(1), torch.ones(1)]).independent
    False
    """
    if len(inputs) < 2 or any(same_bits(x, y) for i, x in enumerate(inputs) for y in inputs[:i]):
        raise ValueError(f"`inputs` must hold two different ones or more; got {len(inputs)}")
    returned: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # input, output, its copy

    def ask(i: int) -> torch.Tensor:
        output = call(inputs[i])
        if not isinstance(output, torch.Tensor):
            raise ValueError(f"`call` must return a tensor; got {type(output).__name__}")
        returned.append((i, output.detach(), output.detach().clone()))
        return returned[-1][2]

    first = [ask(i) for i in range(len(inputs))]
    changed, before = [], len(inputs) - 1
    for previous in range(len(inputs)):
        for i in range(len(inputs)):
            if before != previous:
                ask(previous)
            again, before = ask(i), i
            if not same_bits(again, first[i]):
                changed.append((i, previous, _distance(again, first[i])))
    overwritten = {i for i, output, copy in returned if not same_bits(output, copy)}
    return History(
        n_calls=len(returned), changed=tuple(changed), overwritten=tuple(sorted(overwritten))
    )


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).abs().max()) if x.shape == y.shape else float("inf")
