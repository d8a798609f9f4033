"""Engines that hand out blocks of tokens: vLLM, SGLang, TensorRT-LLM."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from math import lcm
from typing import ClassVar

import numpy as np

from lossless_lab.kv_cache.allocators import Allocator, Part, ceil_to
from lossless_lab.kv_cache.configs import CannotEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRT(Allocator):
    """TensorRT-LLM: blocks of 32 tokens; windows only where a maximum window is set."""

    name: ClassVar[str] = "tensorrt-llm"
    source: ClassVar[str] = "TensorRT-LLM tensorrt_llm/llmapi (KvCacheConfig.tokens_per_block = 32)"
    flags: ClassVar[dict[str, str]] = {"--tokens_per_block": "block_size"}
    state_format: ClassVar[str | None] = None
    block_size: int = 32
    n_tokens: int | None = None  # size of the pool, in place of sequences x seq_len

    def cells(self, layer, request):
        """Whole blocks of every sequence, or of the pool."""
        if layer.kind == "cross":
            return request.n_sequences * ceil_to(self.encoder_tokens(request), self.block_size)
        if self.n_tokens is not None:
            return ceil_to(self.n_tokens, self.block_size)
        return request.n_sequences * ceil_to(request.seq_len, self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLang(Allocator):
    """SGLang: token slots and one padding page; one more state slot than requests."""

    name: ClassVar[str] = "sglang"
    source: ClassVar[str] = "SGLang python/sglang/srt/mem_cache/memory_pool.py (size + page_size)"
    flags: ClassVar[dict[str, str]] = {
        "--page-size": "page_size",
        "--kv-cache-dtype": "key_dtype value_dtype",
        "--max-total-tokens": "n_tokens",
        "--swa-full-tokens-ratio": "swa_ratio",
    }
    page_size: int = 1
    n_tokens: int | None = None
    swa_ratio: float = 0.8  # slots of windowed layers per slot of full ones
    hybrid_swa: bool = True

    def cells(self, layer, request):
        """Slots of the pool, windowed layers' share of it, and the padding page."""
        if layer.kind == "cross":
            return request.n_sequences * self.encoder_tokens(request) + self.page_size
        if self.n_tokens is None:
            tokens = request.n_sequences * ceil_to(request.seq_len, self.page_size)
        else:
            tokens = self.n_tokens // self.page_size * self.page_size
        if layer.window is not None and self.hybrid_swa:
            tokens = tokens * int(self.swa_ratio * 1000) // 1000 // self.page_size * self.page_size
        return tokens + self.page_size

    def row_bytes(self, layer, request, n_heads):
        """An indexer key is fp8 with one float32 scale per 128 elements."""
        if layer.kind == "indexer":
            return layer.key_dim + layer.key_dim // 128 * 4
        return Allocator.row_bytes(self, layer, request, n_heads)

    def slots(self, request):
        """Requests, and the slot that padded tokens write to."""
        return request.n_sequences + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLM(Allocator):
    """vLLM: blocks per group of layers; hybrids align attention and state pages."""

    name: ClassVar[str] = "vllm"
    source: ClassVar[str] = (
        "vLLM vllm/v1/kv_cache_interface.py, v1/core/kv_cache_utils.py, platforms/interface.py,"
        " model_executor/layers/mamba/mamba_utils.py; 0.6 to 0.19"
    )
    flags: ClassVar[dict[str, str]] = {
        "--block-size": "block_size",
        "--kv-cache-dtype": "key_dtype value_dtype",
        "--max-num-batched-tokens": "max_num_batched_tokens",
        "--num-gpu-blocks-override": "n_blocks",
        "--disable-hybrid-kv-cache-manager": "flat",
        "--mamba-cache-mode": "mamba_cache_mode",
        "--mamba-ssm-cache-dtype": "ssm_dtype",
    }
    state_format: ClassVar[str | None] = None
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    n_blocks: int | None = None  # size of the pool, in place of what the sequences need
    flat: bool = False  # the hybrid manager is off: windows are kept like full attention
    mamba_cache_mode: str = "none"  # none | align | all
    mamba_chunk_size: int = 256
    ssm_dtype: str | None = None
    n_speculative_tokens: int = 0

    @property
    def release(self) -> tuple[int, ...]:
        """(0, 11) of "0.11.2"; without a version, newer than every rule here."""
        numbers = re.findall(r"\d+", self.version)
        return tuple(int(n) for n in numbers[:2]) or (99,)

    def state_dtype(self, state):
        """A recurrent state's dtype: the launch flag, the config's, else the model's."""
        return (self.ssm_dtype or state.dtype) if state.name == "recurrent" else None

    def columns(self, kernel, layer):
        """kernel - 1, and one more per speculative token."""
        return kernel - 1 + self.n_speculative_tokens

    def row_bytes(self, layer, request, n_heads):
        """An indexer key is fp8 with one float32 scale per 128 elements, whatever the dtype."""
        if layer.kind == "indexer":
            return layer.key_dim + layer.key_dim // 128 * 4
        return Allocator.row_bytes(self, layer, request, n_heads)

    def hybrid_block_size(self, geometry, request) -> int:
        """Attention block of a hybrid: the fewest tokens whose page holds one layer's state."""
        states = geometry.of_kind("state")
        attention = [layer for layer in geometry.layers if layer.kind != "state"]
        rows = {self.row_bytes(layer, request, geometry.n_heads) for layer in attention}
        if not states or not rows:
            return self.block_size
        page = max(self.state_bytes(layer, request) for layer in states)
        step = self.block_size
        if self.mamba_cache_mode == "all":
            step = lcm(self.mamba_chunk_size, step)
        return step * -(-page // (step * max(rows)))

    def blocks(self, layer, block, request):
        """Blocks that one sequence takes at most."""
        if layer.kind == "state":
            if self.mamba_cache_mode == "all":
                return -(-request.seq_len // block)
            return (2 if self.mamba_cache_mode == "align" else 1) + self.n_speculative_tokens
        if layer.kind == "cross":
            return -(-self.encoder_tokens(request) // block)
        if layer.window is None or self.flat:
            return -(-request.seq_len // block)
        if self.release < (0, 8):  # V0 kept a sequence's last window of blocks
            return -(-np.minimum(request.seq_len, layer.window) // block)
        batched = self.max_num_batched_tokens
        if layer.kind == "chunked":
            return -(-np.minimum(layer.window + batched, request.seq_len) // block)
        return -(-np.minimum(layer.window - 1 + batched, request.seq_len) // block) + 1

    def parts(self, geometry, request):
        """Pages of one size for all groups of layers; groups are padded to one number of layers."""
        kinds = {layer.window for layer in geometry.layers if layer.kind not in ("state", "cross")}
        if len(kinds) > 1 and (self.flat or self.release < (0, 10)):
            layers = tuple(replace(layer, window=None) for layer in geometry.layers)
            geometry = replace(geometry, layers=layers)
        base = self.hybrid_block_size(geometry, request)
        groups = Counter(replace(layer, index=0) for layer in geometry.layers)
        pages = {}
        for layer in groups:
            row = 0 if layer.kind == "state" else self.row_bytes(layer, request, geometry.n_heads)
            pages[layer] = row * base or self.state_bytes(layer, request)
        grouped = len({(x.kind == "state", x.window, x.kind == "cross") for x in groups}) > 1
        page = max(pages.values(), default=0)
        grouped = grouped and self.release >= (0, 14)
        size = _group_size(groups.values())
        result = []
        for layer, n_layers in groups.items():
            block = base
            if grouped and layer.kind != "state":
                if page % pages[layer]:
                    raise CannotEstimate(
                        f"vLLM cannot unify pages of {pages[layer]} and {page} bytes of this model"
                    )
                block = base * (page // pages[layer])
            padded = page if grouped or layer.kind == "state" else pages[layer]
            counted = ceil_to(n_layers, size) if grouped else n_layers
            result.append(self._part(layer, n_layers, counted, block, padded, geometry, request))
        if self.n_blocks is None:
            return result
        return [self._pooled(p, page, size if grouped else None, len(result)) for p in result]

    def _part(self, layer, n_layers, counted, block, page, geometry, request):
        """Blocks of the sequences for one kind of layer, beside what the tokens need."""
        stored = Allocator.part(self, layer, n_layers, geometry, request)
        if self.n_blocks is not None:
            blocks = self.n_blocks
        else:
            blocks = request.n_sequences * self.blocks(layer, block, request)
        return replace(
            stored,
            cells=blocks if layer.kind == "state" else blocks * block,
            bytes=counted * blocks * page,
        )

    def _pooled(self, part, page, group_size, n_parts) -> Part:
        """A pool of n_blocks is shared by all groups; it is booked on the first kinds evenly."""
        if group_size is None:
            return part
        return replace(part, bytes=group_size * page * self.n_blocks // n_parts)


def _group_size(counts) -> int:
    """Layers per group: the smallest kind's, or the largest's where it is under 1.5 times that.

    Examples
    --------
    >>> _group_size([10, 52]), _group_size([12, 13])   # Gemma 3 27B; gpt-oss with a draft layer
    (10, 13)
    """
    smallest, largest = min(counts, default=1), max(counts, default=1)
    return largest if largest < 1.5 * smallest else smallest
