"""Faults of quantization, pruning and of the distance that judges them.

A format is whatever has `fitted`, `round` and `scales` (number_formats.Format).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lossless_lab.mutants.mutant import Mutant, NotApplicable

# (weights [groups, size], the same as rounded, scales [groups, 1]) -> what is stored instead
Fault = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
DOSES = (1.0, 0.1, 0.01)


def shifted_zero(x: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packing and unpacking disagree by one about the zero point (AutoGPTQ's qzeros)."""
    return rounded + scale


def clipped(x: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes are clamped one step before the end of the grid, on the side of the largest value."""
    return torch.minimum(rounded, rounded.amax(1, keepdim=True) - scale)


def fp8_scale(x: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scales are saved in fp8 (e4m3, the largest at 448), and codes were made with the others."""
    unit = scale.max() / 448
    saved = (scale / unit).to(torch.float8_e4m3fn).float() * unit
    return rounded * saved / scale.where(scale > 0, 1.0)


def boundary(x: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The first weight of each group is unpacked with the scale of the group before."""
    stored = rounded.clone()
    stored[1:, 0] *= (scale[:-1] / scale[1:].where(scale[1:] > 0, 1.0))[:, 0]
    return stored


_FAULTS: dict[str, Fault] = {
    "zero-off-by-one": shifted_zero,
    "fp8-scale": fp8_scale,
    "group-boundary": boundary,
    "clipped-step": clipped,
}


def quantization_mutants(fmt: Any) -> dict[str, Mutant]:
    """Broken ways to round all linear layers but the head to `fmt`; a dose is a share of groups.

    Parameters
    ----------
    fmt : integer format of number_formats, such as number_format("int4-group32-asym").
    """
    edits = {name: partial(_in_groups, fmt=fmt, fault=fault) for name, fault in _FAULTS.items()}
    edits = {"wrong-axis": partial(_wrong_axis, fmt=fmt), **edits}
    said = {"wrong-axis": _wrong_axis, **_FAULTS}
    return {
        name: Mutant(name=name, kind="global", doses=DOSES, unit="share of groups", edit=edit,
                     imitates=said[name].__doc__)
        for name, edit in edits.items()
    }  # fmt: skip


def unpruned(prune: Callable[[nn.Module], None]) -> Mutant:
    """Pruning that leaves a share `dose` of the matrices as they were; `prune` treats one."""

    def edit(network: nn.Module, dose: float) -> int:
        found = [module for _, module in _linears(network)]
        n = max(1, round(dose * len(found)))
        for module in found[n:]:
            prune(module)
        return n

    said = "Masks are made and never applied, so that nothing is pruned."
    doses, unit = (1.0, 0.5, 0.05), "share of matrices"
    return Mutant(name="unpruned", kind="global", doses=doses, unit=unit, imitates=said, edit=edit)


def swapped_kl(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """KL(candidate‖reference) where KL(reference‖candidate) is meant; logits [n, vocab_size]."""
    ours, theirs = (x.double().log_softmax(-1) for x in (reference, candidate))
    return (theirs.exp() * (theirs - ours)).sum(-1)


def unnormalised_kl(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Σ p · (logit difference): the candidate's normaliser is forgotten; can be negative."""
    law = reference.double().softmax(-1)
    return (law * (reference.double() - candidate.double())).sum(-1)


KL_MUTANTS = {"swapped-direction": swapped_kl, "not-renormalised": unnormalised_kl}


def _linears(network: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    head = network.get_output_embeddings()
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def _in_groups(network: nn.Module, dose: float, *, fmt: Any, fault: Fault) -> int:
    n_broken = 0
    for _, module in _linears(network):
        weight = module.weight
        own = fmt.fitted(weight.shape[1])
        size = own.group if isinstance(own.group, int) else weight.shape[1]
        x = weight.detach().float().reshape(-1, size)
        rounded = own.round(x)
        scale = own.scales(x)
        if own.zero_point:
            low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
            scale = (high - low) / (2**own.grid.bits - 1)
        hit = _chosen(len(x), dose)
        n_broken += int(hit.sum())
        stored = torch.where(hit[:, None], fault(x, rounded, scale), rounded)
        weight.copy_(stored.reshape(weight.shape))
    return n_broken


def _wrong_axis(network: nn.Module, dose: float, *, fmt: Any) -> int:
    """Scales are shared down a column of weights, not along a row."""
    n_broken = 0
    for name, module in _linears(network):
        weight = module.weight.detach().float()
        try:
            down = fmt.fitted(weight.shape[0]).round(weight.T.contiguous()).T
        except ValueError as error:
            raise NotApplicable(f"`{name}`: {error}") from error
        hit = _chosen(len(weight), dose)[:, None]
        n_broken += int(hit.sum())
        module.weight.copy_(torch.where(hit, down, fmt.fitted(weight.shape[1]).round(weight)))
    return n_broken


def _chosen(n: int, dose: float) -> torch.Tensor:
    """A share `dose` of n places, at least one, not the first."""
    order = 1 + torch.randperm(n - 1, generator=torch.Generator().manual_seed(n)) if n > 1 else [0]
    hit = torch.zeros(n, dtype=torch.bool)
    hit[order[: max(1, round(dose * n))]] = True
    return hit
