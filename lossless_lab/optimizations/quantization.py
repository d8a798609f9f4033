"""Weights on a number format's grid: simulated weight-only quantization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import nn

from lossless_lab.number_formats import Format, GgufFormat, number_format, round_to
from lossless_lab.optimizations.entry import (
    VACUOUS,
    WARNING,
    Optimization,
    copied,
)
from lossless_lab.optimizations.witness import Observation

HEAD = ("lm_head",)


def quantized(fmt: str | Format | GgufFormat, *, skip: Sequence[str] = HEAD) -> Optimization:
    """Weights of linear layers replaced by what `fmt` gives back; claims level 2, below 8 bits 3.

    Simulated: the arithmetic stays that of the network's dtype, and nothing becomes smaller or
    faster. Embeddings are left alone, except through a tied head that `skip` does not name.

    Parameters
    ----------
    fmt : name in number_formats.FORMATS, or a format of your own. Its groups are halved for
        matrices whose rows they do not divide, where the format allows it; the witness says so.
    skip : parts of module names ("lm_head", "down_proj") that keep their weights; "lm_head" may
        be missing, any other must be there.

    >>> quantized("int4-group128").level
    '3'
    """
    fmt = number_format(fmt)

    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        changed = copied(network)
        already = []
        for name, weight in matrices(changed, skip=skip):
            try:
                rounded = round_to(weight, fmt.fitted(weight.shape[1]))
            except ValueError as error:
                raise ValueError(f"`{name}`: {error}") from error
            if _same(weight, rounded, fmt):
                already.append(name)
            weight.copy_(rounded)
        if not any(True for _ in matrices(changed, skip=skip)):
            raise ValueError(f"`network` has no linear layer besides `skip` {tuple(skip)}")
        changed.on_grid_before = {fmt.name: tuple(already)}
        return changed, {}

    return Optimization(
        name=fmt.name,
        level="2" if fmt.bits >= 8 else "3",
        transform=transform,
        witness=lambda seen: _seen(seen, fmt, skip),
        fault=lambda network: _swap_scales(network, skip),
    )


def matrices(
    network: nn.Module, *, skip: Sequence[str] = HEAD
) -> Iterator[tuple[str, torch.Tensor]]:
    """(module name, weights [outputs, inputs]) of linear layers; a view, whatever the storage."""
    for name, module in linears(network, skip=skip):
        weight = module.weight.detach()
        yield name, weight if isinstance(module, nn.Linear) else weight.T


def linears(network: nn.Module, *, skip: Sequence[str] = HEAD) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of linear layers, transformers' Conv1D among them, besides `skip`."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(skip, str):
        raise ValueError(f"`skip` must be a list of parts of module names; got the str {skip!r}")
    found = {n: m for n, m in network.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    if unknown := {*skip} - {*HEAD} - {part for name in found for part in name.split(".")}:
        raise ValueError(f"`skip` must be parts of names of linear layers; got {sorted(unknown)}")
    kept = {name: m for name, m in found.items() if not {*skip} & {*name.split(".")}}
    if anew := [name for name, m in kept.items() if "weight" not in m._parameters]:
        raise ValueError(
            f"`network`: the weight of `{anew[0]}` is made anew before each pass (masked by "
            "torch's prune, or parametrised), which undoes any change; make it permanent first"
        )
    yield from kept.items()


def mean_over_weights(
    network: nn.Module,
    fmt: str | Format | GgufFormat,
    figure: Callable[[Any, torch.Tensor], float] = lambda f, w: f.bits_per_weight(w.shape),
    *,
    skip: Sequence[str] = HEAD,
) -> float:
    """Bits for one weight of the linear layers in `fmt`, or another figure; mean over weights."""
    fmt, weights = number_format(fmt), [weight for _, weight in matrices(network, skip=skip)]
    total = sum(figure(fmt.fitted(w.shape[1]), w) * w.numel() for w in weights)
    return total / sum(w.numel() for w in weights)


def already_on_grid(
    network: nn.Module, fmt: str | Format | GgufFormat, *, skip: Sequence[str] = HEAD
) -> tuple[str, ...]:
    """The linear layers whose weights lie on the grid of `fmt` as they are.

    Rounding them again changes nothing and tells nothing about the format: they were quantised
    before, as are all weights of a model read from a quantised file.
    """
    fmt = number_format(fmt)
    found = matrices(getattr(network, "network", network), skip=skip)
    return tuple(n for n, w in found if _same(w, round_to(w, fmt.fitted(w.shape[1])), fmt))


def unlike_rounding(
    reference: nn.Module,
    candidate: nn.Module,
    fmt: str | Format | GgufFormat,
    *,
    skip: Sequence[str] = HEAD,
) -> pd.DataFrame:
    """Where a candidate's weights are not the reference's, each rounded to the nearest of `fmt`.

    Returns
    -------
    DataFrame
        One row per matrix: module, unlike_share (of its weights, off by more than the candidate's
        dtype can be) and error_ratio, the candidate's squared error over that of rounding: below 1
        for a method that chooses better scales, above it for one that minds the outputs, not the
        weights (GPTQ), or is broken.
    """
    fmt, ours = number_format(fmt), dict(matrices(getattr(reference, "network", reference)))
    rows = []
    for name, stored in matrices(getattr(candidate, "network", candidate), skip=skip):
        weight = ours[name].float()
        nearest = round_to(weight, fmt.fitted(weight.shape[1]))
        apart, near = (stored.float() - nearest).abs(), torch.finfo(stored.dtype).eps
        unlike = float((apart > near * nearest.abs()).float().mean())
        ratio = (stored.float() - weight).square().sum() / (nearest - weight).square().sum()
        rows.append((name, unlike, float(ratio)))
    return pd.DataFrame(rows, columns=["module", "unlike_share", "error_ratio"])


def _same(weight: torch.Tensor, rounded: torch.Tensor, fmt: Format | GgufFormat) -> bool:
    """Whether what lies between the two is less than the format's own rounding could be.

    Not bit for bit: scales that are found anew from rounded values differ in their last bits, and
    the network's dtype rounds too. Uniform values, the kindest, are off an integer grid by half
    its resolution and more (int8: .0039 of their RMS, where bfloat16 makes .0023).
    """
    near = max(fmt.resolution / 8, 0.4 * torch.finfo(weight.dtype).eps)
    return bool((weight.float() - rounded).norm() <= near * weight.float().norm())


def _seen(seen: Observation, fmt: Format | GgufFormat, skip: Sequence[str]) -> str:
    """What a look at the weights of the network that ran shows; "" for an entry never applied."""
    before = getattr(seen.network, "on_grid_before", {}).get(fmt.name)
    found = dict(matrices(seen.network, skip=skip))
    on_grid = already_on_grid(seen.network, fmt, skip=skip)
    if before is None or not on_grid:
        return ""
    n = sum(found[name].numel() for name in on_grid)
    others = Counter(f.name for m in on_grid if (f := fmt.fitted(found[m].shape[1])) != fmt)
    bits = mean_over_weights(seen.network, fmt, skip=skip)
    total = sum(p.numel() for p in seen.network.parameters())
    said = [
        f"{len(on_grid)} of {len(found)} matrices on the {fmt.name} grid",
        *(f"{count} of them as {name}" for name, count in others.items()),
        f"{100 * n / total:.0f} % of all weights at {bits:.4g} bits",
        f"simulated: arithmetic in {seen.dtypes[0]}",
    ]
    if before:
        lay = f"{len(before)} of {len(found)} matrices lay on the {fmt.name} grid before"
        if len(before) == len(found):
            return f"{VACUOUS}{lay}, as weights of a file in that format do; nothing was changed"
        said.append(f"{WARNING}what the format costs in full, as {lay}")
    return "; ".join(said)


def _swap_scales(network: nn.Module, skip: Sequence[str]) -> nn.Module:
    """The middle matrix with the scales of its rows in reverse order."""
    found = [weight for _, weight in matrices(network, skip=skip)]
    weight = found[len(found) // 2]
    scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    weight.mul_(scale.flip(0) / scale)
    return network


ENTRIES = tuple(
    quantized(name)
    for name in (
        "int8-channel", "int4-group128", "fp8-e4m3", "nf4", "mxfp4", "nvfp4", "q8_0", "q4_0",
    )
)  # fmt: skip
