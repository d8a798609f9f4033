"""What each layer keeps while a model generates: the shape of every stored tensor, per token."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import asdict, dataclass, replace

import pandas as pd

from lossless_lab.kv_cache import configs
from lossless_lab.kv_cache.checks import require
from lossless_lab.kv_cache.facts import FACTS
from lossless_lab.kv_cache.sizes import CannotEstimate, field, needed
from lossless_lab.kv_cache.states import State, states
from lossless_lab.results import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One cached thing of one layer; a parallel hybrid has two of the same index."""

    index: int
    kind: str  # full | sliding | chunked | latent | indexer | cross | state
    n_kv_heads: int = 0
    key_dim: int = 0  # elements per token and head
    value_dim: int = 0
    window: int | None = None  # tokens that can be attended to
    expanded: tuple[int, int, int] | None = None  # heads, key and value width once decompressed
    states: tuple[State, ...] = ()

    @property
    def elements(self) -> int:
        """Elements stored per token."""
        return self.n_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What else of a model its memory depends on."""

    hidden_size: int
    vocab_size: int
    encoder_len: int | None  # positions of the encoder where the config fixes them
    context_limit: int | None  # tokens that the model was made for, where the file says so
    n_mtp_layers: int  # layers of its own that predict further tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry(Result):
    """What a model stores, layer by layer, free of any engine."""

    model_type: str
    layers: tuple[Layer, ...]
    n_layers: int
    n_heads: int
    outline: Outline
    assumed: tuple[tuple[str, int | str], ...]  # fields the file leaves to the class's defaults

    def of_kind(self, *kinds: str) -> tuple[Layer, ...]:
        """The layers of these kinds."""
        return tuple(layer for layer in self.layers if layer.kind in kinds)

    def groups(self) -> list[tuple[Layer, int]]:
        """Layers that store alike: the first of each group, and how many they are."""
        found: dict[tuple, list] = {}
        for x in self.layers:
            alike = (x.kind, x.n_kv_heads, x.key_dim, x.value_dim, x.window, x.expanded, x.states)
            found.setdefault(alike, [x, 0])[1] += 1
        return [(layer, n) for layer, n in found.values()]

    def without_windows(self) -> Geometry:
        """The same model with every window and chunk kept in full."""
        return replace(self, layers=tuple(replace(x, window=None) for x in self.layers))

    def mtp_layers(self) -> tuple[Layer, ...]:
        """What the model's own multi-token prediction keeps: as much as its last attention."""
        attention = self.of_kind("full", "latent", "indexer")
        last = max((layer.index for layer in attention), default=None)
        return tuple(x for x in attention if x.index == last) * self.outline.n_mtp_layers

    def to_frame(self) -> pd.DataFrame:
        """One row per cached thing."""
        return pd.DataFrame([asdict(layer) for layer in self.layers])

    def __str__(self):
        counts = Counter(layer.kind for layer in self.layers)
        kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "no cache"
        return f"{self.model_type}: {self.n_layers} layers ({kinds})"


def geometry(config) -> Geometry:
    """Describe what every layer of a model stores, from its config alone.

    Parameters
    ----------
    config : dict, str, Path, transformers config or model
        A config.json as dict or file, a folder, a Hub id, a bundled name, or a loaded model.

    Returns
    -------
    Geometry
        One `Layer` per cached thing, with K and V widths in elements per token and head.

    Raises
    ------
    CannotEstimate
        If the family is unknown, a field is missing, or two fields contradict each other.

    Source: transformers 5.24, each family's configuration and modelling files. What a file leaves
    out has its configuration class's default, and `assumed` lists it.

    Examples
    --------
    >>> g = geometry({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
    ...               "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 32})
    >>> [layer.elements for layer in g.layers]   # 2 heads x (32 + 32)
    [128, 128]
    """
    return _of_name(config) if config in configs.names() else _describe(config)


def _describe(config):
    """The geometry of anything that `configs.resolve` can read."""
    family, outer, text, assumed, fields = configs.resolve(config)
    said = f"model_type {text.model_type!r}"
    refused = FACTS["refused"].get(text.model_type)
    require(refused is None, f"{said}: {refused}", CannotEstimate)
    named = _generates(outer, text)
    require(named, f"{said} is not one of transformers' text generators", CannotEstimate)
    layers = tuple(_layers(text))
    if outer.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        layers += tuple(_attention(text, x.index, "cross") for x in layers if x.kind != "state")
    stated = {"max_position_embeddings", text.attribute_map.get("max_position_embeddings")}
    mtp = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    outline = Outline(
        hidden_size=field(text, "hidden_size", "d_model", default=0),
        vocab_size=field(text, "vocab_size", default=0), n_mtp_layers=field(text, *mtp, default=0),
        encoder_len=field(text, "max_source_positions"),
        context_limit=next((fields[name] for name in stated if fields.get(name)), None),
    )  # fmt: skip
    return Geometry(
        model_type=family, layers=layers, n_layers=len(_layer_types(text)), outline=outline,
        n_heads=field(_of_layer(text, 0), *_HEADS, default=0), assumed=tuple(assumed.items()),
    )  # fmt: skip


_of_name = functools.cache(_describe)


def _generates(outer, text):
    """Whether transformers generates with this class; an encoder keeps no cache."""
    from transformers.models.auto import modeling_auto as auto

    encodes = hasattr(text, "add_cross_attention") and not getattr(text, "is_decoder", True)
    if encodes and not outer.is_encoder_decoder:
        return text.model_type.endswith("_decoder")
    tasks = "CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM IMAGE_TEXT_TO_TEXT SPEECH_SEQ_2_SEQ MULTIMODAL_LM"
    tables = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in tasks.split()]
    named = any(name in table for table in tables for name in (outer.model_type, text.model_type))
    return named or (outer is text and text.model_type.endswith(("_text", "_text_model")))


_HEADS = ("num_decoder_attention_heads", "num_attention_heads", "num_heads", "n_heads")


def _of_layer(text, index):
    """The config as this layer sees it, where the class lets layers differ."""
    layered = getattr(text, "per_layer_config", None)
    return layered[index] if layered and index < len(layered) else text


def _layer_types(text):
    """One cache type per layer: the class's own list, else what its window fields imply."""
    types = getattr(text, "layer_types", None)
    if types is None:
        n_layers = needed(text, "num_decoder_layers", "num_hidden_layers")
        kind = "full_attention" if field(text, *_HEADS) else "linear_attention"
        if getattr(text, "sliding_window", None) is not None:
            kind = "sliding_attention"
        elif getattr(text, "attention_chunk_size", None) is not None:
            kind = "chunked_attention"
        types = [kind] * n_layers
    modes = getattr(text, "kv_sharing_modes", None) or [None] * len(types)
    heads = getattr(text, "kv_heads_by_layer", list(types))
    listed = isinstance(heads, list) and len(heads) == len(types)
    require(listed, f"the KV heads of {len(types)} layers are {heads!r:.80}", CannotEstimate)
    layers = zip(types, modes, heads, strict=True)
    return ["shared" if mode == "reuse" or not n else kind for kind, mode, n in layers]


_ATTENTION = {
    "full_attention": "full", "indexed_attention": "full", "hybrid": "full",
    "sliding_attention": "sliding", "hybrid_sliding": "sliding", "chunked_attention": "chunked",
}  # fmt: skip
_STATES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")


def _layers(text):
    """The cached things of every decoder layer, in order."""
    crossed = getattr(text, "cross_attention_layers", None) or ()
    for index, kind in enumerate(_layer_types(text)):
        said = f"no rule for layer {index} of {text.model_type!r}: {kind!r}"
        ruled = kind in (*_ATTENTION, *_STATES, "moe", "mlp", "shared")
        require(ruled, said, CannotEstimate)
        if kind in _ATTENTION:
            yield _attention(text, index, "cross" if index in crossed else _ATTENTION[kind])
        if kind in _STATES:
            yield Layer(index=index, kind="state", states=states(text))
        own = (field(text, "indexer_types") or {}) and text.indexer_types[index]
        if kind == "indexed_attention" and own != "shared":
            yield Layer(index=index, kind="indexer", n_kv_heads=1, key_dim=text.index_head_dim)


def _attention(text, index, kind):
    """K and V of one attention layer, MLA's latent where the model compresses them."""
    config = _of_layer(text, index)
    windows = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
    window = needed(config, windows[kind]) if kind in windows else None
    layer = {"index": index, "kind": kind, "window": window}
    if rank := field(config, "kv_lora_rank"):
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        layer["kind"] = "latent" if kind == "full" else kind
        layer["expanded"] = (config.num_attention_heads, nope + rope, config.v_head_dim)
        return Layer(n_kv_heads=1, key_dim=rank, value_dim=rope, **layer)
    key_dim = _head_dim(config, kind)
    value_dim = field(config, "v_head_dim", default=key_dim)
    if field(config, "new_decoder_architecture"):  # Falcon: transformers repeats K and V
        layer["expanded"] = (config.num_attention_heads, key_dim, value_dim)
    heads = getattr(text, "kv_heads_by_layer", None)
    heads = heads[index] if heads else _kv_heads(config, kind)
    said = f"layer {index} has {needed(config, *_HEADS)} attention heads, no multiple of {heads}"
    whole = heads > 0 and needed(config, *_HEADS) % heads == 0
    require(whole, f"{said} KV heads", CannotEstimate)
    return Layer(n_kv_heads=heads, key_dim=key_dim, value_dim=value_dim, **layer)


def _kv_heads(config, kind):
    """KV heads of a layer, whatever the family calls them."""
    family = config.model_type
    heads = needed(config, *_HEADS)
    if family == "falcon" and config.new_decoder_architecture:
        return config.num_kv_heads
    if family in ("falcon", "gpt_bigcode"):
        return 1 if config.multi_query else heads
    if family == "mpt" and "multiquery" in config.attn_config.attn_type:
        return 1
    if family == "dbrx":
        return config.attn_config.kv_n_heads
    if family == "mimo_v2_flash" and kind == "sliding":
        return 2 * config.num_key_value_heads
    return field(config, "num_key_value_heads", default=heads)


def _head_dim(config, kind):
    """Width of one head, explicit where the config states it."""
    if kind == "full" and field(config, "global_head_dim"):
        return config.global_head_dim
    if stated := field(config, "head_dim", "d_kv", "kv_channels"):
        return stated
    width = needed(config, "hidden_size", "d_model", "n_embd")
    heads = needed(config, *_HEADS)
    said = f"`head_dim` is missing and `hidden_size` {width} is no multiple of the {heads} heads"
    require(width % heads == 0, said, CannotEstimate)
    return width // heads
