"""Compressed key-value caches, simulated: quantised rows, and eviction beyond a window.

The values are those that a packed cache would give back; the tensors stay as wide as they were.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from lossless_lab.number_formats import Format, GgufFormat, number_format
from lossless_lab.optimizations.entry import VACUOUS, Optimization
from lossless_lab.optimizations.faults import stale_slot


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedKV:
    """Keys in one format and values in another, but for the newest tokens.

    Parameters
    ----------
    name : what reports call it.
    keys, values : formats; a row is one token of one head. One that shares scales by "tensor" does
        so among what is quantised at once.
    block : tokens that are quantised together. Above 1, a row of the keys is one channel over
        that many tokens (KIVI, arXiv 2402.02750), as keys have outlier channels.
    residual : at least so many of the newest tokens stay as they are.
    """

    name: str
    keys: Format | GgufFormat
    values: Format | GgufFormat
    block: int = 1
    residual: int = 0

    def n_compressed(self, n_tokens: int) -> int:
        """How many of `n_tokens` cached ones are quantised: whole blocks before the residual.

        >>> fmt = number_format("int8-channel")
        >>> QuantizedKV(name="", keys=fmt, values=fmt, block=32, residual=128).n_compressed(200)
        64
        """
        return max(0, n_tokens - self.residual) // self.block * self.block

    def bits_per_value(self, head_dim: int, n_tokens: int, *, wide_bits: int = 16) -> float:
        """Bits for one cached number after `n_tokens`, scales and the wide residual included.

        >>> fmt = number_format("q8_0")   # 34 bytes for 32 values
        >>> QuantizedKV(name="", keys=fmt, values=fmt).bits_per_value(64, 10)
        8.5
        """
        n = self.n_compressed(n_tokens)
        by_channel = (n // self.block * head_dim, self.block)
        shapes = by_channel if self.block > 1 else (n, head_dim), (n, head_dim)
        pairs = zip((self.keys, self.values), shapes, strict=True)
        narrow = sum(f.fitted(shape[1]).bits_per_weight(shape) for f, shape in pairs if n) / 2
        return (n * narrow + (n_tokens - n) * wide_bits) / n_tokens

    def round(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [..., tokens, head_dim], whole blocks of tokens, as they come back."""
        if self.block == 1:
            return _rounded(keys, self.keys), _rounded(values, self.values)
        columns = keys.transpose(-1, -2).unflatten(-1, (-1, self.block))
        return _rounded(columns, self.keys).flatten(-2).mT, _rounded(values, self.values)

    def build(self, config: Any) -> Cache:
        """An empty cache for one batch of a model; `generate` and `forward` take it as `cache`."""
        return _cache(config, lambda: QuantizedRows(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictingKV:
    """The first tokens and the newest ones only (StreamingLLM, arXiv 2309.17453).

    Keys keep the positions that they were written at. Rows of a batch must not be padded on the
    left: pads would be taken for the first tokens.
    """

    name: str
    sinks: int = 4
    window: int = 60

    def __post_init__(self) -> None:
        kept = self.sinks, self.window
        if not any(kept) or not all(n >= 0 == n % 1 for n in kept):
            raise ValueError(f"`sinks` and `window` must be whole numbers, not both 0; got {kept}")

    def n_compressed(self, n_tokens: int) -> int:
        """How many of `n_tokens` were dropped."""
        return max(0, n_tokens - self.sinks - self.window)

    def bits_per_value(self, head_dim: int, n_tokens: int, *, wide_bits: int = 16) -> float:
        """Bits held for each number that was written."""
        return wide_bits * (n_tokens - self.n_compressed(n_tokens)) / n_tokens

    def build(self, config: Any) -> Cache:
        """An empty cache for one batch of a model."""
        return _cache(config, lambda: SinksAndWindow(self))


class _Compressed(DynamicLayer):
    """A layer that counts tokens, rounded so far or seen, and tells if rounding `altered` any."""

    is_croppable = False

    def __init__(self, how: QuantizedKV | EvictingKV) -> None:
        super().__init__()
        self.how, self.count, self.altered = how, 0, None

    def reset(self) -> None:
        """Forget all."""
        super().reset()
        self.count, self.altered = 0, None


class QuantizedRows(_Compressed):
    """Keys and values of one layer; a pass reads its own tokens as they are, older ones rounded."""

    def update(self, key_states, value_states, *args, **kwargs):
        """The cached and the new, as they are read now; then what has aged is rounded."""
        read = super().update(key_states, value_states)
        n = self.how.n_compressed(self.keys.shape[-2])
        if n > self.count:
            old = slice(self.count, n)
            self.keys, self.values = (x.clone() for x in read)
            new = self.how.round(self.keys[..., old, :], self.values[..., old, :])
            self.keys[..., old, :], self.values[..., old, :] = new
            same = torch.equal(self.keys, read[0]) and torch.equal(self.values, read[1])
            self.count, self.altered = n, self.altered or not same
        return read


class SinksAndWindow(_Compressed):
    """Keys and values of one layer without those that were evicted."""

    def update(self, key_states, value_states, *args, **kwargs):
        """The cached and the new; then what is neither sink nor recent is dropped."""
        read = super().update(key_states, value_states)
        self.count, window = self.count + key_states.shape[-2], self.how.window
        if self.keys.shape[-2] > self.how.sinks + window:
            self.keys, self.values = (
                torch.cat([x[..., : self.how.sinks, :], x[..., x.shape[-2] - window :, :]], -2)
                for x in read
            )
        return read

    def _seq_length(self) -> int:
        """Tokens seen, which give new ones their positions."""
        return self.count

    def _mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that are read, and the number dropped before them."""
        held = self.keys.shape[-2] if self.count else 0
        return held + query_length, self.count - held

    get_seq_length, get_mask_sizes = _seq_length, _mask_sizes  # as transformers calls them


class ThroughCache(nn.Module):
    """A network whose every pass feeds its tokens through a compressed cache, a few at a time.

    For `compare_on`, which reads whole documents: so each token reads what the cache made of those
    before it, as in generation. Tokens of one step read each other as they are.

    Parameters
    ----------
    network : causal language model, or result of `load`.
    compression : QuantizedKV or EvictingKV; None feeds the same steps through an exact cache.
    step : tokens of one pass.
    """

    def __init__(
        self, network: Any, compression: QuantizedKV | EvictingKV | None, *, step: int = 1
    ) -> None:
        super().__init__()
        self.inner = getattr(network, "network", network)
        self.config, self.compression, self.step = self.inner.config, compression, step
        self.get_output_embeddings = self.inner.get_output_embeddings
        self.train(self.inner.training)

    @property
    def device(self) -> torch.device:
        """That of the network."""
        return self.inner.device

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        """Logits of all tokens, in an output of the network's own kind."""
        build = DynamicCache if self.compression is None else self.compression.build
        cache, found = build(config=self.config), []
        for start in range(0, input_ids.shape[1], self.step):
            end = start + self.step
            inputs = {"input_ids": input_ids[:, start:end], "cache": cache}
            out = self.inner(**inputs, attention_mask=attention_mask[:, :end], use_cache=True)
            found.append(out.logits)
        out.logits = torch.cat(found, 1)
        return out


def _rounded(x: torch.Tensor, fmt: Format | GgufFormat) -> torch.Tensor:
    return fmt.fitted(x.shape[-1]).round(x.detach().float().contiguous()).to(x.dtype)


def _cache(config: Any, layer: Any) -> Cache:
    plain = DynamicCache(config=config).layers
    if others := {type(each).__name__ for each in plain} - {"DynamicLayer"}:
        raise ValueError(f"`config` must have full attention in all layers; got {sorted(others)}")
    return Cache(layers=[layer() for _ in plain])


def kv_compressed(compression: QuantizedKV | EvictingKV) -> Optimization:
    """The entry of one compression; claims level 2 from 8 bits on, below and for eviction 3."""
    eight = getattr(getattr(compression, "keys", None), "bits", 0) >= 8
    alone = {"batch_size": 1} if isinstance(compression, EvictingKV) else {}

    def witness(seen: Any) -> str:
        names = {type(layer).__name__ for layer in compression.build(seen.network.config).layers}
        told = f"cache layers of class {', '.join(seen.cache)}, simulated: no memory is saved here"
        if seen.altered is False:
            return f"{VACUOUS}rounding changed no value of the cache"
        return told if seen.cache and set(seen.cache) <= names else ""

    return Optimization(
        name=compression.name,
        level="2" if eight else "3",
        changes=("cache", *alone),
        transform=lambda network: (network, {"cache": compression, **alone}),
        witness=witness,
        depends=lambda n, i: i > 0 and compression.n_compressed(n + i - 1) > 0,
        fault=stale_slot,
    )


def _by_token(name: str) -> QuantizedKV:
    fmt = number_format(name)
    return QuantizedKV(name=f"kv-{name}", keys=fmt, values=fmt)


def _kivi(bits: int) -> QuantizedKV:
    fmt = number_format(f"int{bits}-group32-asym")
    return QuantizedKV(name=f"kv-kivi-int{bits}", keys=fmt, values=fmt, block=32, residual=128)


COMPRESSIONS: dict[str, QuantizedKV | EvictingKV] = {
    each.name: each
    for each in (
        *map(_by_token, ("q8_0", "q4_0", "int8-channel", "int4-channel")),
        _kivi(4),
        _kivi(2),
        EvictingKV(name="kv-sinks"),
    )
}
ENTRIES = tuple(map(kv_compressed, COMPRESSIONS.values()))
