"""Faults of the attention mask: keys that a query should see and does not, or the reverse."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
from torch import nn

from lossless_lab.numerical.parts import parts_of

# (distance from query back to key [q, k], hidden cells [.., q, k]) -> cells to change
Cells = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def previous_key(distance: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The key just before the query, where it is visible."""
    return (distance == 1) & ~hidden


def future_key(distance: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The key just after the query."""
    return (distance == -1) & hidden


def visible_pads(distance: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden keys that lie before the query: pads, and what a sliding window has passed."""
    return (distance >= 0) & hidden


def attentions(network: nn.Module) -> list[nn.Module]:
    """The attentions of all blocks that take the whole of their mask from outside.

    State-space and linear mixers weigh no keys, and a causal table inside would win over a mask.
    """
    return [
        module
        for (_, part), module in parts_of(network).items()
        if part.startswith("attention")
        and "attention" in type(module).__name__.lower()
        and "attention_mask" in inspect.signature(module.forward).parameters
        and not any(buffer.dtype == torch.bool for buffer in module.buffers())
    ]


def reweigh(cells: Cells, *, hide: bool = False) -> Callable[[nn.Module, float], int]:
    """An edit that shows chosen cells with a weight of `dose`, or hides a share `dose` of theirs.

    A weight w is an attention logit of ln w, so that dose 1 is the whole fault.
    """

    def edit(network: nn.Module, dose: float) -> int:
        log_weight = (-math.inf if dose >= 1 else math.log1p(-dose)) if hide else math.log(dose)

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            x = args[0] if args else kwargs["hidden_states"]
            distance, hidden = _distance_and_hidden(module, x, kwargs)
            chosen = cells(distance, hidden)
            if not chosen.any():
                return None
            least = torch.finfo(x.dtype).min
            mask = kwargs.get("attention_mask")
            if mask is None or mask.dtype == torch.bool:
                mask = torch.zeros(chosen.shape, dtype=x.dtype, device=x.device)
            weight = mask.masked_fill(hidden, 0) + log_weight  # what ALiBi wrote there stays
            mask = mask.masked_fill(hidden, least).where(~chosen, weight.clamp(min=least))
            return args, kwargs | {"attention_mask": mask}

        found = attentions(network)
        for module in found:
            module.register_forward_pre_hook(hook, with_kwargs=True)
        return len(found)

    return edit


def _distance_and_hidden(
    module: nn.Module, x: torch.Tensor, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps from each query back to each key, and the cells that the mask hides.

    The newest key belongs to the newest query, in caches that grow (dynamic, sliding).
    """
    mask, cache, n_queries = kwargs.get("attention_mask"), kwargs.get("cache"), x.shape[1]
    past = int(cache.get_seq_length(module.layer_idx)) if cache is not None else 0
    n_keys = past + n_queries if mask is None else mask.shape[-1]
    keys = torch.arange(n_keys, device=x.device)
    distance = keys[n_keys - n_queries :, None] - keys
    if mask is None:
        return distance, (distance < 0)[None, None]
    return distance, ~mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
