"""The engines by name, and how one is configured: version, launch flags, options."""

from __future__ import annotations

import re
from dataclasses import fields

from lossless_lab.kv_cache.allocators import Allocator
from lossless_lab.kv_cache.contiguous import Ggml, IkLlamaCpp, LlamaCpp, Transformers, WhisperCpp
from lossless_lab.kv_cache.paged import VLLM, SGLang, TensorRT

# Longer names first: "ik_llama.cpp" contains "llama.cpp".
_CLASSES = (IkLlamaCpp, LlamaCpp, WhisperCpp, Transformers, TensorRT, SGLang, VLLM, Ggml)
ENGINES = {cls.name: cls for cls in _CLASSES}
# Launch flags that are not called like the option that they set.
FLAGS = {
    "-ub": "n_ubatch", "--ubatch-size": "n_ubatch", "-b": "n_batch", "--batch-size": "n_batch",
    "-fa": "flash_attn", "-kvu": "kv_unified", "-mla": "mla_mode",
    "-ctk": "key_dtype", "--cache-type-k": "key_dtype",
    "-ctv": "value_dtype", "--cache-type-v": "value_dtype",
    "--kv-cache-dtype": "key_dtype value_dtype", "--num-gpu-blocks-override": "n_blocks",
    "--disable-hybrid-kv-cache-manager": "flat", "--mamba-ssm-cache-dtype": "ssm_dtype",
    "--max-total-tokens": "n_tokens", "--swa-full-tokens-ratio": "swa_ratio",
    "--tokens_per_block": "block_size",
}  # fmt: skip


def engine(text, **options) -> Allocator:
    """An engine's rules from a name, a version and launch flags as one would type them.

    Parameters
    ----------
    text : str, None or Allocator
        "vLLM 0.11", "llama.cpp b6500 -ub 256 --swa-full", "ik_llama.cpp -mla 2"; None for the
        closed form.
    **options
        Fields of the engine's allocator, such as `n_ubatch`, `block_size`, `cache`.

    Raises
    ------
    ValueError, TypeError
        If the engine, a flag or an option is unknown; the message lists the known ones.

    Examples
    --------
    >>> engine("llama.cpp b6500 -ub 256").n_ubatch
    256
    """
    if isinstance(text, Allocator):
        return text
    if text is None:
        return _configured(Allocator, options)
    cls = next((c for name, c in ENGINES.items() if name in text.lower()), None)
    if cls is None:
        raise ValueError(f"`engine` {text!r} is unknown; known are {', '.join(ENGINES)}")
    version = re.search(re.escape(cls.name) + r"[\s(]*[vb]?(\d[\d.]*)", text.lower())
    found = {"version": version[1] if version else ""}
    if cls is Transformers and "staticcache" in text.lower():
        found["cache"] = "static"
    outside_brackets = re.sub(r"\([^)]*\)", " ", text)
    for flag, value in re.findall(r"\s(--?[a-z][\w-]*)(?:[ =]([^-\s]\S*))?", outside_brackets):
        for name in FLAGS.get(flag, flag.lstrip("-").replace("-", "_")).split():
            if name not in _options(cls):
                raise ValueError(f"`engine` flag {flag} is not known to change {cls.name}'s cache")
            found[name] = value or "1"
    return _configured(cls, {**found, **options})


def _options(cls):
    return {field.name: str(field.type) for field in fields(cls)}


def _configured(cls, options):
    """The allocator with these options, each checked by name and brought to its type."""
    known = _options(cls)
    for name in options:
        if name not in known:
            raise TypeError(
                f"`{name}` is not an option of engine {cls.name!r};"
                f" its options are {', '.join(sorted(known))}"
            )
    return cls(**{name: _typed(name, value, known[name]) for name, value in options.items()})


def _typed(name, value, kind):
    """A flag's text as the option's type."""
    if not isinstance(value, str) or "str" in kind:
        return value
    if "bool" in kind:
        return value.lower() in ("1", "on", "true", "auto")
    try:
        return float(value) if "float" in kind else int(value)
    except ValueError:
        raise ValueError(f"`{name}` {value!r} must be a number") from None
