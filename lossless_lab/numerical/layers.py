"""Drift of the residual stream, and of the parts of each layer, between two models."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import nn

from ..results import Result
from .capture import forward, kept, lockstep, model_inputs
from .nonfinite import Nonfinite, count_nonfinite, same_bits
from .parts import Place, compiled_parts, decoder_layers, paired_layers, parts_of
from .tensors import error_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerDrift(Result):
    """How far the candidate's residual stream is from the reference's after each layer.

    Parameters
    ----------
    frame : DataFrame
        One row per layer, or per part in the order in which they ran; the columns are listed under
        `compare_layers`.
    n_layers : int
        Blocks of the reference.
    n_positions : int
        Positions compared, pads left out.
    nonfinite : dict
        Layer, or (layer, module) for a part, -> `Nonfinite`, where either side has NaN or inf;
        indices count (position, feature) with pads left out.
    reference_logits, candidate_logits : tensors [positions, vocab_size]
        Of the very passes that were captured, pads left out, row after row.
    notes : tuple of str
        What limits the comparison: generic or missing parts, compiled code with observer effect.
    """

    frame: pd.DataFrame
    n_layers: int
    n_positions: int
    nonfinite: dict[Place, Nonfinite]
    reference_logits: torch.Tensor = field(repr=False)
    candidate_logits: torch.Tensor = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def first_place(self) -> tuple[int, str] | None:
        """(layer, module) of the first row that is not bitwise equal; None when all are."""
        changed = self.frame.loc[self.frame["max_abs_difference"] != 0, ["layer", "module"]]
        return None if changed.empty else tuple(changed.iloc[0])  # NaN counts as changed

    @property
    def first_difference(self) -> int | None:
        """First layer that is not bitwise equal; None when all are."""
        return None if self.first_place is None else int(self.first_place[0])

    def __str__(self) -> str:
        text = f"{self.n_positions} positions: bitwise equal after every layer"
        if self.first_place is not None:
            layer, module = self.first_place
            where = "" if module == "residual" else f" ({module})"
            layer = min(layer, self.n_layers)
            last = self.frame.iloc[-1]
            text = (
                f"{self.n_positions} positions: first difference after layer {layer} of "
                f"{self.n_layers}{where}, relative RMS of the logits {last['relative_rms']:.3g} "
                f"({last['sqnr_db']:.1f} dB)"
            )
        for place, found in list(self.nonfinite.items())[:1]:
            text += f"; layer {place}: {found}"
        return "; ".join([text, *self.notes])


def compare_layers(
    reference: Any,
    candidate: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    layer_map: Mapping[int, int] | None = None,
    modules: bool = False,
) -> LayerDrift:
    """RMS, SQNR and cosine of candidate − reference in the residual stream, after each layer.

    The two forwards take turns, layer by layer, so about one layer's activations are held; the
    hooks only read, and the logits stay bitwise what they are without them (`observer_effect`).
    Positions are passed explicitly, numbered from the mask, so pads on the left shift nothing.

    Parameters
    ----------
    reference, candidate : decoder-only Hugging Face models in eval mode, or results of `load`
    input_ids : [batch_size, seq_len] token ids
    attention_mask : [batch_size, seq_len], 1 where a token counts. Recurrent models (RWKV,
        RecurrentGemma) read left pads as text whatever it says: give them rows without.
    layer_map : candidate block -> reference block, both from 1, rising; for dropped layers.
    modules : compare the outputs of attention, MLP and norms too, as the modules return them (some
        architectures, such as BLOOM, add the residual stream inside).

    Returns
    -------
    LayerDrift
        with columns layer (0 the embedding, i block i, n_layers + 1 after the last), module
        ("residual", "logits"; with `modules` also "attention", "mlp", "norm …", and "block …" where
        names tell nothing, as `parts_of` lists them), rms_difference, rms_reference, relative_rms,
        max_abs_difference, sqnr_db = −20 log10 relative_rms, cosine, n_positions; sums in float64
        over positions and features. A NaN in a layer makes its figures NaN; where both sides
        hold the same bits all the same, max_abs_difference is 0.

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
    n_layers = len(decoder_layers(networks[0]))
    pairs = paired_layers(*networks, layer_map)
    parts = _paired_parts(*networks, pairs) if modules else {}
    inputs = model_inputs(input_ids, attention_mask)
    rows: list[dict[str, Any]] = []
    found: dict[Place, Nonfinite] = {}
    ends: list[torch.Tensor] = []
    missed = dict(parts)

    def compare(place: Place, x: torch.Tensor, y: torch.Tensor) -> None:
        layer, module = place if isinstance(place, tuple) else (place, "residual")
        if place == n_layers + 1:
            module = "logits"
        if x.shape != y.shape:
            if place in parts:
                return
            raise ValueError(
                f"`candidate` has {module} of size {y.shape[-1]} at layer {layer} and "
                f"`reference` {x.shape[-1]}; sizes must be equal"
            )
        missed.pop(place, None)
        x, y = kept(x, inputs), kept(y, inputs)
        figures = error_sums(x, y).figures
        rows.append({"layer": layer, "module": module, **figures, "n_positions": len(x)})
        if not math.isfinite(figures["max_abs_difference"]):
            found[place] = count_nonfinite(x, y)
            rows[-1] |= {"max_abs_difference": 0.0} if same_bits(x, y) else {}
        if module == "logits":
            ends.extend((x, y))

    plain = [forward(m, inputs) if compiled_parts(m) else None for m in networks]  # before hooks
    lockstep(*networks, inputs, pairs | parts, compare)
    notes = list(_part_notes(networks[0], parts, missed)) if modules else []
    for side, network, without, logits in zip(
        ("reference", "candidate"), networks, plain, ends, strict=True
    ):
        if without is not None:
            notes.append(_compiled_note(side, network, kept(without, inputs), logits))
    return LayerDrift(
        frame=pd.DataFrame(rows),
        n_layers=n_layers,
        n_positions=len(ends[0]),
        nonfinite=found,
        reference_logits=ends[0],
        candidate_logits=ends[1],
        notes=tuple(notes),
    )


def _paired_parts(
    reference: nn.Module, candidate: nn.Module, pairs: Mapping[int, int]
) -> dict[Place, Place]:
    """Parts of paired layers that both sides have under one name, each in one layer alone."""
    ends = (len(decoder_layers(m)) + 1 for m in (reference, candidate))
    layers, own, there = dict(pairs) | dict([tuple(ends)]), parts_of(reference), parts_of(candidate)
    both = {(i, part): (layers.get(i), part) for i, part in own}
    uses = [Counter(map(id, found.values())) for found in (own, there)]
    return {
        place: other
        for place, other in both.items()
        if other in there and uses[0][id(own[place])] == uses[1][id(there[other])] == 1
    }


def _part_notes(
    reference: nn.Module, parts: Mapping[Place, Place], missed: Mapping[Place, Place]
) -> Iterator[str]:
    """Which parts are generic, and which were not compared."""
    generic = sorted({part for _, part in parts if part.startswith("block ")})
    if generic:
        yield f"generic blocks, told by no known name: {', '.join(generic)}"
    absent = [place for place in parts_of(reference) if place not in parts or place in missed]
    if absent:
        layer, part = absent[0]
        yield (
            f"{len(absent)} parts not compared, first {part} of layer {layer}: not run by both "
            "sides under that name and size, or shared by layers"
        )


def _compiled_note(
    side: str, network: nn.Module, without: torch.Tensor, watched: torch.Tensor
) -> str:
    """Compiled by parts is another program; what capture did to its logits stands beside it."""
    compiled = compiled_parts(network)
    return (
        f"`{side}` runs {len(compiled)} compiled modules (first {compiled[0] or 'the network'}): "
        "another program than the whole model compiled as one; observer effect "
        f"{error_sums(without, watched).largest:.3g}"
    )
