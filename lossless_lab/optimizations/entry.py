"""What a catalogue entry is: how to apply an optimisation, and how to tell that it ran."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lossless_lab.models.loading import state_sha256
from lossless_lab.optimizations.faults import silence_one_mlp
from lossless_lab.optimizations.witness import Observation

VACUOUS, WARNING = "VACUOUS: ", "WARNING: "  # in what a witness says


def every_position(lengths: Sequence[int], rows: Sequence[int]) -> int:
    """All generated positions: the change takes part in each forward pass.

    >>> every_position([3, 2], [1, 1])
    5
    """
    return sum(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A network with an optimisation applied, and the engine settings that belong to it.

    Parameters
    ----------
    name : what reports call it.
    model : models.Model or network to run; a copy wherever the optimisation touches the network.
    settings : keyword arguments for TransformersEngine (batch_size, cache, …).
    optimization : the entry that made it, or None for a network of the user's own.
    reference_intact : whether the original's weights and logits were the same after as before.
    """

    name: str
    model: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimization: Optimization | None = None
    reference_intact: bool = True

    @property
    def network(self) -> nn.Module:
        """The network itself."""
        return getattr(self.model, "network", self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """One entry of the catalogue.

    Parameters
    ----------
    name : how it is called in `optimizations.find`, reports and run records.
    level : the level of losslessness that the entry claims (verdict.LEVELS).
    needs : what must be present, in words ("" for nothing beyond torch).
    changes : manifest fields that the entry is meant to change; any other difference between
        the two sides of a comparison makes it INVALID.
    transform : network -> (network, engine settings); copies what it alters.
    witness : observation of a short generation -> what was seen, "" where no trace was found, or
        VACUOUS and why there is nothing to compare; what follows WARNING enters the verdict.
    exercised : (output lengths, rows per batch) -> positions that could depend on the change.
    depends : (tokens of the prompt, place in the output) -> whether that position could; where
        given, `exercised` counts those alone.
    fault : candidate -> the same candidate, broken; what `poisoned` injects.
    counted : the timing whose sum over outputs is the number of positions exercised, where lengths
        and rows do not tell.
    rule : what the level-2 claim rests on and greedy decoding never runs; "" for nothing.
    """

    name: str
    level: str
    transform: Callable[[nn.Module], tuple[nn.Module, dict[str, Any]]]
    witness: Callable[[Observation], str]
    changes: tuple[str, ...] = ("weights_sha256",)
    exercised: Callable[[Sequence[int], Sequence[int]], int] = every_position
    fault: Callable[[nn.Module], nn.Module] = silence_one_mlp
    depends: Callable[[int, int], bool] | None = None
    needs: str = ""
    counted: str = ""
    rule: str = ""

    def apply(self, model: Any) -> Candidate:
        """The optimisation applied to a models.Model or a network, which stays as it is."""
        network = getattr(model, "network", model)
        before = fingerprint(network)
        changed, settings = self.transform(network)
        made = changed
        if network is not model:
            same = _same_weights(network, changed)
            identity = model.weights_sha256 if same else state_sha256(changed)
            made = replace(model, network=changed, weights_sha256=identity)
        return Candidate(
            name=self.name,
            model=made,
            settings=settings,
            optimization=self,
            reference_intact=fingerprint(network) == before,
        )

    def poisoned(self) -> Optimization:
        """The entry's twin with its fault injected: a check that works must tell the two apart."""

        def broken(network: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
            changed, settings = self.transform(network)
            if changed is network:
                changed = copied(network)
            return self.fault(changed), settings

        return replace(self, name=f"{self.name} (poisoned)", transform=broken)

    def __str__(self) -> str:
        return f"{self.name}: claims level {self.level}, changes {', '.join(self.changes)}"


def copied(network: nn.Module) -> nn.Module:
    """A deep copy that computes with its own weights.

    Raises
    ------
    ValueError
        Where a method was replaced on an object (patched, or compiled): deepcopy hands such a
        function over as it is, and it would go on running the original.
    """
    if name := patched(network):
        raise ValueError(
            f"`{name}` carries a forward of its own (patched or compiled): a copy would run the "
            "original's; apply the optimisation first, then patch or compile its result"
        )
    return copy.deepcopy(network)


def patched(network: nn.Module) -> str:
    """The first module with a plain function in place of one of its methods; "" for none."""
    return next(
        (
            name or type(module).__name__
            for name, module in network.named_modules()
            for own, value in vars(module).items()
            if isinstance(value, FunctionType) and hasattr(type(module), own)
        ),
        "",
    )


def fingerprint(network: nn.Module) -> str:
    """SHA-256 over the bytes of all weights and of the logits of a fixed short row."""
    network = getattr(network, "_orig_mod", network)
    digest = hashlib.sha256()
    vocab_size = network.get_input_embeddings().num_embeddings
    row = torch.arange(1, 9, device=network.device)[None] % vocab_size
    with torch.no_grad():
        logits = network(row, use_cache=False).logits
    for tensor in (*network.state_dict().values(), logits):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()


def _same_weights(network: nn.Module, changed: nn.Module) -> bool:
    """Whether the weights are the original's, but for their dtype, as after loading in it."""
    ours, theirs = (getattr(n, "_orig_mod", n).state_dict() for n in (network, changed))
    return ours.keys() == theirs.keys() and all(
        type(x) is type(y) and x.shape == y.shape and torch.equal(x.to(y.dtype), y)
        for x, y in ((x, theirs[name]) for name, x in ours.items())
    )
