"""How many bytes a KV cache takes: one call from config and request to a checked breakdown."""

from dataclasses import asdict, dataclass, replace

import pandas as pd

from lossless_lab.kv_cache.allocators import Allocator, Part, Request
from lossless_lab.kv_cache.checks import FloatDtype, Positive, checks_options
from lossless_lab.kv_cache.engines import engine as rules_of
from lossless_lab.kv_cache.geometry import Geometry, geometry
from lossless_lab.results import Result


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
    exponent = 0
    while abs(n_bytes) >= 1024 and exponent < 4:
        n_bytes, exponent = n_bytes / 1024, exponent + 1
    return f"{n_bytes:,.2f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


@checks_options
def kv_cache_bytes(
    config,
    *,
    seq_len: Positive,
    batch_size: Positive = 1,
    dtype="bfloat16",
    engine: str | Allocator | None = None,
    tensor_parallel: Positive = 1,
    num_beams: Positive = 1,
    encoder_len: Positive | None = None,
    state_dtype: FloatDtype | None = None,
    draft=None,
    **options,
) -> KVCacheSize:
    """Bytes of the KV cache: sum over layers of heads x (key + value width) x bytes x tokens.

    Parameters
    ----------
    config : dict, str, Path, transformers config, model or Geometry
        As for `geometry`.
    seq_len : int
        Tokens of each sequence, prompt and answer together.
    batch_size : int
        Sequences held at the same time; `num_beams` multiplies it.
    dtype : str, pair or mapping
        Format of K and V ("bfloat16", "fp8", "q8_0", {"k": "q8_0", "v": "f16"}).
    engine : str or None
        Whose reservation: "vllm 0.11", "llama.cpp -ub 256", "transformers", ...; None for what the
        tokens need. `options` are the engine's own, see `kv_cache.engine`.
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
    rules = rules_of(engine, **options)
    shape, notes = _stated(config if isinstance(config, Geometry) else geometry(config), rules)
    key_format, value_format = rules.formats_of(dtype)
    request = Request(
        seq_len=seq_len, n_sequences=batch_size * num_beams, num_beams=num_beams,
        key_format=key_format, value_format=value_format, state_dtype=state_dtype,
        encoder_len=encoder_len or shape.outline.encoder_len, tensor_parallel=tensor_parallel,
    )  # fmt: skip
    models = rules.with_draft(shape, None if draft is None else geometry(draft))
    parts = [part for model in models for part in rules.parts(model, request)]
    if len(models) > 1 or models[0] != shape:
        notes += ("the cache of the draft is counted too",)
    limit = shape.outline.context_limit
    if limit and seq_len > limit:
        notes += (f"the model was made for at most {limit:,} tokens",)
    return KVCacheSize(
        model_type=shape.model_type, parts=tuple(parts), seq_len=seq_len, notes=notes,
        n_sequences=request.n_sequences, tensor_parallel=tensor_parallel,
        dtype=" + ".join(dict.fromkeys((key_format.name, value_format.name))),
        engine=f"{rules.name} {rules.version}".strip(),
    )  # fmt: skip


def _stated(shape, rules):
    """Without an engine, a window that only the class's default gives is not assumed."""
    notes = tuple(f"`{name}` = {value} is the class's default" for name, value in shape.assumed)
    slides = bool(shape.layers) and all(layer.kind == "sliding" for layer in shape.layers)
    if type(rules) is Allocator and "sliding_window" in dict(shape.assumed) and slides:
        layers = tuple(replace(x, kind="full") for x in shape.without_windows().layers)
        return replace(shape, layers=layers), (*notes, "the file states no window: none is taken")
    return shape, notes
