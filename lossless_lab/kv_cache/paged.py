"""Engines that hand out blocks of tokens: vLLM, SGLang, TensorRT-LLM."""

import re
from dataclasses import dataclass, replace
from math import lcm
from typing import ClassVar, Literal

from lossless_lab.kv_cache.allocators import Allocator, at_most, ceil_to
from lossless_lab.kv_cache.checks import Count, FloatDtype, Positive, Share, require
from lossless_lab.kv_cache.facts import FACTS
from lossless_lab.kv_cache.sizes import CannotEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRT(Allocator):
    """TensorRT-LLM: blocks of 32 tokens; windows only where a maximum window is set."""

    name: ClassVar[str] = "tensorrt-llm"
    formats: ClassVar[str] = FACTS["engines"]["tensorrt-llm"]["formats"]
    state_format: ClassVar[str | None] = None
    block_size: Positive = 32
    n_tokens: Positive | None = None  # size of the pool, in place of sequences x seq_len

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
    formats: ClassVar[str] = FACTS["engines"]["sglang"]["formats"]
    sparse_fp8: ClassVar[bool] = True
    page_size: Positive = 1
    n_tokens: Positive | None = None
    swa_ratio: Share = 0.8  # slots of windowed layers per slot of full ones
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

    def part(self, layer, n_layers, geometry, request):
        """One more state slot than requests: padded tokens write to it."""
        part = Allocator.part(self, layer, n_layers, geometry, request)
        if layer.kind != "state":
            return part
        slots = part.cells + 1
        return replace(part, cells=slots, bytes=n_layers * part.row_bytes * slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLM(Allocator):
    """vLLM: blocks per group of layers; hybrids align attention and state pages."""

    name: ClassVar[str] = "vllm"
    formats: ClassVar[str] = FACTS["engines"]["vllm"]["formats"]
    state_format: ClassVar[str | None] = None
    sparse_fp8: ClassVar[bool] = True
    block_size: Positive = 16
    max_num_batched_tokens: Positive = 8192
    n_blocks: Positive | None = None  # size of the pool, in place of what the sequences need
    flat: bool = False  # the hybrid manager is off: windows are kept like full attention
    mamba_cache_mode: Literal["none", "align", "all"] = "none"
    mamba_chunk_size: Positive = 256
    ssm_dtype: FloatDtype | None = None
    n_speculative_tokens: Count = 0
    mtp: bool = True  # speculation uses the model's own layers, where it has them and no draft

    @property
    def release(self) -> tuple[int, ...]:
        """(0, 11) of "0.11.2"; without a version, newer than every rule here."""
        numbers = re.findall(r"\d+", self.version)
        return tuple(int(n) for n in numbers[:2]) or (99,)

    def with_draft(self, shape, draft):
        """A draft's layers, or the model's own for multi-token prediction, join its groups."""
        own = shape.mtp_layers() if self.n_speculative_tokens and self.mtp else ()
        return [replace(shape, layers=shape.layers + (draft.layers if draft else own))]

    def state_dtype(self, state):
        """A recurrent state's dtype: the launch flag, the config's, else the model's; NemotronH's
        is float32 where its file says nothing, since pull request 39032 (Apr 2026)."""
        unstated = "float32" if self.release >= (0, 20) else None
        fixed = {"model": None, "unstated": unstated}.get(state.dtype, state.dtype)
        return (self.ssm_dtype or fixed) if state.name == "recurrent" else None

    def widths(self, layer):
        """Before 0.7.1 MLA was expanded, and K and V padded alike, to 256 where wider than 128."""
        if layer.kind == "latent" and self.release < (0, 7):
            width = 256 if layer.expanded[1] > 128 else layer.expanded[1]
            return layer.expanded[0], width, width
        return Allocator.widths(self, layer)

    def columns(self, kernel, layer):
        """kernel - 1, and one more per speculative token."""
        return kernel - 1 + self.n_speculative_tokens

    def hybrid_block_size(self, geometry, request) -> int:
        """Attention block of a hybrid: the fewest tokens whose page holds one layer's state."""
        kinds = [layer for layer, _ in geometry.groups()]
        pages = [self.state_bytes(x, request) for x in kinds if x.kind == "state"]
        if not pages or len(pages) == len(kinds):
            return self.block_size
        rows = [self.row_bytes(x, request, geometry) for x in kinds if x.kind != "state"]
        step = self.block_size
        if self.mamba_cache_mode == "all":
            step = lcm(self.mamba_chunk_size, step)
        return step * -(-max(pages) // (step * max(rows)))

    def blocks(self, layer, block, request):
        """Blocks that one sequence takes at most."""
        if layer.kind == "state":
            if self.mamba_cache_mode == "all":
                return -(-request.seq_len // block)
            return (2 if self.mamba_cache_mode == "align" else 1) + self.n_speculative_tokens
        if layer.kind == "cross":
            return -(-self.encoder_tokens(request) // block)
        if layer.window is None:
            return -(-request.seq_len // block)
        if self.release < (0, 8):  # V0 kept a sequence's last window of blocks
            return -(-at_most(request.seq_len, layer.window) // block)
        batched = self.max_num_batched_tokens
        if layer.kind == "chunked":
            return -(-at_most(request.seq_len, layer.window + batched) // block)
        return -(-at_most(request.seq_len, layer.window - 1 + batched) // block) + 1

    def parts(self, geometry, request):
        """Pages of one size for all groups of layers; groups are padded to one number of layers."""
        windows = {x.window for x in geometry.layers if x.kind not in ("state", "cross")}
        if self.flat or (len(windows) > 1 and self.release < (0, 10)):
            geometry = geometry.without_windows()
        base = self.hybrid_block_size(geometry, request)
        groups = dict(geometry.groups())
        rows = {x: Allocator.part(self, x, n, geometry, request) for x, n in groups.items()}
        pages = {x: p.row_bytes * (1 if x.kind == "state" else base) for x, p in rows.items()}
        page = max(pages.values(), default=0)
        kinds = {(x.kind == "state", x.window, x.kind == "cross") for x in groups}
        grouped = len(kinds) > 1 and self.release >= (0, 14)
        size = _group_size(groups.values()) if grouped else 1
        parts = []
        for layer, part in rows.items():
            wide = grouped and layer.kind != "state"
            said = f"vLLM cannot unify pages of {pages[layer]} and {page} bytes"
            require(not wide or page % pages[layer] == 0, said, CannotEstimate)
            block = base * (page // pages[layer]) if wide else base
            blocks = self.n_blocks or request.n_sequences * self.blocks(layer, block, request)
            bought = page if grouped or layer.kind == "state" else pages[layer]
            total = ceil_to(part.n_layers, size) * blocks * bought
            if self.n_blocks and grouped:  # one pool for all groups, booked on each alike
                total = size * page * blocks // len(groups)
            cells = blocks if layer.kind == "state" else blocks * block
            parts.append(replace(part, cells=cells, bytes=total))
        return parts


def _group_size(counts) -> int:
    """Layers per group: the smallest kind's, or the largest's where it is under 1.5 times that.

    Examples
    --------
    >>> _group_size([10, 52]), _group_size([12, 13])   # Gemma 3 27B; gpt-oss with a draft layer
    (10, 13)
    """
    smallest, largest = min(counts, default=1), max(counts, default=1)
    return largest if largest < 1.5 * smallest else smallest
