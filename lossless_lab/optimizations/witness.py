"""Proof that an optimisation ran: what a short generation really did, seen from outside.

Nothing is hooked into the network: hooks on compiled code never fire, or change what is compiled.
The generation loop's own call of `prepare_inputs_for_generation` tells batch and cache, and the
profiler tells which compiled regions were entered.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one generation did.

    Parameters
    ----------
    rows : largest number of sequences in one forward pass.
    cache : names of the cache layer classes that were passed to the network.
    compiled_calls : number of entries into code made by torch.compile.
    dtypes : parameter dtypes of the network, most frequent first.
    computed : dtypes of the keys that the network wrote into its cache.
    network : what ran, for entries whose trace is in the weights.
    timings : of each output, where `generate` returns completions.
    altered : whether compression changed a value of the cache that a later pass read; None where
        nothing was compressed.
    """

    rows: int
    cache: tuple[str, ...]
    compiled_calls: int
    dtypes: tuple[str, ...]
    computed: tuple[str, ...]
    network: nn.Module
    timings: tuple[Mapping[str, float], ...] = ()
    altered: bool | None = None


def observe(network: nn.Module, generate: Callable[[], Any]) -> Observation:
    """Run `generate` once and report what `network` did meanwhile.

    Parameters
    ----------
    network : the network that `generate` drives; left as it was.
    generate : a short generation, a few tokens long.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to standard error
    target = getattr(network, "_orig_mod", network)
    rows, caches, computed, altered = [0], Counter(), Counter(), set()
    original = target.prepare_inputs_for_generation

    @functools.wraps(original)  # generate inspects the signature
    def watched(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = original(input_ids, *args, **kwargs)
        rows.append(input_ids.shape[0])
        layers = getattr(cache_of(inputs), "layers", ())
        caches.update(type(layer).__name__ for layer in layers)
        altered.update(getattr(layer, "altered", None) for layer in layers)
        keys = (getattr(layer, "keys", None) for layer in layers)
        computed.update(_name(k.dtype) for k in keys if isinstance(k, torch.Tensor))
        return inputs

    saved = target.__dict__.get("prepare_inputs_for_generation")
    target.prepare_inputs_for_generation = watched
    try:
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            made = generate()
    finally:
        del target.prepare_inputs_for_generation
        if saved is not None:
            target.prepare_inputs_for_generation = saved
    compiled = sum(
        event.name.startswith("Torch-Compiled Region") for event in profile.function_events
    )
    dtypes = Counter(_name(p.dtype) for p in target.parameters())
    return Observation(
        rows=max(rows),
        cache=tuple(caches),
        compiled_calls=compiled,
        dtypes=tuple(name for name, _ in dtypes.most_common()),
        computed=tuple(computed),
        network=target,
        timings=tuple(getattr(output, "timings", {}) for output in made or ()),
        altered=max(altered - {None}, default=None),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cache_of(inputs: Mapping[str, Any]) -> Any:
    """The cache among forward's keyword arguments (once called `past_key_values`)."""
    return inputs.get("cache", inputs.get("past_key_values"))


def compiled_code(seen: Observation) -> str:
    """Witness of torch.compile: compiled regions were entered."""
    return f"{seen.compiled_calls} calls of compiled code" if seen.compiled_calls else ""
