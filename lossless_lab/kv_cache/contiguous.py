"""Engines whose cache is one tensor per layer: transformers, llama.cpp and its kin, whisper.cpp."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from lossless_lab.kv_cache.allocators import Allocator, at_most, ceil_to
from lossless_lab.kv_cache.checks import Count, Positive, require
from lossless_lab.kv_cache.facts import FACTS
from lossless_lab.kv_cache.sizes import CannotEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformers(Allocator):
    """transformers' own caches, as bytes held after `seq_len` tokens."""

    name: ClassVar[str] = "transformers"
    formats: ClassVar[str] = FACTS["engines"]["transformers"]["formats"]
    cache: Literal["dynamic", "static", "quanto", "hqq", "fp8"] = "dynamic"
    max_cache_len: Positive | None = None  # static: tokens allocated; default seq_len
    prefill_len: Positive | None = None  # quantised: tokens of the first forward; default seq_len
    nbits: Literal[1, 2, 4, 8] = 4
    group_size: Positive = 64
    residual_length: Positive = 128

    def __post_init__(self):
        Allocator.__post_init__(self)
        known = self.cache != "quanto" or self.nbits in (2, 4)
        require(known, f"`nbits` of quanto must be 2 or 4; received {self.nbits}")

    def tokens(self, layer, request):
        """A window keeps window - 1 tokens between forwards; a static one keeps all of it."""
        if layer.kind == "cross":
            return self.encoder_tokens(request)
        if self.cache == "static":
            allocated, asked = self.max_cache_len or request.seq_len, request.seq_len
            fits = np.all(asked <= allocated)
            require(fits, f"`seq_len` {asked} exceeds `max_cache_len` {allocated}")
            return at_most(allocated, layer.window)
        return at_most(request.seq_len, layer.window and layer.window - 1)

    def widths(self, layer):
        """MLA stays compressed; Falcon's grouped heads are repeated before they are kept."""
        repeated = layer.expanded and layer.kind != "latent"
        return layer.expanded if repeated else Allocator.widths(self, layer)

    def columns(self, kernel, layer):
        """A convolution keeps its whole kernel; Griffin's own module keeps kernel - 1."""
        griffin = len(layer.states) == 2 and len(layer.states[1].shape) == 1
        return kernel - 1 if griffin else kernel

    def part(self, layer, n_layers, geometry, request):
        """Quantised caches hold packed values with scales, and the newest tokens in full."""
        part = Allocator.part(self, layer, n_layers, geometry, request)
        if self.cache in ("dynamic", "static"):
            return part
        said = f"transformers refuses a quantised cache for {layer.kind} layers"
        require(layer.kind in ("full", "latent"), said, CannotEstimate)
        return replace(part, bytes=n_layers * self._quantised_bytes(layer, request))

    def _quantised_bytes(self, layer, request):
        """Bytes of one layer: whole groups of the flattened K or V, and the residual tokens."""
        asked, wide = request.seq_len, request.key_format.block_bytes
        prefill = self.prefill_len or asked
        require(prefill <= asked, f"`prefill_len` {prefill} exceeds `seq_len` {asked}")
        rows = request.n_sequences * layer.n_kv_heads
        if self.cache == "fp8":  # one float32 scale for the whole tensor
            return rows * asked * (layer.key_dim + layer.value_dim) + 8
        residual, total = (asked - prefill) % self.residual_length, 0
        for width in (layer.key_dim, layer.value_dim):
            elements = rows * (asked - residual) * width
            groups, rest = divmod(elements, self.group_size)
            said = f"`group_size` {self.group_size} does not divide the {elements} elements of K"
            require(not rest, said, CannotEstimate)
            total += elements * self.nbits // 8 + (groups * 2 + rows * residual * width) * wide
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCpp(Allocator):
    """llama.cpp: padded cells, a small cache for interleaved windows, float32 states."""

    name: ClassVar[str] = "llama.cpp"
    formats: ClassVar[str] = FACTS["engines"]["llama.cpp"]["formats"]
    n_ctx: Positive | None = None  # cells of all slots together, in place of sequences x seq_len
    n_ubatch: Positive = 512
    n_batch: Positive = 2048
    n_rs_seq: Count = 0  # snapshots of the states beside each, for speculative decoding
    flash_attn: bool | None = None  # None: the build's default, on since PR 15434 (Aug 2025)
    swa_full: bool = False
    kv_unified: bool = False
    mla: bool = True  # the file carries the absorbed projections
    swa_cells: Positive | None = None  # what a log says, in place of the rule

    def __post_init__(self):
        Allocator.__post_init__(self)
        if self.flash_attn is None:
            new = self.build >= 6325 or type(self) is not LlamaCpp
            object.__setattr__(self, "flash_attn", new)

    @property
    def build(self) -> int:
        """Build number ("b6123" or 6123); without one, newer than every rule here."""
        said = f"`version` {self.version!r} is no build number of {self.name}, such as b6500"
        require("." not in self.version, said)
        digits = re.search(r"\d+", self.version)
        return int(digits[0]) if digits else 10**9

    @property
    def padding(self) -> int:
        """Cells are padded to this; dates of the changes, builds near them are approximate."""
        if self.build < 1606:  # before PR 4280, 3 Dec 2023
            return 1
        if 6869 <= self.build < 6980:  # 28 Oct to 7 Nov 2025, between PR 16812 and 17046
            return 1
        if self.build >= 6980 or 2781 <= self.build < 2876:  # always; PR 7257 freed the rest
            return 256
        return 256 if self.flash_attn and self.build >= 2781 else 32

    def cells(self, layer, request):
        """Context cells, and for windows PAD(min(context, window x sequences + micro-batch))."""
        n = request.n_sequences
        streams = 1 if self.kv_unified or self.build < 6000 else n
        context = request.seq_len * (n // streams) if self.n_ctx is None else self.n_ctx // streams
        said = f"`seq_len` {request.seq_len} exceeds the {context} cells that `n_ctx` {self.n_ctx}"
        require(np.all(context >= request.seq_len), f"{said} leaves a sequence")
        context = ceil_to(context, self.padding)
        if layer.kind == "cross":
            return 0  # encoder outputs are read anew, not cached
        if layer.window is None or not self.windows:
            return streams * context
        if self.swa_cells is not None:
            return streams * self.swa_cells
        batch = at_most(streams * context, self.n_batch)
        if self.build >= 5555:  # before June 2025 the whole batch, not the micro-batch
            batch = at_most(batch, self.n_ubatch)
        window = layer.window * (n // streams) + batch
        if self.build >= 6980:
            return streams * ceil_to(at_most(context, window), 256)
        return streams * at_most(context, ceil_to(window, self.padding))

    @property
    def windows(self) -> bool:
        """Whether windows have a cache of their own, as since May 2025."""
        return not self.swa_full and self.build >= 5429

    def parts(self, geometry, request):
        """Only interleaved windows have a cache of their own; models that slide in every layer
        (Mistral, Phi-3, StarCoder2) are given full context."""
        attention = [x for x in geometry.layers if x.kind not in ("state", "cross")]
        if attention and all(layer.window is not None for layer in attention):
            geometry = geometry.without_windows()
        if not self.flash_attn and self.pads_values:
            geometry = replace(geometry, layers=tuple(map(_padder(attention), geometry.layers)))
        return Allocator.parts(self, geometry, request)

    def state_bytes(self, layer, request):
        """Speculative decoding keeps `n_rs_seq` snapshots beside each sequence's state."""
        return (1 + self.n_rs_seq) * Allocator.state_bytes(self, layer, request)

    @property
    def pads_values(self) -> bool:
        """Without flash attention, V is as wide as in the widest layer (since mid-2025)."""
        return self.build >= 6000

    def widths(self, layer):
        """MLA: K is latent + rope; before PR 19067 (Jan 2026) V repeats the latent beside it;
        before PR 12801 (Apr 2025), or without absorbed projections, every head is expanded."""
        if layer.kind == "latent" and (self.build < 5131 or not self.mla):
            return layer.expanded
        if layer.kind == "latent" and self.build < 7833:
            return 1, layer.key_dim + layer.value_dim, layer.key_dim
        return Allocator.widths(self, layer)

    def state_dtype(self, state):
        """Convolution and recurrent states are both float32."""
        return "float32"


def _padder(layers):
    """What widens V of each layer to the widest V, which is heads x width elements."""
    widest = max((x.n_kv_heads * x.value_dim for x in layers if x.expanded is None), default=0)

    def padded(layer):
        if layer.expanded or not layer.value_dim:
            return layer
        said = f"V of {widest} elements cannot be laid out in {layer.n_kv_heads} heads"
        require(widest % layer.n_kv_heads == 0, said, CannotEstimate)
        return replace(layer, value_dim=widest // layer.n_kv_heads)

    return padded


@dataclass(frozen=True, slots=True, kw_only=True)
class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp: every layer at full context; `mla_mode` decides what of MLA is kept."""

    name: ClassVar[str] = "ik_llama.cpp"
    formats: ClassVar[str] = FACTS["engines"]["ik_llama.cpp"]["formats"]
    pads_values: ClassVar[bool] = False
    windows: ClassVar[bool] = False
    mla_mode: Literal[0, 1, 2, 3] = 3

    @property
    def padding(self) -> int:
        """256 cells with flash attention, else 32."""
        return 256 if self.flash_attn else 32

    def widths(self, layer):
        """-mla 0 expands the heads; 1 keeps a transposed latent beside unless flash attention."""
        if layer.kind == "latent" and (self.mla_mode == 0 or not self.mla):
            return layer.expanded
        if layer.kind == "latent" and self.mla_mode == 1 and not self.flash_attn:
            return 1, layer.key_dim + layer.value_dim, layer.key_dim
        return Allocator.widths(self, layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperCpp(Allocator):
    """whisper.cpp: both caches padded to 256 since May 2024; beams share n + 2 self caches."""

    name: ClassVar[str] = "whisper.cpp"
    formats: ClassVar[str] = FACTS["engines"]["whisper.cpp"]["formats"]

    def cells(self, layer, request):
        """Text context or audio context, padded; version "2023" or "1.5" is before padding."""
        numbers = [int(n) for n in re.findall(r"\d+", self.version)] or [10**6]
        padded = numbers >= [2024] if numbers[0] > 1000 else numbers >= [1, 6]
        tokens = self.tokens(layer, request)
        tokens = ceil_to(tokens, 256) if padded else tokens
        beams = request.num_beams
        if beams == 1:
            return request.n_sequences * tokens
        requests = request.n_sequences // beams
        return requests * tokens * (1 if layer.kind == "cross" else beams + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ggml(Allocator):
    """ggml's example programs: the whole context of every layer, no padding, no windows."""

    name: ClassVar[str] = "ggml"
    formats: ClassVar[str] = FACTS["engines"]["ggml"]["formats"]

    def part(self, layer, n_layers, geometry, request):
        """Every query head has K and V of its own, also where the model shares them."""
        layer = replace(layer, n_kv_heads=geometry.n_heads)
        return Allocator.part(self, layer, n_layers, geometry, request)

    def tokens(self, layer, request):
        """Every position of the context."""
        return self.encoder_tokens(request) if layer.kind == "cross" else request.seq_len
