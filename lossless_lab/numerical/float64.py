"""A model that computes in float64 only, its logits a few positions at a time, and the proof."""

import copy
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .capture import Inputs, forward, model_inputs
from .parts import patched

_CHUNK = 1 << 20  # logits per chunk in float64: 8 MiB
_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.to)


def _is_narrow(dtype: torch.dtype) -> bool:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize < wide.itemsize


def _widened(x: Any) -> Any:
    dtype = x if isinstance(x, torch.dtype) else getattr(x, "dtype", None)
    if not (isinstance(dtype, torch.dtype) and _is_narrow(dtype)):
        return x
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return wide if x is dtype else x.to(wide)


class _Widening(TorchDispatchMode):
    """Every operation of this thread in float64, whatever dtype the code asks for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        kept = 1 if func._schema.is_mutable else 0  # what is written must stay the tensor it is
        args = (*args[:kept], *tree_map(_widened, args[kept:]))
        default = torch.get_default_dtype()  # what integers become when divided
        torch.set_default_dtype(torch.float64)
        try:
            return func(*args, **tree_map(_widened, kwargs or {}))
        finally:
            torch.set_default_dtype(default)


class Float64:
    """Mixed into the class of a referee: its calls run widened."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Widening():
            return super().__call__(*args, **kwargs)


class _Narrow(TorchDispatchMode):
    """Counts (operation, dtypes) with a narrow tensor; copies into float64 are exact, so free."""

    def __init__(self, found: Counter) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        narrow = {str(x.dtype).removeprefix("torch.") for x in tensors if _is_narrow(x.dtype)}
        exact = func.overloadpacket in _COPIES and not _is_narrow(out.dtype)
        if narrow and not exact:
            self.found[str(func), ", ".join(sorted(narrow))] += 1
        return out


def referee(model: Any) -> nn.Module:
    """A deep copy of the model that computes in float64 only: x → fp64 logits of the same weights.

    `network.double()` is no referee: modelling code casts to float32 inside (norms, RoPE, softmax,
    router, masks). Here every cast to a narrower type, and every tensor made in one, becomes
    float64 as the operation is dispatched, so no list of architectures is needed.

    Part of the model's definition, and so kept as they are before being promoted: weights, and
    buffers that no checkpoint stores, rotary frequencies above all (float32 as the code makes
    them; rounded ones where the whole model was cast by `.bfloat16()`). Angles, cosines and sines
    are fp64. Frequencies that a forward itself makes anew (dynamic and long RoPE beyond the
    trained length), ALiBi slopes, and rounding done on purpose by casts (fake quantisation) are
    computed in fp64. A float32 constant that the code writes out keeps its value.

    Parameters
    ----------
    model : decoder-only Hugging Face model in any floating dtype, or a result of `load`;
        compiled code is replaced by what it was compiled from.

    Returns
    -------
    nn.Module
        In eval mode, on the same device; to be called, hooked and captured like the original.

    Raises
    ------
    ValueError
        When weights are stored in a quantised format (pass the dequantised network), or a module
        is patched.

    Notes
    -----
    Source: casts inside transformers' modelling code, e.g. models/llama/modeling_llama.py,
    `LlamaRMSNorm.forward`, `LlamaRotaryEmbedding.forward` and `eager_attention_forward`.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    ...          "num_attention_heads": 1}
    >>> model, ids = LlamaForCausalLM(LlamaConfig(**sizes)).eval(), torch.tensor([[1, 5, 2]])
    >>> len(narrow_operations(referee(model), ids)), len(narrow_operations(model.double(), ids)) > 0
    (0, True)
    """
    network = plain_copy(model)
    if network.config._attn_implementation not in ("eager", "sdpa"):
        network.set_attn_implementation("eager")  # other kernels have no float64
    if network._can_set_experts_implementation():
        network.set_experts_implementation("eager")
    if not isinstance(network, Float64):
        cls = type(network)
        network.__class__ = type(cls.__name__, (Float64, cls), {"__module__": cls.__module__})
    return network.double()


def plain_copy(model: Any) -> nn.Module:
    """A deep copy in eval mode, with compiled code replaced by what it was compiled from.

    Raises
    ------
    ValueError
        When a weight is stored in a quantised format, be it a parameter, a buffer or packed, or a
        module's method was replaced on the object: a copy would run the original's; names it.
    """
    network = copy.deepcopy(_eager(getattr(model, "network", model))).eval()
    for module in [*network.modules()]:
        module._modules.update({name: _eager(child) for name, child in module._modules.items()})
    for module in network.modules():
        module._compiled_call_impl = None
        compiled = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
        if getattr(compiled, "__func__", None) is type(module).forward:
            del module.forward
    if name := patched(network):
        raise ValueError(
            f"`model` must run the code of its classes; `{name}` carries a method of its own "
            "(patched): a copy would run the original's"
        )
    for name, weight in _stored(network):
        if type(weight) is not torch.Tensor or not weight.is_floating_point():
            raise ValueError(
                f"`model` must hold plain floating weights; `{name}` is {type(weight).__name__} "
                f"of {getattr(weight, 'dtype', 'packed weights')}: pass the dequantised network"
            )
    return network


def _eager(module: nn.Module | None) -> nn.Module | None:
    """What the module was compiled from; itself where it was not."""
    while hasattr(module, "_orig_mod"):
        module = module._orig_mod
    return module


def _stored(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers that could be matrices of weights, and what is packed in no tensor."""
    ids = (torch.bool, torch.int64)  # and masks
    yield from ((n, x.data) for n, x in network.named_parameters())
    yield from ((n, x) for n, x in network.named_buffers() if x.ndim > 1 and x.dtype not in ids)
    yield from ((n, x) for n, x in network.state_dict().items() if not isinstance(x, torch.Tensor))


def narrow_operations(
    network: Any, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None
) -> pd.DataFrame:
    """Operations of one forward with a floating input or output narrower than float64.

    Returns
    -------
    DataFrame
        Columns operation, dtypes, n_calls, most calls first; empty for a true referee. Copies
        into float64 are exact and left out. What a fused kernel does inside is not seen.
    """
    found: Counter = Counter()
    network = getattr(network, "network", network)
    with _any_experts(network), _Narrow(found):
        forward(network, model_inputs(input_ids, attention_mask))
    rows = [(*key, n) for key, n in found.most_common()]
    return pd.DataFrame(rows, columns=["operation", "dtypes", "n_calls"])


@contextmanager
def _any_experts(network: nn.Module) -> Iterator[None]:
    """Eager experts for the while where weights are float64, which grouped kernels do not know."""
    wide = next(network.parameters()).dtype == torch.float64
    settable = wide and getattr(network, "_can_set_experts_implementation", bool)()
    before = network.config._experts_implementation if settable else None
    if settable:
        network.set_experts_implementation("eager")
    try:
        yield
    finally:
        if settable:
            network.set_experts_implementation(before)


def kept_tokens(inputs: Inputs) -> torch.Tensor:
    """[batch_size, seq_len], True where a token counts.

    Raises
    ------
    ValueError
        For a row without any; names it.
    """
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    for row in (~mask.any(-1)).nonzero().flatten().tolist():
        raise ValueError(f"`attention_mask` must keep a token in each row; row {row} has none")
    return mask


def exact_logits(network: nn.Module, ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first position, fp64 logits of a few positions) of a referee; ids [n] without pads.

    The body runs once and the head by pieces, so nothing of tokens × vocabulary is held.
    Between two pieces the network is as it was.
    """
    inputs = model_inputs(ids[None], None)
    body, taken = network.base_model, inspect.signature(network.forward).parameters
    rows = max(1, _CHUNK // network.config.get_text_config(decoder=True).vocab_size)
    if body is network or "logits_to_keep" not in taken or rows >= len(ids):
        yield 0, forward(network, inputs)[0]
        return
    kept: list[Any] = []
    run = body.forward

    def once(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(run(*args, **kwargs))
        return kept[0]

    for start in range(0, len(ids), rows):
        piece = torch.arange(start, min(start + rows, len(ids)))
        with patch.object(body, "forward", once):
            logits = forward(network, inputs | {"logits_to_keep": piece})[0]
        yield start, logits
