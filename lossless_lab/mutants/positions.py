"""Faults of positions: a shifted counter, another rotary base."""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from lossless_lab.mutants.mutant import NotApplicable

START = 4  # the first shifted position: shifting all of them would turn no rotary angle


def shift_positions(network: nn.Module, dose: float) -> int:
    """Positions from START on are `dose` too large; learned ones move towards the next row."""

    def rotary(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        def shifted(positions: torch.Tensor) -> torch.Tensor:
            return positions + dose * (positions >= START)

        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": shifted(kwargs["position_ids"])}
        return (args[0], shifted(args[1]), *args[2:]), kwargs

    def learned(
        table: nn.Embedding, args: tuple, kwargs: dict, output: torch.Tensor
    ) -> torch.Tensor:
        positions = kwargs.get("position_ids", args[0])
        rows = positions + getattr(table, "offset", 0)  # OPT's table begins with two rows for pads
        ahead = table.weight[(rows + 1).clamp(max=table.num_embeddings - 1)]
        return torch.where((positions >= START)[..., None], output.lerp(ahead, dose), output)

    turning, tables = _rotary(network), _position_tables(network)
    for module in turning:
        module.register_forward_pre_hook(rotary, with_kwargs=True)
    for table in tables:
        table.register_forward_hook(learned, with_kwargs=True)
    if not (turning or tables):
        raise NotApplicable("`network` has neither rotary nor learned positions")
    return len(turning) + len(tables)


def change_rope_base(network: nn.Module, dose: float) -> int:
    """Rotary base times 1 + dose: frequency i of n falls by (1 + dose)^(i/n)."""
    if not _rotary(network):
        raise NotApplicable("`network` has no rotary positions")
    found = [x for module in _rotary(network) for x in _frequencies(module)]
    for inv_freq in found:
        n = len(inv_freq)
        powers = torch.arange(n, dtype=torch.float64, device=inv_freq.device) / n
        inv_freq.mul_((-powers * math.log1p(dose)).exp())
    return len(found)


def _rotary(network: nn.Module) -> list[nn.Module]:
    """Modules that make rotary angles; a model with ALiBi may carry one and never ask it."""
    if getattr(network.config, "alibi", False):
        return []
    return [module for module in network.modules() if _frequencies(module)]


def _frequencies(module: nn.Module) -> list[torch.Tensor]:
    """One table of frequencies, or one for each kind of layer."""
    return [
        x
        for name, x in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]


def _position_tables(network: nn.Module) -> list[nn.Embedding]:
    return [
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and re.search("pos|wpe", name.rpartition(".")[2])
    ]
