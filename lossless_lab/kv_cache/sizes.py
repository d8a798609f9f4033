"""Which fields of a config are sizes: read with their aliases, checked, or refused by name."""

import contextlib
import difflib

from lossless_lab.kv_cache.checks import require
from lossless_lab.kv_cache.facts import FACTS

# Fields whose value changes the size: each is checked, and where the file leaves one out that the
# class has a default for, that is said. Those of the second list may be 0.
_SIZED, _COUNTED, _KV_HEADS = (
    frozenset(FACTS[kind].split()) for kind in ("sizes", "counts", "kv_heads_misnamed")
)
_MOST = {"layers": 10_000, "": 1 << 24}  # beyond it no model exists, and sums take forever


class CannotEstimate(ValueError):
    """The config does not say enough, or says something no rule here covers."""

    def __init__(self, reason: str):
        super().__init__(f"cannot estimate: {reason}")


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


def assumed(fields, text):
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


def check_sizes(fields, config_class):
    """Refuse a size that is no size, and a field that seems to be a size but is misspelt."""
    own = {name: key for key, name in config_class.attribute_map.items()}
    known = config_class.__dataclass_fields__
    aliases = config_class.attribute_map
    names = {*known, *own, *aliases, "global_head_dim"} - set(fields)
    names -= {own.get(key) for key in fields} | {aliases.get(key) for key in fields}
    absent = {name for name in names if own.get(name, name) in _SIZED}
    for key, value in fields.items():
        canonical = own.get(key, key)
        if canonical in _SIZED | _COUNTED:
            off = key == "sliding_window" and fields.get("use_sliding_window") is False
            default = getattr(known.get(key), "default", None)
            least = int(canonical not in _COUNTED and default != 0 and not off)
            most = _MOST["layers" if "layer" in key else ""]
            said = f"; it must be a whole number from {least} to {most:,}, not negative"
            for one in value if isinstance(value, list) else (value,):
                whole = type(one) is int or (key.endswith("expand") and type(one) is float)
                fits = one is None or (whole and least <= one <= most)
                require(fits, f"`{key}` is {one!r}{said}", CannotEstimate)
        if key in known or key in aliases:
            continue
        near = () if canonical in _SIZED else difflib.get_close_matches(key, absent, 1, cutoff=0.9)
        near = {"num_key_value_heads"} & absent if key in _KV_HEADS else near
        said = f"`{key}` is no field of {config_class.__name__}; did you mean `{[*near, ''][0]}`?"
        require(not near, said, CannotEstimate)


def check_fields(fields, text, *, flat):
    """Refuse what is missing or contradictory, naming the field."""

    def holds(condition, message):
        require(condition, message, CannotEstimate)

    for short, long in text.attribute_map.items():
        same = not {short, long} <= set(fields) or fields[short] == fields[long]
        said = f"`{short}` is {fields.get(short)!r} and `{long}` is {fields.get(long)!r}"
        holds(same, f"{said}; they name the same quantity")
    # transformers always writes these, so a file without them is not a model's
    known = {*type(text).__dataclass_fields__, *text.attribute_map}
    for names in map(str.split, FACTS["stated"] if flat else ()):
        if known.isdisjoint(names):
            continue  # what the class computes from others
        default = field(text, *names)
        there = any(name in fields or text.attribute_map.get(name) in fields for name in names)
        said = f"{type(text).__name__}'s default {default} is not assumed"
        holds(there or default is None, f"`{names[0]}` is missing from the config; {said}")
    heads, kv_heads = field(text, "num_attention_heads"), field(text, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads:
        said = f"`num_attention_heads` {heads} is not a multiple of `num_key_value_heads`"
        holds(heads % kv_heads == 0, f"{said} {kv_heads}")
    shared, layers = field(text, "num_kv_shared_layers"), field(text, "num_hidden_layers")
    said = f"`num_kv_shared_layers` {shared} exceeds `num_hidden_layers` {layers}"
    holds(not shared or shared <= layers, said)
    if text.model_type == "mamba":
        inner, expand, width = text.intermediate_size, text.expand, text.hidden_size
        said = f"`intermediate_size` {inner} is not `expand` {expand} times `hidden_size` {width}"
        holds(inner == int(expand * width), said)
