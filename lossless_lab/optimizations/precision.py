"""Casts of the whole network to a narrower floating-point dtype."""

import torch
from torch import nn

from lossless_lab.optimizations.entry import WARNING, Optimization, copied
from lossless_lab.optimizations.witness import Observation


def cast(dtype: str) -> Optimization:
    """Weights and activations in `dtype` ("bfloat16", "float16"); claims level 2.

    >>> cast("bfloat16").changes
    ('dtype',)
    """

    if not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise ValueError(f"`dtype` must name a floating-point dtype of torch; got {dtype!r}")

    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        changed = copied(network).to(getattr(torch, dtype))
        _keep_computed_buffers(changed, network)
        return changed, {}

    def witness(seen: Observation) -> str:
        if seen.dtypes[:1] != (dtype,) or not set(seen.computed) <= {dtype}:
            return ""
        n = sum(int(p.isinf().sum()) for p in seen.network.parameters())
        beyond = f"; {WARNING}what finite weights give: {n} are beyond {dtype} and became inf"
        return f"parameters in {dtype}" + beyond * bool(n)

    return Optimization(
        name=dtype, level="2", changes=("dtype",), transform=transform, witness=witness
    )


def _keep_computed_buffers(changed: nn.Module, original: nn.Module) -> None:
    """Buffers that no checkpoint stores stay as they were, as after loading in that dtype.

    Rounding rotary frequencies as `Module.to` does turns positions by angles that grow with them;
    on the tiny pair that alone made the logits' error four times as large.
    """
    stored = set(original.state_dict())
    with torch.no_grad():
        for name, buffer in original.named_buffers():
            if name not in stored:
                owner, _, own = name.rpartition(".")
                changed.get_submodule(owner).register_buffer(own, buffer.clone(), persistent=False)


ENTRIES = (cast("bfloat16"), cast("float16"))
