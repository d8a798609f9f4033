"""Reading a config: file, dict, Hub id, bundled name or loaded model to one checked text config."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import logging
import os
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
# Fields whose value changes the size; where the file leaves one out, the class's default is said.
_SIZED = (
    "num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim sliding_window"
    " attention_chunk_size kv_lora_rank qk_rope_head_dim v_head_dim num_kv_shared_layers"
)
# What a config that is not nested must state itself, under one of these names: transformers always
# writes them, so a file without them is not a model's.
_STATED = (
    ("num_hidden_layers", "num_layers", "num_decoder_layers", "decoder_layers", "layer_types",
     "layers_block_type", "hybrid_override_pattern"),
    ("num_attention_heads", "num_heads", "n_heads", "decoder_attention_heads"),
    ("hidden_size", "d_model", "head_dim", "d_kv", "kv_lora_rank"),
)  # fmt: skip


class CannotEstimate(ValueError):
    """The config does not say enough, or says something no rule here covers."""

    def __init__(self, reason: str):
        super().__init__(f"cannot estimate: {reason}")


@functools.cache
def bundled() -> dict[str, dict]:
    """The configs that travel with the package: name to source, parameters and config."""
    return json.loads((paths.DATA / "configs" / "models.json").read_text("utf-8"))


def models() -> pd.DataFrame:
    """One row per bundled config: name, model_type, parameters and source."""
    rows = [
        (name, entry["config"]["model_type"], entry["parameters"], entry["source"])
        for name, entry in bundled().items()
    ]
    return pd.DataFrame(rows, columns=["model", "model_type", "parameters", "source"])


def read(source) -> dict:
    """The config as a plain dict, from whatever describes the model."""
    found = _found(source)
    if not isinstance(found, dict):
        raise CannotEstimate(f"`config` must be one JSON object; got a {type(found).__name__}")
    return found


def _found(source):
    if isinstance(source, dict | list):
        return source
    if hasattr(source, "config"):  # a loaded model
        source = source.config
    if hasattr(source, "to_dict"):
        return source.to_dict()
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return json.loads(path.read_text("utf-8"))
    if str(source) in bundled():
        return bundled()[str(source)]["config"]
    if "/" not in str(source) or str(source).endswith(".json"):
        near = difflib.get_close_matches(str(source), bundled(), n=3)
        raise FileNotFoundError(
            f"`config` {str(source)!r} is neither a file, a folder, a Hub id nor a bundled name"
            + (f"; near it are {', '.join(near)}" if near else "; `kv_cache.models()` lists those")
        )
    from huggingface_hub import hf_hub_download

    return json.loads(Path(hf_hub_download(str(source), "config.json")).read_text("utf-8"))


def resolve(source):
    """The family's name, the whole config, its language model's, and the defaults assumed."""
    raw = read(source)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CannotEstimate(f"`model_type` is {model_type!r}; the config must name its family")
    name, renames = ALIASES.get(model_type, (model_type, {}))
    config_class = _class(name)
    if config_class is None:
        if not _nested_fields(raw):
            raise CannotEstimate(f"model_type {model_type!r} is unknown")
        return resolve(_nested_fields(raw))
    raw = {renames.get(key, key): value for key, value in raw.items()}
    if model_type == "chatglm" and not raw.get("multi_query_attention"):
        raw["num_key_value_heads"] = raw.get("num_attention_heads")
    outer = _build(config_class, {**raw, "model_type": name})
    text = _text_config(outer)
    fields = raw if text is outer or outer.is_encoder_decoder else _nested_fields(raw)
    if not fields:  # a flat file of a class that nests its language model
        text = _build(type(text), {**raw, "model_type": text.model_type})
        fields = raw
    _check(fields, text, flat=fields is raw and not hasattr(source, "to_dict"))
    family = model_type if model_type in ALIASES else text.model_type
    return family, outer, text, _assumed(fields, text)


def _assumed(fields, text):
    """The sizes that the file leaves to the class's own defaults."""
    aliases = text.attribute_map
    present = set(fields) | {key for key, own in aliases.items() if own in fields}
    defaults = getattr(type(text), "__dataclass_fields__", {})
    return {
        key: field(text, key)
        for key in _SIZED.split()
        if key not in present
        and aliases.get(key, key) in defaults
        and isinstance(field(text, key), int)
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


def _class(model_type):
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401


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


def _check(fields, text, *, flat):
    """Refuse what is missing, negative or contradictory, naming the field."""
    for short, long in text.attribute_map.items():
        if short in fields and long in fields and fields[short] != fields[long]:
            raise CannotEstimate(
                f"`{short}` is {fields[short]!r} and `{long}` is {fields[long]!r};"
                " they name the same quantity"
            )
    for key, value in fields.items():
        if isinstance(value, int) and value < 0 and key in _SIZED.split():
            raise CannotEstimate(f"`{key}` is {value}; it must not be negative")
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


def _any(fields, text, *names):
    """Whether the file gives any of these fields, under its own or the class's name."""
    return any(name in fields or text.attribute_map.get(name) in fields for name in names)
