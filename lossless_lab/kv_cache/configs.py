"""Reading a config: file, dict, Hub id, bundled name or loaded model to one checked text config."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import logging
import os
import re
from pathlib import Path

import pandas as pd

from lossless_lab import paths

# Families that transformers does not know by this name but that store what a known class stores:
# model_type -> (class to read it with, {field in the file: field of the class}). Facts from each
# family's own configuration_*.py on the Hub.
_LLAMA_LIKE = (
    "aquila baichuan bailing_moe deepseek internlm internlm2 minicpm orion xverse yi stablelm_epoch"
)
_CHATGLM = {
    "num_layers": "num_hidden_layers", "kv_channels": "head_dim",
    "multi_query_group_num": "num_key_value_heads", "padded_vocab_size": "vocab_size",
}  # fmt: skip
_FALCON = {
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads",
}  # fmt: skip
ALIASES = {
    **dict.fromkeys(_LLAMA_LIKE.split(), ("llama", {})),
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel"), ("falcon", _FALCON)),
    **dict.fromkeys(("minimax_m1", "minimax_text_01"), ("minimax", {})),
    "chatglm": ("llama", _CHATGLM),
    "kimi_k2": ("deepseek_v3", {}),
    "qwen": ("llama", {"kv_channels": "head_dim"}),
}
# Where a composite config of a class that transformers lacks keeps its language model.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
# Fields whose value changes the size: each is checked, and where the file leaves one out that the
# class has a default for, that is said. Those of the second list may be 0.
_SIZES = """
num_hidden_layers num_layers n_layers num_decoder_layers decoder_layers num_attention_heads
num_heads n_heads num_key_value_heads num_kv_heads hidden_size d_model head_dim d_kv kv_channels
global_head_dim sliding_window attention_chunk_size kv_lora_rank qk_rope_head_dim
qk_nope_head_dim v_head_dim index_head_dim state_size ssm_state_size conv_kernel n_groups expand
mamba_d_state mamba_d_conv mamba_expand mamba_n_heads mamba_num_heads n_mamba_heads mamba_d_head
mamba_head_dim mamba_headdim mamba_n_groups mamba_ngroups linear_num_key_heads
linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
linear_num_heads linear_head_dim conv_L_cache lru_width conv1d_width max_source_positions
"""
_COUNTS = "num_kv_shared_layers num_nextn_predict_layers mtp_num_hidden_layers"
_SIZED, _COUNTED = frozenset(_SIZES.split()), frozenset(_COUNTS.split())
_MOST = {"layers": 10_000, "": 1 << 24}  # beyond it no model exists, and sums take forever
# What a config that is not nested must state itself, under one of these names: transformers always
# writes them, so a file without them is not a model's.
_STATED = (
    ("num_hidden_layers", "num_layers", "num_decoder_layers", "decoder_layers", "layer_types",
     "layers_block_type", "hybrid_override_pattern"),
    ("num_attention_heads", "num_heads", "n_heads", "decoder_attention_heads"),
    ("hidden_size", "d_model", "head_dim", "d_kv", "kv_lora_rank"),
    ("kv_lora_rank",),
    ("state_size", "ssm_state_size", "mamba_d_state"),
)  # fmt: skip
# What other families, or a slip of the pen, call the number of KV heads.
_KV_HEADS = {"num_kv_heads", "n_kv_heads", "n_head_kv", "num_query_groups"}


class CannotEstimate(ValueError):
    """The config does not say enough, or says something no rule here covers."""

    def __init__(self, reason: str):
        super().__init__(f"cannot estimate: {reason}")


@functools.cache
def bundled() -> dict[str, dict]:
    """The configs that travel with the package: name to source, parameters and config."""
    return json.loads((paths.DATA / "configs" / "models.json").read_text("utf-8"))


def names() -> tuple[str, ...]:
    """The bundled names."""
    return tuple(bundled())


def models() -> pd.DataFrame:
    """One row per bundled config: name, model_type, parameters and source."""
    rows = [
        (name, entry["config"]["model_type"], entry["parameters"], entry["source"])
        for name, entry in bundled().items()
    ]
    return pd.DataFrame(rows, columns=["model", "model_type", "parameters", "source"])


def read(source) -> dict:
    """The config as a plain dict, from whatever describes the model."""
    source = getattr(source, "config", source)  # of a loaded model
    if isinstance(source, dict) or hasattr(source, "to_dict"):
        return source if isinstance(source, dict) else source.to_dict()
    if not isinstance(source, (str, os.PathLike)):
        raise CannotEstimate(
            f"`config` must be a dict, file, folder, name or model; received {source!r:.80}"
        )
    path, name = Path(source), str(source)
    if path.is_file() or (path / "config.json").is_file():
        return _parsed(path if path.is_file() else path / "config.json")
    if name in bundled():
        return bundled()[name]["config"]
    if path.is_dir():
        raise FileNotFoundError(f"`config` folder {name!r} holds no config.json")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or name.endswith(".json"):
        near = difflib.get_close_matches(name.lower(), bundled(), n=3)
        raise FileNotFoundError(
            f"`config` {name!r} is neither a file, a folder, a Hub id nor a bundled name"
            + (f"; near it are {', '.join(near)}" if near else "; `kv_cache.models()` lists those")
        )
    from huggingface_hub import hf_hub_download

    try:
        return _parsed(Path(hf_hub_download(name, "config.json")))
    except OSError as error:
        reason = str(error).split("\n")[0]
        raise FileNotFoundError(f"`config` {name!r} is not on the Hub or here: {reason}") from error


def _parsed(path):
    """The JSON object that the file holds."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:  # not text, or not JSON
        raise CannotEstimate(f"`config` {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CannotEstimate(f"`config` {path} must hold one JSON object; it holds {found!r:.40}")
    return found


def resolve(source):
    """The family's name, whole config, its language model's, the defaults assumed, the fields."""
    raw = read(source)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CannotEstimate(f"`model_type` is {model_type!r}; the config must name its family")
    name, renames = ALIASES.get(model_type, (model_type, {}))
    config_class = _class(name)
    if config_class is None:
        if not _nested_fields(raw):
            near = difflib.get_close_matches(model_type, _mapping(), n=1)
            near = f"; did you mean {near[0]!r}?" if near else ""
            raise CannotEstimate(f"model_type {model_type!r} is unknown{near}")
        return resolve(_nested_fields(raw))
    raw = {renames.get(key, key): value for key, value in raw.items()}
    if model_type == "chatglm" and not raw.get("multi_query_attention"):
        raw["num_key_value_heads"] = raw.get("num_attention_heads")
    for fields in (raw, _nested_fields(raw)):
        _check_sizes(fields, _class(fields.get("model_type")) or config_class)
    outer = _build(config_class, {**raw, "model_type": name})
    text = _text_config(outer)
    fields = raw if text is outer or outer.is_encoder_decoder else _nested_fields(raw)
    if not fields:  # a flat file of a class that nests its language model
        text = _build(type(text), {**raw, "model_type": text.model_type})
        fields = raw
    _check(fields, text, flat=fields is raw and not hasattr(source, "to_dict"))
    assumed = _assumed(fields, text)
    if "mamba_ssm_cache_dtype" in assumed:
        text.mamba_ssm_cache_dtype = "unstated"
    return model_type if model_type in ALIASES else text.model_type, outer, text, assumed, fields


def _assumed(fields, text):
    """The sizes that the file leaves to the class's own defaults."""
    aliases = text.attribute_map
    present = set(fields) | {key for key, own in aliases.items() if own in fields}
    defaults = getattr(type(text), "__dataclass_fields__", {})
    return {
        key: field(text, key)
        for key in sorted(_SIZED | _COUNTED | {"mamba_ssm_cache_dtype"})
        if key not in present
        and aliases.get(key, key) in defaults
        and isinstance(field(text, key), int | str)
        and defaults[aliases.get(key, key)].default == field(text, key)
    }


def field(config, *names, default=None):
    """The first of these fields that the config sets; what varies by layer counts as unset."""
    for name in names:
        with contextlib.suppress(RuntimeError):  # transformers' AmbiguousGlobalPerLayerAttribute
            if (value := getattr(config, name, None)) is not None:
                return value
    return default


def needed(config, *names):
    """The first of these fields that the config sets, or CannotEstimate."""
    value = field(config, *names)
    if value is None:
        raise CannotEstimate(f"`{names[0]}` is missing from the {config.model_type!r} config")
    return value


def _mapping():
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING


def _class(model_type):
    return _mapping()[model_type] if model_type in _mapping() else None  # noqa: SIM401


def _build(config_class, raw):
    """The class's config with its defaults; what it refuses is a contradiction in the file."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
            return config_class.from_dict(raw)
    except Exception as error:  # the class's own validators raise several kinds
        reason = " ".join(str(error).split())
        raise CannotEstimate(f"{config_class.__name__} refuses the config: {reason}") from error
    finally:
        logger.setLevel(level)


def _text_config(outer):
    """The decoder's part of a composite config, to the innermost one."""
    inner = getattr(outer, "thinker_config", None) or outer
    text = inner.get_text_config(decoder=True)
    return text if text.model_type == inner.model_type else _text_config(text)


def _nested_fields(raw):
    """The part of the file that describes the language model, however deep it lies."""
    inner = next((raw[key] for key in _NESTED if isinstance(raw.get(key), dict)), {})
    return (_nested_fields(inner) or inner) if inner else {}


def _check_sizes(fields, config_class):
    """Refuse a size that is no size, and a field that seems to be a size but is misspelt."""
    own = {name: key for key, name in config_class.attribute_map.items()}
    known = config_class.__dataclass_fields__
    absent = {
        x for x in (*known, *own, *own.values(), "global_head_dim") if own.get(x, x) in _SIZED
    }
    absent -= set(fields) | {own.get(key) for key in fields}
    for key, value in fields.items():
        canonical = own.get(key, key)
        if canonical in _SIZED | _COUNTED:
            may_be_zero = canonical in _COUNTED or getattr(known.get(key), "default", None) == 0
            may_be_zero |= key == "sliding_window" and fields.get("use_sliding_window") is False
            for one in value if isinstance(value, list) else (value,):
                _check_size(key, one, may_be_zero)
        if key in known or key in config_class.attribute_map:
            continue
        near = () if canonical in _SIZED else difflib.get_close_matches(key, absent, 1, cutoff=0.9)
        if key in _KV_HEADS and "num_key_value_heads" in absent:
            near = ("num_key_value_heads",)
        if near:
            raise CannotEstimate(
                f"`{key}` is no field of {config_class.__name__}; did you mean `{near[0]}`?"
            )


def _check_size(key, value, may_be_zero):
    most = _MOST["layers" if "layer" in key else ""]
    if value is None or (isinstance(value, float) and key.endswith("expand") and value > 0):
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        rule = f"a whole number from {1 - may_be_zero} to {most:,}"
        raise CannotEstimate(f"`{key}` is {value!r}; it must be {rule}, not negative")
    if value == 0 and not may_be_zero:
        raise CannotEstimate(f"`{key}` is 0; it must be at least 1")


def _check(fields, text, *, flat):
    """Refuse what is missing or contradictory, naming the field."""
    for short, long in text.attribute_map.items():
        if short in fields and long in fields and fields[short] != fields[long]:
            raise CannotEstimate(
                f"`{short}` is {fields[short]!r} and `{long}` is {fields[long]!r};"
                " they name the same quantity"
            )
    for names in _STATED if flat else ():
        if field(text, *names) is not None and not _any(fields, text, *names):
            raise CannotEstimate(
                f"`{names[0]}` is missing from the config;"
                f" {type(text).__name__}'s default {field(text, *names)} is not assumed"
            )
    heads, kv_heads = field(text, "num_attention_heads"), field(text, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        raise CannotEstimate(
            f"`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}"
        )
    shared, layers = (
        field(text, "num_kv_shared_layers", default=0),
        field(text, "num_hidden_layers"),
    )
    if shared and shared > layers:
        raise CannotEstimate(
            f"`num_kv_shared_layers` {shared} exceeds `num_hidden_layers` {layers}"
        )
    if text.model_type == "mamba" and text.intermediate_size != int(text.expand * text.hidden_size):
        raise CannotEstimate(
            f"`intermediate_size` {text.intermediate_size} is not `expand` {text.expand} times"
            f" `hidden_size` {text.hidden_size}"
        )


def _any(fields, text, *names):
    """Whether the file gives any of these fields, under its own or the class's name."""
    return any(name in fields or text.attribute_map.get(name) in fields for name in names)
