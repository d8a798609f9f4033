"""torch.compile, whole or by region, stage by stage, so that `generate` runs the compiled code.

`model = torch.compile(model); model.generate(…)` does not: `generate` is looked up on the
original module, whose own forward is what it calls.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lossless_lab.optimizations.entry import Optimization, copied, every_position
from lossless_lab.optimizations.faults import mlps_of
from lossless_lab.optimizations.witness import compiled_code

Backend = str | Callable
_VERSIONS = 256  # of one function; past torch's own limit of 8 eager code runs, and nothing says so
# What each stage adds to the one before: backend and compiler options. The last four are the last
# full stage again with one switch turned.
STAGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    name: (stage["backend"], stage["options"])
    for name, stage in json.loads(Path(__file__).with_name("stages.json").read_text()).items()
}


def zeros(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """A backend whose compiled code returns zeros: whoever runs it cannot fail to notice."""

    def run(*args: object) -> list:
        return [torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for x in graph(*args)]

    return run


def whole(backend: Backend = "inductor", *, cache: str = "", **compiler: Any) -> Optimization:
    """The network's forward as one compiled function; claims level 1c.

    Parameters
    ----------
    backend : of torch.compile.
    cache : "static" for a cache of fixed shape, as compiled decoding is usually run.
    compiler : further arguments of torch.compile (`options`, `mode`, `dynamic`).
    """

    def place(network: nn.Module, backend: Backend) -> nn.Module:
        network.forward = _compiled(network.forward, backend, compiler)
        return network

    name = f"compile-{cache}-cache" if cache else "compile"
    return _entry(name, place, backend, {"cache": cache} if cache else {})


def mlps(backend: Backend = "inductor", **compiler: Any) -> Optimization:
    """Each decoder layer's MLP compiled by itself (regional compilation); claims level 1c.

    A different program from the whole model compiled: what fuses across MLP borders there stays
    apart here.
    """

    def place(network: nn.Module, backend: Backend) -> nn.Module:
        for mlp in mlps_of(network):
            mlp.forward = _compiled(mlp.forward, backend, compiler)
        return network

    return _entry("compile-mlp", place, backend)


def ineffective(backend: Backend = "inductor") -> Optimization:
    """The popular way, which compiles nothing: a check must be seen to call it VACUOUS."""

    def place(network: nn.Module, backend: Backend) -> nn.Module:
        return torch.compile(network, backend=backend)

    return _entry("compile-ineffective", place, backend)


def stage(name: str, *, region: Callable[..., Optimization] = whole) -> Optimization:
    """`region` compiled as far as the stage `name` of STAGES goes.

    Raises
    ------
    KeyError
        For an unknown stage.

    >>> stage("capture").name
    'compile'
    """
    if name not in STAGES:
        raise KeyError(f"`name` must be one of {', '.join(STAGES)}; got {name!r}")
    backend, options = STAGES[name]
    return region(backend, dynamic=None, **({"options": dict(options)} if options else {}))


@dataclass(slots=True)
class CompilerWork:
    """What the compiler did: graphs compiled so far, and where it had to leave a graph."""

    graphs: int = 0
    graph_breaks: tuple[str, ...] = ()


@contextmanager
def counted() -> Iterator[Callable[[], CompilerWork]]:
    """Forget all compiled code, then count afresh; yields a function that reads the counters.

    A graph more after a call with another shape is a recompilation.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield lambda: CompilerWork(
        graphs=counters["stats"]["unique_graphs"], graph_breaks=tuple(counters["graph_break"])
    )


def _compiled(forward: Callable, backend: Backend, compiler: Mapping[str, Any]) -> Callable:
    given = {"dynamic": True, **compiler}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        given = {"recompile_limit": _VERSIONS, **given}
    return torch.compile(forward, backend=backend, **given)


def _entry(
    name: str,
    place: Callable[[nn.Module, Backend], nn.Module],
    backend: Backend,
    settings: Mapping[str, Any] = MappingProxyType({}),
):
    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        return place(copied(network), backend), dict(settings)

    return Optimization(
        name=name,
        level="1c",
        changes=("optimization", *settings),
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


ENTRIES = (whole(), whole(cache="static"), mlps(), ineffective())
