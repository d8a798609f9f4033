"""Faults that an entry's poisoned twin injects into its own copy of the network."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lossless_lab.optimizations.witness import cache_of


def mlps_of(network: nn.Module) -> list[nn.Module]:
    """The submodules named `mlp`; ValueError where there is none."""
    found = [m for name, m in network.named_modules() if name.rsplit(".", 1)[-1] == "mlp"]
    if not found:
        raise ValueError("`network` has no submodule named `mlp`")
    return found


def silence_one_mlp(network: nn.Module) -> nn.Module:
    """The last Linear of the middle MLP set to zero."""
    found = mlps_of(network)
    linears = [m for m in found[len(found) // 2].modules() if hasattr(m, "weight")]
    weight = linears[-1].weight
    zeros = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)  # packed or not
    linears[-1].weight = nn.Parameter(zeros)
    return network


def _rewired(network: nn.Module, around: Callable[..., Any]) -> nn.Module:
    """The network with `around(forward, *args, **kwargs)` for its forward."""
    original = network.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    network.forward = forward
    return network


def stale_slot(network: nn.Module) -> nn.Module:
    """The newest key and value of every layer are lost (zero) before each later pass."""

    def around(forward: Callable, *args: Any, **kwargs: Any) -> Any:
        cache = cache_of(kwargs)
        newest = 0 if cache is None else int(cache.get_seq_length())
        if newest > 0:
            for layer in cache.layers:
                at = min(newest, layer.keys.shape[-2]) - 1  # of what was not evicted
                layer.keys[..., at, :] = 0
                layer.values[..., at, :] = 0
        return forward(*args, **kwargs)

    return _rewired(network, around)


def kept_draft(network: nn.Module) -> nn.Module:
    """After a rejection, the rejected draft's key and value stand for its replacement's."""

    def around(forward: Callable, *args: Any, **kwargs: Any) -> Any:
        cache = cache_of(kwargs)
        if cache is None:
            return forward(*args, **kwargs)
        before, at = getattr(cache, "before_rollback", None), int(cache.get_seq_length())
        output = forward(*args, **kwargs)
        written = [(layer.keys, layer.values) for layer in cache.layers]
        if before and before[0][0].shape[-2] > at:  # what was drafted there has been taken back
            for now, then in zip(written, before, strict=True):
                for new, old in zip(now, then, strict=True):
                    new[..., at, :] = old[..., at, :]
        cache.before_rollback = written
        return output

    return _rewired(network, around)


def ignore_padding(network: nn.Module) -> nn.Module:
    """Attention mask and positions are dropped: pad columns are read as if they were text."""

    def around(forward: Callable, *args: Any, **kwargs: Any) -> Any:
        dropped = ("attention_mask", "position_ids")
        return forward(*args, **{k: v for k, v in kwargs.items() if k not in dropped})

    return _rewired(network, around)
