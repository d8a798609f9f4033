"""A forward pass kept layer by layer, and run again from any layer on, with another layer there."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from .capture import Inputs, capture, forward, kept
from .parts import decoder_layers


class Run(NamedTuple):
    """One plain pass: what every layer returned, and the logits [positions, vocab_size]."""

    outputs: list[Any]
    logits: torch.Tensor


def record(network: nn.Module, inputs: Inputs, name: str) -> Run:
    """A plain pass, kept; `name` is the parameter that errors name.

    Raises
    ------
    HooksNeverFired
        When a layer does not call its hooks.
    RuntimeError
        When replaying the outputs does not give the same logits, bit by bit.
    """
    outputs: list[Any] = []
    with ExitStack() as hooks, capture(network, lambda place, stream: None, name=name):
        for layer in decoder_layers(network):
            hooks.enter_context(layer.register_forward_hook(lambda *told: outputs.append(told[2])))
        logits = kept(forward(network, inputs), inputs)
    again = swapped(network, inputs, outputs, len(outputs) - 1, decoder_layers(network)[-1])
    if not torch.allclose(again, logits, rtol=0, atol=0, equal_nan=True):
        raise RuntimeError(
            f"`{name}` gives other logits when its stored streams are replayed: what passes "
            "between its layers is more than their outputs, so they cannot be swapped one by one"
        )
    return Run(outputs, logits)


class _Replay(nn.Module):
    """Stands where a layer stood, with its attributes, and returns what it returned."""

    def __init__(self, layer: nn.Module, output: Any) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, output=output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def swapped(
    network: nn.Module, inputs: Inputs, outputs: list[Any], i: int, layer: nn.Module
) -> torch.Tensor:
    """Logits with another layer i (from 0); the layers before it are replayed, not run."""
    layers = decoder_layers(network)
    own = list(layers)
    try:
        for j in range(i):
            layers[j] = _Replay(own[j], outputs[j])
        layers[i] = layer
        return kept(forward(network, inputs), inputs)
    finally:
        for j in range(i + 1):
            layers[j] = own[j]
