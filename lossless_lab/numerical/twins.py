"""Equivalent twins: checkpoints that compute the same function with its sums in another order."""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .capture import model_inputs
from .float64 import exact_logits, kept_tokens, plain_copy, referee

KINDS = ("hidden", "mlp", "kv_groups")

# What a dimension of a weight counts. "o" is what attention writes and "down" what an MLP writes;
# "neuron" stands on both sides of an MLP without a gate.
_KIND_OF = {
    "hidden": "hidden",
    **dict.fromkeys(("gate", "up", "down", "neuron"), "mlp"),
    **dict.fromkeys(("q", "k", "v", "o"), "kv_groups"),
}
# Name of a weight -> (rows, columns) as in nn.Linear. "a|b" stand one after the other, "q,k,v"
# head by head; None is left as it is. The longer name goes first.
_WEIGHTS: dict[str, tuple[str | None, str | None]] = {
    name: tuple(roles)
    for names, roles in json.loads(Path(__file__).with_name("weights.json").read_text()).items()
    for name in names.split()
}

Change = Callable[[str, str, torch.Tensor], torch.Tensor]


def twin(model: Any, *, seed: int, kinds: Collection[str] = KINDS) -> nn.Module:
    """A copy with permuted units: f(x) = W₂ σ(W₁ x) = (W₂ Pᵀ) σ(P W₁ x), sums in another order.

    Its logits differ from the model's by rounding alone, in any engine that can load it: the
    spread over twins is a noise floor even where nothing can be seen inside.

    Warning: quantising a twin changes which weights share a group, and so the format's own error;
    make twins of what was dequantised, never quantise them.

    Parameters
    ----------
    model : decoder-only Hugging Face model, or a result of `load`; left as it is.
    seed : int
    kinds : any of "hidden" (units of the residual stream: embeddings, norms, whatever reads or
        writes it), "mlp" (neurons, expert by expert alike), "kv_groups" (KV heads with their
        query heads, and query heads inside a group).

    Returns
    -------
    nn.Module
        In eval mode, with the same config: `save_pretrained` makes a folder like any other.

    Raises
    ------
    ValueError
        For a weight that no rule covers, of another size or outside the parameters (quantised,
        pruned), and for a patched module: the function is not known.
        Known are Llama, Mistral, Qwen2, Qwen3, Gemma to Gemma 3, Phi3, OLMo2, Mixtral, Qwen2-MoE,
        GPT-2, GPT-NeoX, OPT and what names its weights as they do; check others by
        `distance_in_float64`.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    ...          "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> distance_in_float64(model, twin(model, seed=0), torch.tensor([[1, 5, 2]])) < 1e-12
    True
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"`kinds` must be among {', '.join(KINDS)}; got {', '.join(unknown)}")
    network = plain_copy(model)
    n_heads, n_kv_heads, head_dim = _heads(network)
    generator = torch.Generator().manual_seed(seed)
    orders: dict[tuple[str, str], torch.Tensor] = {}

    def order(kind: str, owner: str, n: int) -> torch.Tensor:
        key = (kind, "" if kind == "hidden" else owner)
        if key not in orders:
            orders[key] = torch.argsort(torch.rand(n, generator=generator), dim=-1)
        return orders[key]

    def heads(owner: str, of_queries: bool) -> torch.Tensor:
        """Old index of each new row; query heads follow their group, in an order of their own."""
        groups = order("groups", owner, n_kv_heads)
        if of_queries:
            each = n_heads // n_kv_heads
            inside = [order(f"inside {g}", owner, each) for g in range(n_kv_heads)]
            groups = torch.cat([g * each + inside[g] for g in groups.tolist()])
        return (groups[:, None] * head_dim + torch.arange(head_dim)).flatten()

    def permuted(owner: str, role: str, part: torch.Tensor) -> torch.Tensor:
        kind = _KIND_OF[role]
        if kind not in kinds:
            return part
        chosen = heads(owner, role in "qo") if role in "qkvo" else order(kind, owner, len(part))
        return part[chosen.to(part.device)]

    return _rewritten(network, permuted)


def rescaled_twin(model: Any, *, seed: int) -> nn.Module:
    """A copy with values scaled by 2^k and what reads them by 2^−k: bitwise the same logits.

    Values of attention against its output projection and, in gated MLPs, `up` against `down`; k
    from −3 to 3 for each unit. A difference means that an engine rounds by more than the exponent
    allows, as quantised or fixed-point arithmetic does. Warning as for `twin`.

    Raises
    ------
    ValueError
        As for `twin`, and where scaling a weight is not exact (tiny ones in float16).
    """
    network = plain_copy(model)
    n_heads, n_kv_heads, head_dim = _heads(network)
    generator = torch.Generator().manual_seed(seed)
    exponents: dict[tuple[str, str], torch.Tensor] = {}

    def scaled(owner: str, role: str, part: torch.Tensor) -> torch.Tensor:
        if role not in ("v", "o", "up", "down"):
            return part
        key = (owner, "v" if role in "vo" else "up")
        n = n_kv_heads * head_dim if role in "vo" else len(part)
        if key not in exponents:
            exponents[key] = torch.randint(-3, 4, (n,), generator=generator)
        k = exponents[key] if role in ("v", "up") else -exponents[key]
        if role == "o":
            k = k.view(n_kv_heads, 1, head_dim).expand(-1, n_heads // n_kv_heads, -1).flatten()
        scale = (2.0**k).to(part).view(-1, *[1] * (part.ndim - 1))
        if not torch.equal(part * scale / scale, part):
            raise ValueError(
                f"`model` must have weights whose scaling by 2^±3 is exact; `{role}` of {owner} "
                f"leaves the range of {part.dtype}"
            )
        return part * scale

    return _rewritten(network, scaled)


def distance_in_float64(
    model: Any,
    twin: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
) -> float:
    """Largest |logit difference| of the two fp64 runs; at most about 1e-12 for a twin.

    Returns
    -------
    float
        NaN where a logit is not finite.
    """
    exact = [referee(side) for side in (model, twin)]
    inputs = model_inputs(input_ids, attention_mask)
    largest = [
        (x - y).abs().max()
        for ids, kept in zip(inputs["input_ids"], kept_tokens(inputs), strict=True)
        for (_, x), (_, y) in zip(*(exact_logits(side, ids[kept]) for side in exact), strict=True)
    ]
    return float(torch.stack(largest).max())


def _hooks(module: nn.Module) -> list[Callable]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _heads(network: nn.Module) -> tuple[int, int, int]:
    config = network.config.get_text_config(decoder=True)
    n_heads = config.num_attention_heads
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    return n_heads, n_kv_heads, getattr(config, "head_dim", None) or config.hidden_size // n_heads


def _rewritten(network: nn.Module, change: Change) -> nn.Module:
    """The network with every dimension of every weight changed in place, part by part."""
    n_heads, n_kv_heads, head_dim = _heads(network)
    known = {
        "hidden": network.config.get_text_config(decoder=True).hidden_size,
        **dict.fromkeys("qo", n_heads * head_dim),
        **dict.fromkeys("kv", n_kv_heads * head_dim),
    }
    for name, module in network.named_modules():
        tables = [n for n, x in module.named_buffers(recurse=False) if x.ndim > 1]
        if "forward" in vars(module):
            raise ValueError(f"`model` must not be patched; `{name}` carries a forward of its own")
        if any(not hook.__module__.startswith("transformers.") for hook in _hooks(module)):
            raise ValueError(
                f"`model` must have no forward hooks; `{name or type(network).__name__}` has one, "
                "which does not know the new order of the units"
            )
        if tables and module.get_buffer(tables[0]).dtype != torch.bool:
            raise ValueError(
                f"`model` must keep its weights in parameters; `{name}` has a buffer "
                f"`{tables[0]}`: no twin of what it is part of"
            )
    for name, weight in network.named_parameters():  # tied ones come once
        for axis, owner, layout in _axes(network, name, head_dim):
            data, roles = weight.data.movedim(axis, 0), layout.replace(",", "|").split("|")
            sizes = [known.get(role, len(data) // len(roles)) for role in roles]
            if sum(sizes) != len(data):
                raise ValueError(
                    f"`model` must have {sum(sizes)} {layout} in `{name}`; got {len(data)}: "
                    "its architecture is not known here"
                )
            by_head = (n_heads, 3, head_dim) if "," in layout else (len(data), 1, 1)
            data = data.unflatten(0, by_head).transpose(0, 1).flatten(0, 2)
            parts = zip(roles, data.split(sizes), strict=True)
            data = torch.cat([change(owner, role, part) for role, part in parts])
            data = data.unflatten(0, (by_head[1], by_head[0], by_head[2])).transpose(0, 1)
            weight.data = data.flatten(0, 2).movedim(0, axis).contiguous()
    return network


def _axes(network: nn.Module, name: str, head_dim: int) -> Iterator[tuple[int, str, str]]:
    """(axis, path of the attention or MLP, what the axis counts) of one weight."""
    path, _, last = name.rpartition(".")
    weight, vector = network.get_parameter(name), last == "bias"
    transposed = last == "weight" and type(network.get_submodule(path)).__name__ == "Conv1D"
    if last in ("weight", "bias"):
        path, _, last = path.rpartition(".")
    if weight.ndim == 1 and ("norm" in last or last.startswith("ln_")):
        per_head = last[:2] in ("q_", "k_")
        if not (per_head and len(weight) == head_dim):  # one for all heads stays as it is
            yield 0, path, last[0] if per_head else "hidden"
        return
    roles = _WEIGHTS.get(f"{path.rpartition('.')[2]}.{last}", _WEIGHTS.get(last))
    if roles is None:
        raise ValueError(
            f"`model` must have weights of known names; `{name}` of {type(network).__name__} is "
            "not: no twin of this architecture"
        )
    siblings = dir(network.get_submodule(path))
    gated = "gate_proj" in siblings or "gate_up_proj" in siblings
    axes = (0,) if vector else (-1, -2) if transposed else (-2, -1)
    for axis, role in zip(axes, roles, strict=False):  # a bias has rows only
        if role:
            yield axis, path, role if gated or role not in ("up", "down") else "neuron"
