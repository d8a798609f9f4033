"""Reading a config: file, dict, Hub id, bundled name or loaded model to one checked text config."""

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
from lossless_lab.kv_cache.checks import require
from lossless_lab.kv_cache.facts import FACTS
from lossless_lab.kv_cache.sizes import CannotEstimate, assumed, check_fields, check_sizes


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
    said = f"`config` must be a dict, file, folder, name or model; received {source!r:.80}"
    require(isinstance(source, (str, os.PathLike)), said, CannotEstimate)
    path, name = Path(source), str(source)
    if path.is_file() or (path / "config.json").is_file():
        return _parsed(path if path.is_file() else path / "config.json")
    if name in bundled():
        return bundled()[name]["config"]
    require(not path.is_dir(), f"`config` folder {name!r} holds no config.json", FileNotFoundError)
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
    said = f"`config` {path} must hold a JSON object; got {found!r:.40}"
    require(isinstance(found, dict), said, CannotEstimate)
    return found


def resolve(source):
    """The family's name, whole config, its language model's, the defaults assumed, the fields."""
    raw = read(source)
    model_type = raw.get("model_type")
    said = f"`model_type` is {model_type!r}; the config must name its family"
    require(isinstance(model_type, str), said, CannotEstimate)
    alias = FACTS["families"].get(model_type, {})
    renames = FACTS["renamed_everywhere"] | alias.get("renamed", {})
    name = alias.get("read_as", model_type)
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
    if name == "falcon" and raw.get("num_kv_heads") and not raw.get("multi_query"):
        raw.setdefault("new_decoder_architecture", True)  # files of RefinedWeb do not say it
    if isinstance(kinds := raw.get("attn_type_list"), list):  # of MiniMax: 0 is lightning attention
        raw["layer_types"] = [f"{'full' if kind else 'linear'}_attention" for kind in kinds]
    inner, needed = raw.get("attn_config"), alias.get("needs")  # its default would be a guess
    there = raw.get(needed) or (isinstance(inner, dict) and inner.get(needed))
    original = next((old for old, new in renames.items() if new == needed), needed)
    said = f"`{original}` is missing from the {model_type!r} config"
    require(there or not needed, said, CannotEstimate)
    if blocks := raw.pop("blocks", None):
        raw["kv_heads_by_layer"] = _kv_heads_of(blocks, raw.get("num_attention_heads"))
    for fields in (raw, _nested_fields(raw)):
        check_sizes(fields, _class(fields.get("model_type")) or config_class)
    n_layers, windowed = raw.get("num_hidden_layers") or 0, raw.get("sliding_window", 0) is not None
    pattern = raw.get("sliding_window_pattern") if windowed else "G"
    if "exaone" in name and isinstance(pattern, str) and pattern and not raw.get("layer_types"):
        kinds = ["sliding_attention" if kind == "L" else "full_attention" for kind in pattern]
        raw["layer_types"] = (kinds * n_layers)[:n_layers]  # the class cannot read "LLLG"
    outer = _build(config_class, {**raw, "model_type": name})
    text = _text_config(outer)
    fields = _nested_fields(raw)
    if text is outer or (outer.is_encoder_decoder and not fields):
        fields = raw
    elif not fields:  # a flat file of a class that nests its language model
        text = _build(type(text), {**raw, "model_type": text.model_type})
        fields = raw
    check_fields(fields, text, flat=fields is raw and not hasattr(source, "to_dict"))
    defaults = assumed(fields, text)
    if "mamba_ssm_cache_dtype" in defaults:
        text.mamba_ssm_cache_dtype = "unstated"
    family = model_type if model_type in FACTS["families"] else text.model_type
    return family, outer, text, defaults, fields


def _kv_heads_of(blocks, n_heads):
    """KV heads of every layer of Nemotron-NAS, 0 where its attention is left out."""
    try:
        groups = [block["attention"]["n_heads_in_group"] for block in blocks]
        return [n_heads // group if group else 0 for group in groups]
    except (KeyError, TypeError) as error:
        raise CannotEstimate(f"`block_configs` has no `n_heads_in_group`: {error!r}") from error


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
    inner = next((raw[key] for key in FACTS["nested_under"] if isinstance(raw.get(key), dict)), {})
    return (_nested_fields(inner) or inner) if inner else {}
