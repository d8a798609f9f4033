"""How many bytes a KV cache takes: one call from config and request to a checked breakdown."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace

import pandas as pd

from lossless_lab.kv_cache.allocators import Allocator, Part, Request
from lossless_lab.kv_cache.configs import CannotEstimate
from lossless_lab.kv_cache.contiguous import Ggml, IkLlamaCpp, LlamaCpp, Transformers, WhisperCpp
from lossless_lab.kv_cache.formats import storage_format, storage_formats
from lossless_lab.kv_cache.geometry import Geometry, geometry
from lossless_lab.kv_cache.paged import VLLM, SGLang, TensorRT
from lossless_lab.results import Result

# Longer names first: "ik_llama.cpp" contains "llama.cpp".
ENGINES = {
    cls.name: cls
    for cls in (IkLlamaCpp, LlamaCpp, WhisperCpp, Transformers, TensorRT, SGLang, VLLM, Ggml)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSize(Result):
    """Bytes on one GPU: reserved by the engine, needed by the tokens, fixed, and per token."""

    model_type: str
    parts: tuple[Part, ...]
    seq_len: int
    n_sequences: int
    dtype: str
    engine: str
    tensor_parallel: int
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Everything the engine reserves on one GPU."""
        return sum(part.bytes for part in self.parts)

    @property
    def stored_bytes(self) -> int:
        """What the tokens need, without blocks, padding and spare slots."""
        return sum(part.stored_bytes for part in self.parts)

    @property
    def fixed_bytes(self) -> int:
        """States and cross-attention: what a sequence costs whatever its length."""
        return self.of_kind("state", "cross")

    @property
    def bytes_per_token(self) -> int:
        """What one more token of one sequence adds, at this length."""
        return sum(part.bytes_per_token for part in self.parts)

    @property
    def bytes_all_gpus(self) -> int:
        """Over all tensor-parallel GPUs, replicated heads counted on each."""
        return self.bytes * self.tensor_parallel

    def of_kind(self, *kinds: str) -> int:
        """Reserved bytes of these kinds of layer."""
        return sum(part.bytes for part in self.parts if part.kind in kinds)

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of layer, with the formula that gave its bytes."""
        return pd.DataFrame([{**asdict(p), "formula": p.formula} for p in self.parts])

    def __str__(self):
        formula = " + ".join(part.formula for part in self.parts) or "no layer keeps a cache"
        return f"{self.model_type}, {self.engine}: {formula} = {binary(self.bytes)}"


def binary(n_bytes: float) -> str:
    """Bytes in the largest fitting unit of 1,024, never decimal.

    Examples
    --------
    >>> binary(8 * 4096 * 32 * 2 * 8 * 128 * 2)
    '4.00 GiB'
    """
    size, units = float(n_bytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if abs(size) < 1024 or unit == units[-1]:
            return f"{size:,.2f} {unit}" if unit != "B" else f"{size:,.0f} B"
        size /= 1024


def engine(text, **options) -> Allocator:
    """An engine's rules from a name, a version and launch flags as one would type them.

    Parameters
    ----------
    text : str, None or Allocator
        "vLLM 0.11", "llama.cpp b6500 -ub 256 --swa-full", "ik_llama.cpp -mla 2"; None for the
        closed form.
    **options
        Fields of the engine's allocator, such as `n_ubatch`, `block_size`, `cache`.

    Examples
    --------
    >>> engine("llama.cpp b6500 -ub 256").n_ubatch
    256
    """
    if isinstance(text, Allocator):
        return text
    if text is None:
        return _configured(Allocator, options)
    folded = text.lower()
    cls = next((c for name, c in ENGINES.items() if name in folded), None)
    if cls is None:
        raise ValueError(f"`engine` {text!r} is unknown; known are {', '.join(ENGINES)}")
    version = re.search(re.escape(cls.name) + r"[\s(]*[vb]?(\d[\d.]*)", folded)
    options.setdefault("version", version[1] if version else "")
    words = re.sub(r"\([^)]*\)", " ", text).split()
    for i, word in enumerate(words):
        if not re.match(r"--?[a-z]", word):
            continue
        if word not in cls.flags:
            raise ValueError(
                f"`engine` flag {word} is not known to change the cache of {cls.name};"
                f" known are {', '.join(cls.flags)}"
            )
        value = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("-") else "1"
        for name in cls.flags[word].split():
            options.setdefault(name, value)
    return _configured(cls, options)


def _configured(cls, options):
    """The allocator with these options, each checked by name."""
    allowed = {f.name: f for f in fields(cls)}
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise TypeError(
            f"`{unknown[0]}` is not an option of engine {cls.name!r};"
            f" its options are {', '.join(sorted(allowed))}"
        )
    return cls(**{name: _typed(value, allowed[name], name) for name, value in options.items()})


def _typed(value, field, name):
    """A flag's text as the field's type."""
    if not isinstance(value, str) or "str" in str(field.type):
        return value
    if "bool" in str(field.type):
        return value.lower() in ("1", "on", "true", "auto")
    try:
        return float(value) if "float" in str(field.type) else int(value)
    except ValueError:
        raise ValueError(f"`{name}` {value!r} must be a number") from None


def kv_cache_bytes(
    config,
    *,
    seq_len: int,
    batch_size: int = 1,
    dtype="bfloat16",
    engine: str | Allocator | None = None,
    tensor_parallel: int = 1,
    num_beams: int = 1,
    encoder_len: int | None = None,
    state_dtype: str | None = None,
    draft=None,
    **options,
) -> KVCacheSize:
    """Bytes of the KV cache: sum over layers of heads x (key + value width) x bytes x tokens.

    Parameters
    ----------
    config : dict, str, Path, transformers config or model
        As for `geometry`.
    seq_len : int
        Tokens of each sequence, prompt and answer together.
    batch_size : int
        Sequences held at the same time; `num_beams` multiplies it.
    dtype : str, pair or mapping
        Format of K and V ("bfloat16", "fp8", "q8_0", {"k": "q8_0", "v": "f16"}).
    engine : str or None
        Whose reservation: "vllm 0.11", "llama.cpp", "transformers", ...; None for what the tokens
        need. `options` are the engine's, see `kv_cache.engine`.
    tensor_parallel : int
        GPUs that share each layer; the result is for one of them.
    encoder_len : int, optional
        Positions held by cross-attention; Whisper's comes from its config.
    state_dtype : str, optional
        Dtype of convolution and recurrent states, where it is not the engine's own.
    draft : optional
        Config of a draft model that keeps its own cache of the same length.

    Returns
    -------
    KVCacheSize
        Breakdown by kind of layer; `.bytes`, `.stored_bytes`, `.fixed_bytes`, `.bytes_per_token`.

    Raises
    ------
    CannotEstimate
        If the config does not determine the answer.
    ValueError
        If a size is not a positive integer or `tensor_parallel` does not fit the heads.

    Examples
    --------
    >>> llama = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    ...          "num_key_value_heads": 8, "hidden_size": 4096}
    >>> kv_cache_bytes(llama, seq_len=4096, batch_size=8, dtype="fp16").bytes / 2**30
    4.0
    """
    _positive(seq_len=seq_len, batch_size=batch_size, num_beams=num_beams)
    _positive(tensor_parallel=tensor_parallel)
    shape = config if isinstance(config, Geometry) else geometry(config)
    rules = _engine(engine, **options)
    key_format, value_format = storage_formats(dtype)
    key_format = storage_format(rules.key_dtype) if rules.key_dtype else key_format
    value_format = storage_format(rules.value_dtype) if rules.value_dtype else value_format
    request = Request(
        seq_len=seq_len,
        n_sequences=batch_size * num_beams,
        key_format=key_format,
        value_format=value_format,
        encoder_len=shape.encoder_len if encoder_len is None else encoder_len,
        state_dtype=state_dtype,
        tensor_parallel=tensor_parallel,
        num_beams=num_beams,
    )
    shape, notes = _stated(shape, rules)
    parts = rules.parts(shape, request)
    if draft is not None:
        other = geometry(draft)
        parts += rules.parts(other, request)
        notes += (f"with the cache of the draft {other.model_type}",)
    names = dict.fromkeys((key_format.name, value_format.name))
    return KVCacheSize(
        model_type=shape.model_type,
        parts=tuple(_plain(part) for part in parts),
        seq_len=seq_len,
        n_sequences=request.n_sequences,
        dtype=" + ".join(names),
        engine=f"{rules.name} {rules.version}".strip(),
        tensor_parallel=tensor_parallel,
        notes=notes,
    )


_engine = engine  # the function, where the parameter hides it


def _plain(part):
    """The part with Python integers, whatever numpy made of them."""
    values = asdict(part)
    return Part(**{k: v if isinstance(v, str) else int(v) for k, v in values.items()})


def _positive(**sizes):
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer; received {value!r}")


def _stated(shape, rules):
    """Without an engine, a window that only the class's default gives is not assumed."""
    assumed = dict(shape.assumed)
    notes = tuple(f"`{k}` = {v} is the class's default" for k, v in assumed.items())
    sliding = [layer for layer in shape.layers if layer.kind == "sliding"]
    if (
        type(rules) is Allocator
        and "sliding_window" in assumed
        and len(sliding) == len(shape.layers)
    ):
        layers = tuple(replace(layer, kind="full", window=None) for layer in shape.layers)
        return replace(shape, layers=layers), (
            *notes,
            "the file states no window, so none is taken",
        )
    return shape, notes


__all__ = ["CannotEstimate", "KVCacheSize", "binary", "engine", "kv_cache_bytes"]
