"""The parts of any decoder-only model: its layers, and the attention, MLP and norms in them."""

import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from types import FunctionType

from torch import nn

Place = int | tuple[int, str]  # a layer's stream, or (layer, part)

# Read in this order, in the attribute's name first, then in the class's.
_KINDS = {
    "norm": r"norm|^ln",
    "attention": r"att|mixer|mamba|ssm|conv|delta|recurrent",
    "mlp": r"mlp|feed_?forward|ff|moe|expert|^fc\d$",
}


def decoder_layers(network: nn.Module) -> nn.ModuleList:
    """The decoder layers: the outermost ModuleList as long as the config's num_hidden_layers.

    Raises
    ------
    ValueError
        When there is none, with the ModuleLists that there are; one block is used twice; or
        this is no Hugging Face model.
    """
    if not hasattr(network, "config"):
        raise ValueError(f"a Hugging Face model is needed; got {type(network).__name__}")
    lists = {name: m for name, m in network.named_modules() if isinstance(m, nn.ModuleList)}
    config = network.config
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    wanted = config.num_hidden_layers
    fitting = [name for name, m in lists.items() if len(m) == wanted]
    if not fitting:
        sizes = ", ".join(f"{name}: {len(m)}" for name, m in lists.items()) or "none"
        raise ValueError(
            f"{type(network).__name__} must hold a ModuleList of num_hidden_layers={wanted}; "
            f"it has {sizes}"
        )
    layers = lists[min(fitting, key=lambda name: name.count("."))]
    if len(set(map(id, layers))) < len(layers):
        raise ValueError(
            f"{type(network).__name__} runs one block as several layers; what a hook sees of it "
            "belongs to no single layer, so its layers cannot be told apart"
        )
    return layers


def paired_layers(
    reference: nn.Module, candidate: nn.Module, layer_map: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Reference layer -> candidate layer, the embedding (0) included.

    Raises
    ------
    ValueError
        When the layer counts differ without a `layer_map`, or the map does not rise.
    """
    n_reference, n_candidate = (len(decoder_layers(m)) for m in (reference, candidate))
    if layer_map is None:
        if n_candidate != n_reference:
            raise ValueError(
                f"`candidate` has {n_candidate} layers and `reference` {n_reference}; pass "
                "`layer_map={candidate_layer: reference_layer, ...}`, both counted from 1"
            )
        return {i: i for i in range(n_reference + 1)}
    items = list(layer_map.items())
    rising = all(a < c and b < d for (a, b), (c, d) in pairwise(items))
    inside = all(1 <= a <= n_candidate and 1 <= b <= n_reference for a, b in items)
    if not (items and rising and inside):
        raise ValueError(
            f"`layer_map` must rise from 1 to at most {n_candidate} (candidate) and {n_reference} "
            f"(reference); got {dict(layer_map)}"
        )
    return {0: 0} | {b: a for a, b in items}


def parts_of(network: nn.Module) -> dict[Place, nn.Module]:
    """(layer, part) -> module, for the children of each block that hold weights, and the last norm.

    A part is called "attention" or "mlp" where a block has one of them, else by its own name as
    well ("mlp fc1"); a norm always ("norm input_layernorm"). What has no telling name is a generic
    "block <name>". The norm before the head is (n_layers + 1, "norm final").

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    >>> [part for _, part in parts_of(model)]
    ['norm ln_1', 'attention', 'norm ln_2', 'mlp', 'norm final']
    """
    layers = decoder_layers(network)
    found: dict[Place, nn.Module] = {}
    for i, block in enumerate(layers, 1):
        children = [(n, m, _kind(n, m)) for n, m in block.named_children() if m.state_dict()]
        often = Counter(kind for _, _, kind in children)
        for name, module, kind in children:
            alone = often[kind] == 1 and kind in ("attention", "mlp")
            found[i, kind if alone else f"{kind} {name}"] = module
    for parent in network.modules():
        if any(child is layers for child in parent.children()):
            norms = [m for name, m in parent.named_children() if _kind(name, m) == "norm"]
            found |= {(len(layers) + 1, "norm final"): m for m in norms[-1:]}
    return found


def compiled_parts(network: nn.Module) -> list[str]:
    """Names of the modules whose code torch.compile replaced; "" is the whole network."""
    return [
        name.removesuffix("_orig_mod").rstrip(".")
        for name, module in network.named_modules()
        if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        or module.__dict__.get("_compiled_call_impl") is not None
        or name.endswith("_orig_mod")
    ]


def patched(network: nn.Module) -> str:
    """The first module with a plain function in place of one of its methods; "" for none.

    deepcopy hands such a function over as it is: it goes on running the original.
    """
    return next(
        (
            name or type(module).__name__
            for name, module in network.named_modules()
            for own, value in vars(module).items()
            if isinstance(value, FunctionType) and hasattr(type(module), own)
        ),
        "",
    )


def _kind(name: str, module: nn.Module) -> str:
    for text in (name.lower(), type(module).__name__.lower()):
        for kind, pattern in _KINDS.items():
            if re.search(pattern, text):
                return kind
    return "block"
