"""What a mutant is: one known fault, written into a copy of a network at a chosen dose."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lossless_lab.numerical.parts import decoder_layers, patched

KINDS = ("layer-local", "global")


class NotApplicable(ValueError):
    """The network lacks the part that the fault would break (no window, no rotary positions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault of an implementation.

    Parameters
    ----------
    name : how it is called in `MUTANTS` and in published tables.
    kind : "layer-local" (one block is broken, and can be named) or "global".
    doses : the natural one, as the fault is met in the wild, then smaller ones, falling.
    unit : what a dose counts.
    imitates : the fault in one sentence, with the issue where it was reported, if known.
    edit : (block or whole network, dose) -> number of places broken, in place. By hooks that know
        nothing but their own module, so that copies of a mutant (a cast to float32) are mutants
        too.
    """

    name: str
    kind: str
    doses: tuple[float, ...]
    unit: str
    imitates: str
    edit: Callable[[nn.Module, float], int]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}; got {self.kind!r}")
        if list(self.doses) != sorted(set(self.doses), reverse=True) or not self.doses:
            raise ValueError(f"`doses` must fall from the natural one; got {self.doses}")

    @property
    def natural(self) -> float:
        """The dose at which the fault is met in the wild."""
        return self.doses[0]

    @torch.no_grad()
    def apply(self, network: Any, *, dose: float, layer: int | None = None) -> nn.Module:
        """A broken copy of `network`, which itself stays as it is.

        Parameters
        ----------
        network : decoder-only Hugging Face model, or result of `load`.
        dose : in `unit`, above 0.
        layer : the block to break, from 1; for a layer-local mutant the middle one by default.

        Raises
        ------
        ValueError
            For a dose or layer that cannot be, and a network with a forward of its own, patched
            or compiled, whose copy would run the original's weights.
        NotApplicable
            Where the network lacks what the fault would break, or has it already.
        """
        if not (math.isfinite(dose) and dose > 0):
            raise ValueError(f"`dose` must be finite and above 0; got {dose}")
        if self.unit.startswith("share") and dose > 1:
            raise ValueError(f"`dose` must be at most 1, a {self.unit}; got {dose}")
        network = getattr(network, "network", network)
        if name := patched(network):
            raise ValueError(
                f"`{name}` carries a forward of its own (patched or compiled): a copy would run "
                "the original's; apply the mutant first, then patch or compile its result"
            )
        broken = copy.deepcopy(network)
        if not self.edit(self._target(broken, layer), dose):
            raise NotApplicable(f"`network` has no part that {self.name} could break")
        return broken

    def _target(self, network: nn.Module, layer: int | None) -> nn.Module:
        """The block to break, or the whole network."""
        layers = decoder_layers(network)
        if self.kind == "global":
            if layer is not None:
                raise ValueError(f"{self.name} is global: `layer` must be None; got {layer}")
            return network
        layer = (len(layers) + 1) // 2 if layer is None else layer
        if not 1 <= layer <= len(layers):
            raise ValueError(f"`layer` must be from 1 to {len(layers)}; got {layer}")
        return layers[layer - 1]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, natural dose {self.natural:g} {self.unit})"
