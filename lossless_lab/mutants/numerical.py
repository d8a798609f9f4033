"""Faults of the numerical level: windows, caches, scales, norms, weights, NaN, state; the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lossless_lab.mutants.masks import attentions, future_key, previous_key, reweigh, visible_pads
from lossless_lab.mutants.mutant import Mutant, NotApplicable
from lossless_lab.mutants.positions import change_rope_base, shift_positions

NAN_POSITION = 5
FP16_MAX = 65504.0


def move_window(by: int) -> Callable[[nn.Module, float], int]:
    """`dose` keys more (by = 1) or fewer (by = -1) in each sliding window."""

    def edit(network: nn.Module, dose: float) -> int:
        config = network.config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        width = getattr(config, "sliding_window", None)
        if not (width and "sliding_attention" in kinds):
            raise NotApplicable("`network` has no sliding window")
        if dose != int(dose):
            raise ValueError(f"`dose` must be whole keys; got {dose:g}")
        if width + by * dose < 1:
            raise NotApplicable(f"`network` has no window to lose {dose:g} keys: it has {width}")
        config.sliding_window += by * int(dose)
        return 1

    return edit


def repeat_newest_row(network: nn.Module, dose: float) -> int:
    """Before each pass the newest cached key and value move by `dose` towards those before."""

    def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        layers = (x for x in getattr(cache, "layers", ()) if getattr(x, "keys", None) is not None)
        for layer in layers:
            n = int(layer.get_seq_length()) if layer.is_initialized else 0
            for rows in (layer.keys, layer.values) if n > 1 else ():
                n = min(n, rows.shape[-2])
                rows[..., n - 1, :].lerp_(rows[..., n - 2, :], dose)

    network.register_forward_pre_hook(hook, with_kwargs=True)
    return len(attentions(network))


def keep_state(network: nn.Module, dose: float) -> int:
    """Logits move by `dose` towards the last ones of the call before."""

    def hook(module: nn.Module, _: tuple, output: Any) -> Any:
        kept, logits = getattr(module, "_kept_logits", None), output.logits
        module._kept_logits = logits[0, -1].detach().clone()
        if kept is not None:
            output.logits = logits.lerp(kept.to(logits).expand_as(logits), dose)
        return output

    network.register_forward_hook(hook)
    return 1


def untie_head(network: nn.Module, dose: float) -> int:
    """The output matrix leaves the input's and gains noise of `dose` times its RMS."""
    head = network.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    _add_noise(head.weight, dose)
    return 1


def exchange_rows(network: nn.Module, dose: float) -> int:
    """A share `dose` of the input embedding's rows, one pair or more, exchanged in pairs."""
    table = network.get_input_embeddings()
    if round(dose * table.num_embeddings) == 0:
        return 0
    rows = torch.randperm(table.num_embeddings, generator=torch.Generator().manual_seed(0))
    half = max(1, round(dose * len(rows) / 2))
    a, b = rows[:half], rows[half : 2 * half]
    weight = table.weight.detach().clone()  # of its own: a tied output matrix keeps its rows
    weight[a], weight[b] = weight[b], weight[a]
    table.weight = nn.Parameter(weight)
    return half


def change_scale(block: nn.Module, dose: float) -> int:
    """Attention logits times 1 + dose."""
    found = [m for m in block.children() if isinstance(getattr(m, "scaling", None), float)]
    for module in found:
        module.scaling *= 1 + dose
    return len(found)


def set_eps(block: nn.Module, dose: float) -> int:
    """The eps of the block's norms becomes `dose`."""
    found = [
        (module, name)
        for module in block.modules()
        for name in {"eps", "variance_epsilon"} & set(vars(module))
    ]
    if found and all(math.isclose(getattr(m, name), dose, rel_tol=1e-6) for m, name in found):
        raise NotApplicable(f"`network` has norms whose eps is {dose:g} already")
    for module, name in found:
        setattr(module, name, dose)
    return len(found)


def drop_residual(block: nn.Module, dose: float) -> int:
    """The block's output lacks `dose` times its input."""

    def hook(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        return _stream(output, lambda h: h - dose * x)

    block.register_forward_hook(hook, with_kwargs=True)
    return 1


def write_nan(block: nn.Module, dose: float) -> int:
    """The first `dose` features of the block's output are NaN at position NAN_POSITION.

    Blocks that are told no positions count those of their pass.
    """

    def hook(_: nn.Module, __: tuple, kwargs: dict, output: Any) -> Any:
        def poison(h: torch.Tensor) -> torch.Tensor:
            positions = kwargs.get("position_ids")
            if positions is None:
                positions = torch.arange(h.shape[1], device=h.device)
            here = (positions == NAN_POSITION)[..., None]
            features = torch.arange(h.shape[-1], device=h.device) < dose
            return h.masked_fill(here & features, math.nan)

        return _stream(output, poison)

    block.register_forward_hook(hook, with_kwargs=True)
    return 1


def overflow_mlp(block: nn.Module, dose: float) -> int:
    """MLP outputs that times `dose` pass fp16's largest number become infinite."""

    def overflowing(h: torch.Tensor) -> torch.Tensor:
        return torch.where(h.abs() > FP16_MAX / dose, h * math.inf, h)

    found = [module for name, module in block.named_children() if name.endswith("mlp")]
    for module in found:
        module.register_forward_hook(lambda _, __, output: _stream(output, overflowing))
    return len(found)


def damage_weights(block: nn.Module, dose: float) -> int:
    """Each matrix of the block gains noise of `dose` times its RMS."""
    found = [x for x in block.parameters() if x.dim() > 1 and x.is_floating_point()]
    for weight in found:
        _add_noise(weight, dose)
    return len(found)


def _add_noise(weight: torch.Tensor, dose: float) -> None:
    rng = torch.Generator().manual_seed(weight.numel())
    rms = float(weight.float().square().mean().sqrt())
    noise = torch.randn(weight.shape, generator=rng).mul_(dose * rms)
    weight.add_(noise.to(weight))


def _stream(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, torch.Tensor):
        return change(output)
    return (change(output[0]), *output[1:])


def _decades(first: float, n: int) -> tuple[float, ...]:
    """`n` doses, each a tenth of the one before.

    >>> _decades(1.0, 3)
    (1.0, 0.1, 0.01)
    """
    return tuple(float(f"{first * 10.0**-i:.6g}") for i in range(n))


_LOCAL, _GLOBAL = "layer-local", "global"
_ROWS = (
    ("positions", _GLOBAL, _decades(1, 10), "positions", shift_positions,
     "The position counter is one ahead after the prompt's start (transformers PR 29583)."),
    ("hidden-key", _GLOBAL, _decades(1, 10), "share of the weight",
     reweigh(previous_key, hide=True),
     "A mask shifted by one hides the key just before each query (transformers issue 30400)."),
    ("visible-pad", _GLOBAL, _decades(1, 24), "share of the weight", reweigh(visible_pads),
     "Pad columns, or unfilled cache slots, are read as text (transformers issue 30400)."),
    ("leak", _GLOBAL, _decades(1, 20), "share of the weight", reweigh(future_key),
     "A causal mask one diagonal too wide shows each query the next token."),
    ("stale-cache", _GLOBAL, _decades(1, 10), "share of the row", repeat_newest_row,
     "A cache entry is overwritten by its neighbour before it is read (llama.cpp issue 4902)."),
    ("state", _GLOBAL, _decades(1, 10), "share of the logits", keep_state,
     "A buffer of the call before is handed out again (transformers issue 34164)."),
    ("window-wide", _GLOBAL, (1.0,), "keys", move_window(1),
     "A sliding window keeps one key too many (transformers issue 37574)."),
    ("window-narrow", _GLOBAL, (2.0, 1.0), "keys", move_window(-1),
     "A sliding window rolls two steps early (transformers issue 37574)."),
    ("rope-base", _GLOBAL, _decades(9, 10), "relative change of the base", change_rope_base,
     "The default rotary base is used, not the config's (vllm PR 9503)."),
    ("untied-head", _GLOBAL, _decades(1, 10), "RMS of the weights", untie_head,
     "The output matrix is not tied to the embedding on loading (transformers PR 43429)."),
    ("exchanged-rows", _GLOBAL, _decades(1, 5), "share of the rows", exchange_rows,
     "Embedding rows are in another tokenizer's order."),
    ("attention-scale", _LOCAL, _decades(1, 10), "relative change of the scale", change_scale,
     "Attention is not scaled by 1/sqrt(head_dim) (karpathy/ng-video-lecture PR 6)."),
    ("eps-swapped", _LOCAL, _decades(1e-5, 2), "eps", set_eps,
     "A norm uses 1e-6 where the config says 1e-5, or the reverse (tvm PR 15856)."),
    ("eps-large", _LOCAL, _decades(100, 8), "eps", set_eps,
     "A norm uses an eps of another scale."),
    ("residual", _LOCAL, _decades(1, 10), "share of the residual", drop_residual,
     "The skip connection of one block is lost."),
    ("one-nan", _LOCAL, (1.0,), "features", write_nan,
     "One fully masked row divides zero by zero (pytorch issue 103749)."),
    ("overflow", _LOCAL, tuple(4.0**i for i in range(10, -1, -1)), "activation scale",
     overflow_mlp, "An MLP trained in bf16 passes 65,504 in fp16 (transformers PR 10956)."),
    ("damaged-weights", _LOCAL, _decades(0.1, 9), "RMS of the weights", damage_weights,
     "One layer is loaded from a damaged or wrongly scaled shard."),
)  # fmt: skip

MUTANTS: dict[str, Mutant] = {
    name: Mutant(name=name, kind=kind, doses=doses, unit=unit, imitates=imitates, edit=edit)
    for name, kind, doses, unit, edit, imitates in _ROWS
}
