"""torch.compile, applied so that `generate` really runs the compiled code.

`model = torch.compile(model); model.generate(…)` does not: `generate` is looked up on the
original module, whose own forward is what it calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from lossless_lab.optimizations.entry import Optimization, every_position
from lossless_lab.optimizations.witness import compiled_code

Backend = str | Callable


def zeros(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """A backend whose compiled code returns zeros: whoever runs it cannot fail to notice."""

    def run(*args: object) -> list:
        return [torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for x in graph(*args)]

    return run


def whole(backend: Backend = "inductor") -> Optimization:
    """The network's forward as one compiled function; claims level 1c."""

    def place(network: nn.Module, backend: Backend) -> nn.Module:
        network.forward = torch.compile(network.forward, backend=backend, dynamic=True)
        return network

    return _entry("compile", place, backend)


def mlps(backend: Backend = "inductor") -> Optimization:
    """Each decoder layer's MLP compiled by itself (regional compilation); claims level 1c.

    A different program from the whole model compiled: what fuses across MLP borders there stays
    apart here.
    """

    def place(network: nn.Module, backend: Backend) -> nn.Module:
        found = [m for name, m in network.named_modules() if name.rsplit(".", 1)[-1] == "mlp"]
        if not found:
            raise ValueError("`network` has no submodule named `mlp` to compile")
        for mlp in found:
            mlp.forward = torch.compile(mlp.forward, backend=backend, dynamic=True)
        return network

    return _entry("compile-mlp", place, backend)


def ineffective(backend: Backend = "inductor") -> Optimization:
    """The popular way, which compiles nothing: a check must be seen to call it VACUOUS."""

    def place(network: nn.Module, backend: Backend) -> nn.Module:
        return torch.compile(network, backend=backend)

    return _entry("compile-ineffective", place, backend)


def _entry(name: str, place: Callable[[nn.Module, Backend], nn.Module], backend: Backend):
    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        return place(copy.deepcopy(network), backend), {}

    return Optimization(
        name=name,
        level="1c",
        changes=("optimization",),
        transform=transform,
        witness=compiled_code,
        exercised=every_position,
        fault=lambda compiled: place(_uncompiled(compiled), zeros),
        needs="a C++ compiler and Python headers (inductor on a CPU)",
    )


def _uncompiled(network: nn.Module) -> nn.Module:
    network = getattr(network, "_orig_mod", network)
    for module in network.modules():
        module.__dict__.pop("forward", None)
    return network


ENTRIES = (whole(), mlps(), ineffective())
