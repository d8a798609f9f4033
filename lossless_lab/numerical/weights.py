"""The error of weights, matrix by matrix: what a changed copy of a network holds instead."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch

from .tensors import error_sums


def weight_errors(
    reference: Any,
    candidate: Any,
    *,
    bits_per_weight: Callable[[Sequence[int]], float] | None = None,
) -> pd.DataFrame:
    """‖Δw‖ / ‖w‖ and what belongs to it, for every parameter of two or more dimensions.

    Parameters
    ----------
    reference, candidate : networks with the same parameters, or results of models.load.
    bits_per_weight : shape of a matrix -> bits that one weight of it takes in the candidate, as
        `number_formats` counts them, for the matrices that differ; by default those of its dtype.
        The shape is the stored one (GPT-2 keeps [inputs, outputs]).

    Returns
    -------
    DataFrame
        One row per matrix, tied ones once: layer (from 1; <NA> outside of layers), module, rows,
        width, relative_rms, sqnr_db = −20 log10 of it, max_abs_difference (unit of the weights),
        bits_per_weight, and outlier_share, the share of the reference's weights beyond 6 RMS
        (2e-9 in a normal law).

    Raises
    ------
    ValueError
        When a parameter is missing on a side or has another shape.

    Examples
    --------
    >>> one, other = (torch.nn.Linear(2, 1) for _ in "ab")
    >>> with torch.no_grad():
    ...     _ = one.weight.copy_(torch.tensor([[3.0, 4.0]]))
    ...     _ = other.weight.copy_(torch.tensor([[3.0, 4.5]]))
    >>> weight_errors(one, other)[["relative_rms", "max_abs_difference"]].to_numpy().tolist()
    [[0.1, 0.5]]
    """
    pair = (getattr(model, "network", model) for model in (reference, candidate))
    ours, theirs = (dict(network.named_parameters()) for network in pair)
    if unpaired := sorted(ours.keys() ^ theirs.keys()):
        raise ValueError(
            f"`candidate` must have the reference's parameters; {unpaired[0]} is on one side only"
        )
    rows = []
    for name, weight in ours.items():
        other = theirs[name].detach()
        if weight.shape != other.shape:
            raise ValueError(
                f"`{name}` has shape {tuple(weight.shape)} on one side and {tuple(other.shape)} on "
                "the other"
            )
        if weight.ndim > 1:
            rows.append({**_place(name), **_errors(weight.detach(), other, bits_per_weight)})
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def _place(name: str) -> dict[str, Any]:
    """The first number in a parameter's name is its layer less 1; behind it stands the module."""
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    module = name[found.end() :] if found else name
    return {
        "layer": int(found[1]) + 1 if found else None,
        "module": module.removesuffix(".weight"),
    }


def _errors(
    weight: torch.Tensor, other: torch.Tensor, bits: Callable[[Sequence[int]], float] | None
) -> dict[str, Any]:
    sums = error_sums(weight, other)
    limit = 6 * sums.figures["rms_reference"]
    changed = bits is not None and sums.difference != 0
    figures = ("relative_rms", "sqnr_db", "max_abs_difference")
    return {
        "rows": weight.shape[0],
        "width": weight.shape[-1],
        **{figure: sums.figures[figure] for figure in figures},
        "bits_per_weight": bits(weight.shape) if changed else 8.0 * other.element_size(),
        "outlier_share": float((weight.abs() > limit).float().mean()),
    }
