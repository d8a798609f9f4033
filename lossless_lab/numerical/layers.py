"""Where in the stack two models part: the residual stream of both, layer by layer, in lockstep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from ..results import Result
from .nonfinite import count_nonfinite


class HooksNeverFired(RuntimeError):
    """A model gave no activations: compiled code does not run hooks that were set after it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerDrift(Result):
    """How far the candidate's residual stream has drifted from the reference's, by layer.

    Parameters
    ----------
    frame : DataFrame
        One row per layer; columns are listed under `compare_layers`.
    n_layers : int
    nonfinite : tuple of (layer, what)
        Layers with NaN or inf, the first one first; their figures are NaN.
    """

    frame: pd.DataFrame
    n_layers: int
    nonfinite: tuple[tuple[int, str], ...]

    def to_frame(self) -> pd.DataFrame:
        """One row per layer."""
        return self.frame

    def __str__(self) -> str:
        residual = self.frame[self.frame["module"] == "residual"]
        moved = residual[residual["rms_difference"] > 0]
        start = (
            "nothing differs" if moved.empty else f"first difference at layer {moved.iloc[0, 0]}"
        )
        last = residual["relative_rms"].iloc[-1]
        text = f"{self.n_layers} layers: {start}, relative RMS {last:.3g} after the last one"
        if self.nonfinite:
            text += f"; {self.nonfinite[0][1]} at layer {self.nonfinite[0][0]}"
        return text


def compare_layers(
    reference: nn.Module,
    candidate: nn.Module,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
) -> LayerDrift:
    """RMS of (candidate − reference) in the residual stream after each layer.

    Both models run over the same ids in turn, one forward pass each, without a cache. Hooks only
    read; a test shows that the logits are bitwise what they are without them.

    Parameters
    ----------
    reference, candidate : decoder-only Hugging Face models with the same number of layers.
    input_ids : [batch, seq_len] int64
    attention_mask : [batch, seq_len], 1 for real tokens; pad positions are left out.

    Returns
    -------
    LayerDrift
        with columns layer (0 the embedding, i after block i, n_layers + 1 the logits), module
        ("residual" or "logits"), rms_difference, rms_reference (both in activation units),
        relative_rms, max_abs_difference, sqnr_db (20 log10 of reference over difference, inf where
        equal), cosine and n_positions.

    Raises
    ------
    HooksNeverFired
        For a compiled model, whose code does not run hooks.
    ValueError
        When the numbers of layers or the widths differ, or no stack of layers is found.
    """
    sides = {"reference": reference, "candidate": candidate}
    stacks = {side: decoder_layers(model) for side, model in sides.items()}
    n_layers = len(stacks["reference"])
    if len(stacks["candidate"]) != n_layers:
        raise ValueError(
            f"`candidate` must have the reference's {n_layers} layers for this view; it has "
            f"{len(stacks['candidate'])}. Say which layers correspond by dropping them on one side"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    streams = {side: _stream(side, model, input_ids, mask) for side, model in sides.items()}
    real = mask.bool()
    rows, bad = [], []
    for layer, (x, y) in enumerate(zip(*streams.values(), strict=True)):
        x, y = x[real], y.to(x.device)[real]
        found = count_nonfinite(x, y)
        if found.total:
            bad.append((layer, str(found)))
        module = "logits" if layer > n_layers else "residual"
        rows.append({"layer": layer, "module": module, **_difference(x, y)})
    return LayerDrift(frame=pd.DataFrame(rows), n_layers=n_layers, nonfinite=tuple(bad))


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers: the one ModuleList as long as the config says.

    Raises
    ------
    ValueError
        Where none or several are that long.
    """
    n_layers = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    if not stacks:
        raise ValueError(f"no ModuleList of {n_layers} layers found in {type(model).__name__}")
    return stacks[0]  # the outermost comes first


def _stream(
    side: str, model: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor
) -> list[torch.Tensor]:
    """Input of the first layer, output of each, and the logits; [batch, seq_len, width] each."""
    layers = decoder_layers(model)
    kept: dict[int, torch.Tensor] = {}
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {"input_ids": input_ids.to(device), "use_cache": False}
    if not bool(mask.all()):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        inputs |= {"attention_mask": mask.to(device), "position_ids": positions.to(device)}
    with torch.no_grad(), _reading(layers, kept):
        logits = model(**inputs).logits
    if len(kept) != len(layers) + 1:
        raise HooksNeverFired(
            f"`{side}`: {len(kept)} of {len(layers) + 1} hooks fired; compiled code does not run "
            "them. Compare the model before compiling, or compile its layers one by one"
        )
    return [*(kept[i] for i in range(len(layers) + 1)), logits]


@contextmanager
def _reading(layers: nn.ModuleList, kept: dict[int, torch.Tensor]) -> Iterator[None]:
    """Keep what enters the first layer and what leaves each."""

    def entering(module: nn.Module, args: tuple, kwargs: dict) -> None:
        kept[0] = (args[0] if args else kwargs["hidden_states"]).detach()

    def leaving(index: int) -> Any:
        def keep(module: nn.Module, args: tuple, output: Any) -> None:
            kept[index] = (output[0] if isinstance(output, tuple) else output).detach()

        return keep

    handles = [layers[0].register_forward_pre_hook(entering, with_kwargs=True)]
    handles += [layer.register_forward_hook(leaving(i + 1)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _difference(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Figures of one layer over [positions, width], accumulated in float64."""
    if x.shape != y.shape:
        raise ValueError(f"layers must have one width; got {tuple(x.shape)} and {tuple(y.shape)}")
    sums = torch.zeros(4, dtype=torch.float64)
    largest = torch.zeros((), dtype=torch.float64)
    for a, b in zip(x.split(64), y.split(64), strict=True):
        a, b = a.double().cpu(), b.double().cpu()
        d = b - a
        sums += torch.stack([d.square().sum(), a.square().sum(), b.square().sum(), (a * b).sum()])
        largest = torch.maximum(largest, d.abs().max())  # keeps NaN
    difference, reference, candidate, product = sums.tolist()
    norm = np.sqrt(reference * candidate)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "rms_difference": float(np.sqrt(difference / x.numel())),
            "rms_reference": float(np.sqrt(reference / x.numel())),
            "relative_rms": float(np.sqrt(np.divide(difference, reference))),
            "max_abs_difference": float(largest),
            "sqnr_db": float(-10 * np.log10(np.divide(difference, reference))),
            "cosine": float(np.divide(product, norm)) if norm else float("nan"),
            "n_positions": x.shape[0],
        }
