"""Casts of the whole network to a narrower floating-point dtype."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lossless_lab.optimizations.entry import Optimization, every_position
from lossless_lab.optimizations.faults import silence_one_mlp


def cast(dtype: str) -> Optimization:
    """Weights and activations in `dtype` ("bfloat16", "float16"); claims level 2.

    >>> cast("bfloat16").changes
    ('dtype',)
    """

    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        return copy.deepcopy(network).to(getattr(torch, dtype)), {}

    return Optimization(
        name=dtype,
        level="2",
        changes=("dtype",),
        transform=transform,
        witness=lambda seen: f"parameters in {dtype}" if seen.dtypes[:1] == (dtype,) else "",
        exercised=every_position,
        fault=silence_one_mlp,
    )


ENTRIES = (cast("bfloat16"), cast("float16"))
