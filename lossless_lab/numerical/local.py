"""Error that a layer makes, told from error that it inherits."""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pandas as pd
import torch
from torch import nn

from .capture import kept, lockstep, model_inputs
from .layers import compare_layers
from .parts import decoder_layers, paired_layers
from .tensors import error_sums


def local_error(
    reference: Any,
    candidate: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    layer_map: Mapping[int, int] | None = None,
) -> pd.DataFrame:
    """Error that each candidate layer makes on the reference's own input, beside the drift so far.

    The candidate runs as it is, with its own masks and rotary embeddings for the same ids and
    positions, but every layer is fed what the reference's layer was fed (rounded to the
    candidate's dtype). Costs four forwards; about one layer's activations are held.

    Parameters
    ----------
    reference, candidate, input_ids, attention_mask, layer_map : as for `compare_layers`

    Returns
    -------
    DataFrame with one row per layer: layer; local_relative_added, RMS of the error over the RMS
    of what the reference's layer adds (out − in); local_relative_rms, over the RMS of its output;
    accumulated_relative_rms, the same of the candidate left to itself; n_positions.

    Raises
    ------
    ValueError, HooksNeverFired
        As `compare_layers`.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)).eval()
    >>> local_error(model, model, torch.tensor([[1, 5]]))["local_relative_rms"].tolist()
    [0.0]
    """
    given = {"attention_mask": attention_mask, "layer_map": layer_map}
    drift = compare_layers(reference, candidate, input_ids, **given).frame.set_index("layer")
    networks = [getattr(m, "network", m) for m in (reference, candidate)]
    pairs = paired_layers(*networks, layer_map)
    inputs = model_inputs(input_ids, attention_mask)
    rows, fed, owner = [], [], threading.get_ident()

    def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() == owner:
            fed[:] = [args[0] if args else kwargs["hidden_states"]]

    def feed(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if threading.get_ident() == owner:
            return None
        if args:
            return (fed[0].to(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": fed[0].to(kwargs["hidden_states"])}

    def compare(layer: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if not 0 < layer <= len(blocks[0]):
            return
        starts = fed[0], fed[0].to(y)
        x, y, *starts = (_wide(kept(z, inputs)) for z in (x, y, *starts))
        rows.append(
            {
                "layer": layer,
                "local_relative_added": error_sums(x - starts[0], y - starts[1]).relative_rms,
                "local_relative_rms": error_sums(x, y).relative_rms,
                "accumulated_relative_rms": drift.loc[layer, "relative_rms"],
                "n_positions": len(x),
            }
        )

    blocks = [decoder_layers(network) for network in networks]
    with ExitStack() as hooks:
        for b, a in pairs.items():
            for block, hook in ((blocks[0][b - 1], note), (blocks[1][a - 1], feed)) if b else ():
                hooks.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
        lockstep(*networks, inputs, pairs, compare)
    return pd.DataFrame(rows)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
