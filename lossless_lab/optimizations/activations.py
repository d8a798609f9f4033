"""Activations in 8 bits: simulated with scales found anew or calibrated, and torchao's kernels."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import nn

from lossless_lab.number_formats import Format, GgufFormat
from lossless_lab.optimizations.entry import VACUOUS, Optimization, copied
from lossless_lab.optimizations.quantization import linears, quantized
from lossless_lab.optimizations.witness import Observation

STEPS = 127  # of int8 on either side of zero
_KEPT = 4096  # values of one module and one document that scales are calibrated on
_CLIPS = torch.logspace(-2, 0, 60)  # shares of the largest value that "least error" tries


def dynamic(weights: str | Format | GgufFormat = "int8-channel") -> Optimization:
    """Weights in a format, inputs of linear layers in int8, the scale of each token found anew.

    Simulated; claims level 2 where the weights have 8 bits, else 3.
    """
    return _entry(weights, None)


def static(
    scales: Mapping[str, float], weights: str | Format | GgufFormat = "int8-channel"
) -> Optimization:
    """The same with one scale for each layer, as `calibrate` finds it.

    What lies beyond 127 steps saturates; the witness tells how much did.
    """
    return _entry(weights, scales)


def calibrate(
    network: nn.Module,
    rows: Sequence[Sequence[int]],
    *,
    percentile: float = 99.9,
) -> pd.DataFrame:
    """int8 scales of the inputs of linear layers from texts, by three rules.

    Parameters
    ----------
    network : causal language model, or result of `load`.
    rows : token ids of the calibration documents, apart from those that are judged on.
    percentile : of |x|, that the rule of that name puts on the last step.

    Returns
    -------
    DataFrame
        One row per layer: scales named "min-max" (the largest |x| on the last step), "percentile"
        and "least error" (the clip with the least squared error, values beyond it included).
    """
    if not 0 < percentile <= 100:
        raise ValueError(f"`percentile` must be above 0 and at most 100; got {percentile}")
    network = getattr(network, "network", network)
    found = list(linears(network))
    seen: dict[str, list[torch.Tensor]] = {name: [] for name, _ in found}
    largest = dict.fromkeys(seen, 0.0)

    def look(module: nn.Module, args: tuple, *, name: str) -> None:
        x = args[0].detach().abs().float().flatten()
        largest[name] = max(largest[name], float(x.max()))
        seen[name].append(x[:: max(1, len(x) // _KEPT)])

    with ExitStack() as hooks, torch.no_grad():
        for name, module in found:
            hooks.enter_context(module.register_forward_pre_hook(partial(look, name=name)))
        for row in rows:
            network(torch.tensor([list(row)], device=network.device), use_cache=False)
    table = {name: _scales(torch.cat(x), largest[name], percentile) for name, x in seen.items()}
    return pd.DataFrame(table, index=["min-max", "percentile", "least error"]).T


def _scales(x: torch.Tensor, largest: float, percentile: float) -> tuple[float, ...]:
    tries = _CLIPS * largest / STEPS
    errors = [float((x - _to_steps(x, scale=float(s))[0]).square().sum()) for s in tries]
    at = x.sort().values[min(len(x) - 1, int(len(x) * percentile / 100))]
    return largest / STEPS, float(at) / STEPS, float(tries[torch.tensor(errors).argmin()])


def _to_steps(x: torch.Tensor, *, scale: Any) -> tuple[torch.Tensor, int]:
    """x on its steps, and how many values lay beyond the last."""
    scale = torch.as_tensor(scale).clamp(min=torch.finfo(torch.float32).tiny)
    steps = (x.float() / scale).round()
    beyond = int((steps.abs() > STEPS).sum())
    return (steps.clamp(-STEPS, STEPS) * scale).to(x.dtype), beyond


def _entry(weights: str | Format | GgufFormat, scales: Mapping[str, float] | None) -> Optimization:
    base = quantized(weights)

    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        changed, settings = base.transform(network)
        for layer, module in linears(changed):
            if scales is not None and layer not in scales:
                raise ValueError(f"`scales` must have one for each layer; {layer} has none")
            module.rounded, scale = [0, 0], None if scales is None else float(scales[layer])
            module.register_forward_pre_hook(partial(_round_input, scale=scale))
        return changed, settings

    def witness(seen: Observation) -> str:
        counts = [getattr(m, "rounded", (0, 0)) for _, m in linears(seen.network)]
        n, beyond = (sum(column) for column in zip(*counts, strict=True))
        of_weights = base.witness(seen).removeprefix(VACUOUS)
        share = f"{100 * beyond / max(n, 1):.2g} % of them saturated"
        return f"{n} inputs of {len(counts)} layers rounded, {share}; {of_weights}" if n else ""

    kind = "dynamic" if scales is None else "static"
    name = f"{base.name}-act-int8-{kind}"
    return Optimization(name=name, level=base.level, transform=transform, witness=witness)


def _round_input(module: nn.Module, args: tuple, *, scale: float | None) -> tuple[torch.Tensor]:
    (x,) = args
    of_token = x.abs().amax(-1, keepdim=True).float() / STEPS
    rounded, beyond = _to_steps(x, scale=of_token if scale is None else scale)
    module.rounded = [module.rounded[0] + x.numel(), module.rounded[1] + beyond]
    return (rounded,)


def torchao(kind: str) -> Optimization:
    """torchao's own kernels: "int8-weight-only", "int8-dynamic", "int4-weight-only".

    Real: weights are packed, and the last takes a network in bfloat16. Embeddings and head stay.
    """

    def transform(network: nn.Module) -> tuple[nn.Module, dict]:
        from torchao.quantization import quantize_

        if kind == "int4-weight-only" and network.dtype != torch.bfloat16:
            raise ValueError(f"`network` must be in bfloat16 for {kind}; it is in {network.dtype}")
        changed = copied(network)
        layers = {id(m) for _, m in linears(changed) if isinstance(m, nn.Linear)}
        if not layers:
            raise ValueError("`network` has no torch.nn.Linear besides its head")
        quantize_(changed, _torchao_config(kind), filter_fn=lambda module, _: id(module) in layers)
        return changed, {}

    def witness(seen: Observation) -> str:
        weights = [m.weight for _, m in linears(seen.network)]
        packed = [w for w in weights if hasattr(w, "__tensor_flatten__")]
        if not packed:
            return ""
        bits = 8 * sum(map(_bytes, packed)) / sum(w.numel() for w in packed)
        kinds = ", ".join(sorted({type(w).__name__ for w in packed}))
        return f"{len(packed)} of {len(weights)} layers {kinds}, {bits:.4g} bits per weight stored"

    return Optimization(
        name=f"torchao-{kind}",
        level="3" if kind.startswith("int4") else "2",
        transform=transform,
        witness=witness,
        needs="torchao",
    )


def _torchao_config(kind: str) -> Any:
    from torchao import quantization
    from torchao.dtypes import Int4CPULayout

    int4 = {"group_size": 32, "layout": Int4CPULayout(), "version": 1}
    return {
        "int8-weight-only": quantization.Int8WeightOnlyConfig,
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "int4-weight-only": partial(quantization.Int4WeightOnlyConfig, **int4),
    }[kind]()


def _bytes(tensor: Any) -> int:
    """Bytes of what a packed tensor really holds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.element_size()
    return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


ENTRIES = (
    dynamic(),
    dynamic("int4-group32"),
    *map(torchao, ("int8-weight-only", "int8-dynamic", "int4-weight-only")),
)
