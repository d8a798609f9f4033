"""A model in two halves: hidden states of a batch, and the head that makes logits of a few rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lossless_lab.numerical.parts import compiled_parts

# Names of a batch, its ids and mask -> hidden states of its predicted tokens; those -> logits.
Side = tuple[Callable[..., torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


class _Given(nn.Module):
    """Stands for a network without its head, and returns the hidden states that it is given."""

    class Output(tuple):
        """One tensor; whatever else a head asks for is None."""

        def __getattr__(self, name: str) -> Any:
            return self[0] if name == "last_hidden_state" else None

    decoder = property(lambda self: self)  # OPT calls its decoder by itself

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Output:
        """The states."""
        return self.Output([inputs_embeds])


def head_of(network: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Logits of hidden states: the network's own code behind its last norm.

    Whatever that is: tied or other weights, a bias, a soft cap, a scale.
    """
    shell = copy.copy(network)
    shell._modules = network._modules | {network.base_model_prefix: _Given()}

    def head(states: torch.Tensor) -> torch.Tensor:
        given = states.to(network.device)[None]
        return shell.forward(inputs_embeds=given, use_cache=False).logits[0]

    return head


def states_and_head(network: Any, tokens: dict[str, list[int]]) -> Side:
    """Hidden states of a batch, and the head that makes logits of some of their rows.

    Where that is not the network's own computation (compiled code, a patched forward), the states
    are the logits of the whole batch, and the head is none.
    """
    if not isinstance(network, nn.Module):
        return network.reads(tokens)

    def logits(_: list[str], *inputs: torch.Tensor) -> torch.Tensor:
        return _rows(lambda **given: network(**given, use_cache=False).logits, *inputs)

    def states(_: list[str], *inputs: torch.Tensor) -> torch.Tensor:
        return _rows(lambda **given: network.base_model(**given, use_cache=False)[0], *inputs)

    def _rows(call: Callable, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = call(input_ids=ids.to(network.device), attention_mask=mask.to(network.device))
        return out[:, :-1][mask[:, 1:].bool()]

    if compiled_parts(network) or "forward" in vars(network) or network._forward_hooks:
        return logits, nn.Identity()
    one = torch.tensor([next(iter(tokens.values()))[:8]])
    inputs = [], one, torch.ones_like(one)
    try:
        head = head_of(network)
        torch.testing.assert_close(head(states(*inputs)), logits(*inputs), equal_nan=True)
    except (AssertionError, AttributeError, TypeError):
        return logits, nn.Identity()
    return states, head
