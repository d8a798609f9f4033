"""Drift of the residual stream, layer by layer, between two models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pandas as pd
import torch

from ..results import Result
from .capture import decoder_layers, lockstep, model_inputs
from .nonfinite import Nonfinite, count_nonfinite

_CHUNK = 1 << 20  # activations per chunk in float64: 8 MiB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerDrift(Result):
    """How far the candidate's residual stream is from the reference's after each layer.

    Parameters
    ----------
    frame : DataFrame
        One row per layer; the columns are listed under `compare_layers`.
    n_layers : int
        Blocks of the reference.
    n_positions : int
        Positions compared, pads left out.
    nonfinite : dict
        Layer -> `Nonfinite`, for each layer where either side has NaN or inf; indices count
        (position, feature) with pads left out.
    reference_logits, candidate_logits : tensors [positions, vocab_size]
        Of the very passes that were captured, pads left out, row after row.
    """

    frame: pd.DataFrame
    n_layers: int
    n_positions: int
    nonfinite: dict[int, Nonfinite]
    reference_logits: torch.Tensor = field(repr=False)
    candidate_logits: torch.Tensor = field(repr=False)

    @property
    def first_difference(self) -> int | None:
        """First layer whose streams are not bitwise equal; None when all are."""
        changed = self.frame.loc[self.frame["max_abs_difference"] != 0, "layer"]  # NaN counts
        return None if changed.empty else int(changed.iloc[0])

    def to_frame(self) -> pd.DataFrame:
        """One row per layer."""
        return self.frame

    def __str__(self) -> str:
        if self.first_difference is None:
            return f"{self.n_positions} positions: bitwise equal after every layer"
        last = self.frame.iloc[-1]
        text = (
            f"{self.n_positions} positions: first difference after layer {self.first_difference} "
            f"of {self.n_layers}, relative RMS of the logits {last['relative_rms']:.3g} "
            f"({last['sqnr_db']:.1f} dB)"
        )
        for layer, found in self.nonfinite.items():
            return f"{text}; layer {layer}: {found}"
        return text


def compare_layers(
    reference: Any,
    candidate: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    layer_map: Mapping[int, int] | None = None,
) -> LayerDrift:
    """RMS, SQNR and cosine of candidate − reference in the residual stream, after each layer.

    The two forwards take turns, layer by layer, so about one layer's activations are held; the
    hooks only read, and the logits stay bitwise what they are without them (`observer_effect`).
    Positions are passed explicitly, numbered from the mask, so pads on the left shift nothing.

    Parameters
    ----------
    reference, candidate : decoder-only Hugging Face models in eval mode, or results of `load`
    input_ids : [batch_size, seq_len] token ids
    attention_mask : [batch_size, seq_len], 1 where a token counts
    layer_map : candidate block -> reference block, both from 1, rising; for dropped layers.

    Returns
    -------
    LayerDrift
        with columns layer (0 the embedding, i after block i, n_layers + 1 the logits), module
        ("residual", "logits"), rms_difference, rms_reference, relative_rms, max_abs_difference,
        sqnr_db = −20 log10 relative_rms, cosine, n_positions; sums in float64 over positions and
        features. A NaN in a layer makes its figures NaN.

    Raises
    ------
    ValueError
        When the layer counts differ without a `layer_map`, or hidden sizes or vocabularies do.
    HooksNeverFired
        When a model (a compiled one) does not call its hooks.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    ...          "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> print(compare_layers(model, model, torch.tensor([[1, 5, 2]])))
    3 positions: bitwise equal after every layer
    """
    networks = [getattr(m, "network", m) for m in (reference, candidate)]
    n_layers, n_candidate = (len(decoder_layers(network)) for network in networks)
    if layer_map is None and n_candidate != n_layers:
        raise ValueError(
            f"`candidate` has {n_candidate} layers and `reference` {n_layers}; pass "
            "`layer_map={candidate_layer: reference_layer, ...}`, both counted from 1"
        )
    pairs = _pairs(layer_map or {i: i for i in range(1, n_layers + 1)}, n_candidate, n_layers)
    inputs = model_inputs(input_ids, attention_mask)
    keep = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    rows: list[dict[str, Any]] = []
    found: dict[int, Nonfinite] = {}
    ends: list[torch.Tensor] = []

    def compare(layer: int, x: torch.Tensor, y: torch.Tensor) -> None:
        module = "residual" if layer <= n_layers else "logits"
        if x.shape != y.shape:
            raise ValueError(
                f"`candidate` has {module} of size {y.shape[-1]} at layer {layer} and "
                f"`reference` {x.shape[-1]}; sizes must be equal"
            )
        x, y = (_kept(z, keep) for z in (x, y))
        rows.append({"layer": layer, "module": module, **_drift(x, y), "n_positions": len(x)})
        counted = count_nonfinite(x, y)
        if counted.total:
            found[layer] = counted
        if module == "logits":
            ends.extend((x, y))

    lockstep(*networks, inputs, pairs, compare)
    return LayerDrift(
        frame=pd.DataFrame(rows),
        n_layers=n_layers,
        n_positions=len(ends[0]),
        nonfinite=found,
        reference_logits=ends[0],
        candidate_logits=ends[1],
    )


def _pairs(layer_map: Mapping[int, int], n_candidate: int, n_reference: int) -> dict[int, int]:
    """Reference layer -> candidate layer, the embedding included."""
    items = list(layer_map.items())
    rising = all(a < c and b < d for (a, b), (c, d) in pairwise(items))
    inside = all(1 <= a <= n_candidate and 1 <= b <= n_reference for a, b in items)
    if not (items and rising and inside):
        raise ValueError(
            f"`layer_map` must rise from 1 to at most {n_candidate} (candidate) and {n_reference} "
            f"(reference); got {dict(layer_map)}"
        )
    return {0: 0} | {b: a for a, b in items}


def _kept(x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    return x.flatten(0, -2) if keep is None else x[keep.to(x.device)]


def _drift(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Figures of y − x over all rows of [positions, size], a small float64 chunk at a time."""
    rows = max(1, _CHUNK // x.shape[-1])
    sums = torch.zeros(4, dtype=torch.float64)
    largest = torch.zeros((), dtype=torch.float64)
    for a, b in zip(x.split(rows), y.split(rows), strict=True):
        a, b = a.double(), b.to(a.device).double()
        d = b - a
        sums += torch.stack(
            [d.square().sum(), a.square().sum(), b.square().sum(), (a * b).sum()]
        ).cpu()
        largest = torch.maximum(largest, d.abs().max().cpu())
    dd, aa, bb, ab = sums.tolist()
    relative = math.sqrt(dd / aa) if aa else (0.0 if dd == 0 else math.inf)
    sqnr = math.inf if relative == 0 else -20 * math.log10(relative)
    return {
        "rms_difference": math.sqrt(dd / x.numel()),
        "rms_reference": math.sqrt(aa / x.numel()),
        "relative_rms": relative,
        "max_abs_difference": float(largest),
        "sqnr_db": sqnr,
        "cosine": 1.0 if dd == 0 else ab / math.sqrt(aa * bb) if aa and bb else math.nan,
    }
