"""Pruning, simulated: weights set to zero, blocks left out, MLP neurons silenced token by token.

Zeros are stored like any other number here: nothing becomes smaller or faster, but for blocks that
are gone.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lossless_lab.optimizations.entry import VACUOUS, Optimization, copied
from lossless_lab.optimizations.faults import mlps_of
from lossless_lab.optimizations.quantization import matrices
from lossless_lab.optimizations.witness import Observation


def sparsity(network: nn.Module) -> float:
    """Share of weights that are exactly zero, by a mask of torch's too; tied ones count once.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(layer.weight)
    >>> sparsity(layer)
    0.5
    """
    network = getattr(network, "network", network)
    masks = dict(network.named_buffers())
    zeros = total = 0
    for name, w in network.named_parameters():
        mask = masks.get(f"{name.removesuffix('_orig')}_mask")
        zeros += int((w == 0 if mask is None else (w * mask) == 0).sum())
        total += w.numel()
    return zeros / total


def magnitude(share: float) -> Optimization:
    """The smallest weights of each linear layer set to zero, a `share` of them; claims level 3."""
    if not 0 < share < 1:
        raise ValueError(f"`share` must be between 0 and 1; got {share}")

    def smallest(weight: torch.Tensor) -> torch.Tensor:
        flat = weight.abs().flatten()
        at = flat.topk(round(share * len(flat)), largest=False).indices
        return torch.zeros_like(flat, dtype=torch.bool).index_fill(0, at, True).view(weight.shape)

    return _masked(f"magnitude-{100 * share:g}", smallest, share)


def two_of_four() -> Optimization:
    """The two smallest of every four neighbours in a row set to zero (2:4); claims level 3."""

    def smallest(weight: torch.Tensor) -> torch.Tensor:
        if weight.shape[1] % 4:
            raise ValueError(f"rows of {weight.shape[1]} weights are no whole groups of 4")
        groups = weight.abs().reshape(len(weight), -1, 4)
        at = groups.topk(2, largest=False).indices
        return torch.zeros_like(groups, dtype=torch.bool).scatter(-1, at, True).view(weight.shape)

    return _masked("2:4", smallest, 0.5)


def _masked(
    name: str, smallest: Callable[[torch.Tensor], torch.Tensor], share: float
) -> Optimization:
    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        changed = copied(network)
        n_before = _zeros(changed)
        for module, weight in matrices(changed):
            try:
                weight.masked_fill_(smallest(weight), 0)
            except ValueError as error:
                raise ValueError(f"`{module}`: {error}") from error
        changed.zeros_before = n_before
        return changed, {}

    def witness(seen: Observation) -> str:
        found = [weight for _, weight in matrices(seen.network)]
        full = sum(not w[smallest(w)].any() for w in found)
        if not full:
            return ""
        if getattr(seen.network, "zeros_before", 0) == _zeros(seen.network):
            return f"{VACUOUS}the weights were as sparse before; nothing was changed"
        return (
            f"{full} of {len(found)} matrices {100 * share:.3g} % zero, "
            f"{100 * sparsity(seen.network):.1f} % of all weights; zeros are stored, "
            "no memory saved"
        )

    return Optimization(name=name, level="3", transform=transform, witness=witness)


def drop_layers(*layers: int) -> Optimization:
    """The blocks of these numbers, from 1, left out; claims level 3.

    The network carries `layer_map`, block -> block of the original, as `compare_layers` takes it.
    """

    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        changed = copied(network)
        config = changed.config.get_text_config(decoder=True)
        n = config.num_hidden_layers
        kept = [i for i in range(n) if i + 1 not in layers]
        whole = all(type(layer) is int for layer in layers)
        if not layers or not kept or not whole or not set(layers) <= set(range(1, n + 1)):
            raise ValueError(f"`layers` must be some of 1 to {n}, not all; got {layers}")
        blocks = _blocks(changed)
        for layer in sorted(set(layers), reverse=True):
            del blocks[layer - 1]
        for i, block in enumerate(blocks):
            for module in block.modules():
                if hasattr(module, "layer_idx"):  # where the cache keeps its keys
                    module.layer_idx = i
        config.num_hidden_layers = len(kept)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[i] for i in kept]
        changed.layer_map = {i + 1: old + 1 for i, old in enumerate(kept)}
        return changed, {}

    def witness(seen: Observation) -> str:
        there = len(_blocks(seen.network))
        left = there == len(getattr(seen.network, "layer_map", ()))
        return f"{there} blocks ran, {len(set(layers))} left out" if left else ""

    name = f"drop-layers-{'-'.join(map(str, layers))}"
    return Optimization(name=name, level="3", transform=transform, witness=witness)


def top_neurons(share: float) -> Optimization:
    """At each token, only the MLP neurons of the largest |activation|, a `share`; claims level 3.

    Which are kept differs from token to token, so no weight is zero and none can be dropped.
    """
    if not 0 < share < 1:
        raise ValueError(f"`share` must be between 0 and 1; got {share}")

    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        changed = copied(network)
        for module in _outputs_of_mlps(changed):
            module.neurons = [0, 0]
            module.register_forward_pre_hook(partial(_keep_largest, share=share))
        return changed, {}

    def witness(seen: Observation) -> str:
        counts = [getattr(m, "neurons", [0, 0]) for m in _outputs_of_mlps(seen.network)]
        active, total = (sum(column) for column in zip(*counts, strict=True))
        if active == total > 0:
            return f"{VACUOUS}{share:g} of the neurons is all of them; none was silenced"
        said = f"in {len(counts)} MLPs {100 * active / max(total, 1):.1f} % of the neurons active"
        return f"{said}, chosen at each token; no weight is zero" if total else ""

    name = f"top-neurons-{100 * share:g}"
    return Optimization(name=name, level="3", transform=transform, witness=witness)


def _keep_largest(module: nn.Module, args: tuple, *, share: float) -> tuple[torch.Tensor]:
    x = args[0]
    at = x.abs().topk(max(1, round(share * x.shape[-1])), dim=-1).indices
    kept = torch.zeros_like(x).scatter(-1, at, x.gather(-1, at))
    module.neurons = [a + b for a, b in zip(module.neurons, (at.numel(), x.numel()), strict=True)]
    return (kept,)


def _outputs_of_mlps(network: nn.Module) -> list[nn.Module]:
    """The last matrix of each MLP, whose inputs are its neurons."""
    weighted = ([m for m in mlp.modules() if hasattr(m, "weight")] for mlp in mlps_of(network))
    return [each[-1] for each in weighted]


def _blocks(network: nn.Module) -> nn.ModuleList:
    n = network.config.get_text_config(decoder=True).num_hidden_layers
    lists = (m for m in network.modules() if isinstance(m, nn.ModuleList) and len(m) == n)
    return next(lists)


def _zeros(network: nn.Module) -> int:
    return sum(int((weight == 0).sum()) for _, weight in matrices(network))


ENTRIES = (magnitude(0.5), two_of_four(), drop_layers(2), top_neurons(0.5))
