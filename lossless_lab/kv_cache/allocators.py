"""What an engine reserves for a geometry: the rules that all engines share."""

from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from lossless_lab.kv_cache.checks import checked, kinds_of, require
from lossless_lab.kv_cache.formats import FORMATS, Format, storage_format, storage_formats
from lossless_lab.kv_cache.geometry import Geometry, Layer
from lossless_lab.kv_cache.sizes import CannotEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a cache: so many sequences of so many tokens, in these formats."""

    seq_len: int  # tokens per sequence; an array in a sweep
    n_sequences: int
    key_format: Format
    value_format: Format
    encoder_len: int | None = None
    state_dtype: str | None = None
    tensor_parallel: int = 1
    num_beams: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of layer: what it reserves on one GPU, and what of that the tokens need."""

    kind: str
    n_layers: int
    row_bytes: int  # of one token in one layer; of one sequence for a state
    cells: int  # token slots over all sequences; sequences for a state
    bytes: int
    stored_bytes: int
    bytes_per_token: int  # what one more token of one sequence adds
    widths: str = ""

    @property
    def formula(self) -> str:
        """The product behind `bytes`, and what an engine's rounding made of it."""
        unit = "sequences" if self.kind == "state" else "cells"
        product = self.n_layers * self.row_bytes * self.cells
        text = f"{self.n_layers} layers x {self.row_bytes:,} B{self.widths} x {self.cells:,} {unit}"
        return text if product == self.bytes else f"{text}, kept as {self.bytes:,} B"


def ceil_to(n, multiple):
    """n rounded up to a multiple; works on arrays too."""
    return -(-n // multiple) * multiple


def at_most(n, limit):
    """The smaller of n, which may be an array, and a limit if there is one."""
    if limit is None:
        return n
    return min(n, limit) if isinstance(n, int) else np.minimum(n, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """Exactly what the tokens need, no rounding: the formula of papers and model cards."""

    name: ClassVar[str] = "stored"
    formats: ClassVar[str] = ""  # that the engine can keep; "": any
    state_format: ClassVar[str | None] = "float32"  # of recurrent states; None: the cache's dtype
    sparse_fp8: ClassVar[bool] = False  # indexer keys, and fp8 latents beside them, carry scales
    version: str = ""
    key_dtype: str | None = None  # where a launch flag sets it
    value_dtype: str | None = None

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            value = checked(field.name, value, kinds_of(type(self))[field.name], f" ({self.name})")
            object.__setattr__(self, field.name, value)

    def formats_of(self, dtype) -> tuple[Format, Format]:
        """K's and V's formats: what a launch flag says, else `dtype`; refused where unknown."""
        key, value = storage_formats(dtype)
        found = storage_format(self.key_dtype or key), storage_format(self.value_dtype or value)
        known = self.formats.split()
        for kept in found if known else ():
            said = f"`dtype` {kept.name} is no cache format of {self.name}, which has"
            require(kept.name in known, f"{said} {', '.join(known)}")
        return found

    def with_draft(self, shape: Geometry, draft: Geometry | None) -> list[Geometry]:
        """What is laid out together: the model, and the draft's cache on its own."""
        return [shape, draft] if draft else [shape]

    def cells(self, layer: Layer, request: Request):
        """Token slots that one such layer reserves, over all sequences."""
        return request.n_sequences * self.tokens(layer, request)

    def tokens(self, layer: Layer, request: Request):
        """Tokens that one sequence needs in such a layer."""
        if layer.kind == "cross":
            return self.encoder_tokens(request)
        return at_most(request.seq_len, layer.window)

    def encoder_tokens(self, request):
        """Encoder positions, which the request must state where the config does not."""
        said = "`encoder_len` must say how many encoder (or image) positions they hold"
        said = f"the model has cross-attention layers; {said}"
        require(request.encoder_len is not None, said, CannotEstimate)
        return request.encoder_len

    def widths(self, layer: Layer) -> tuple[int, int, int]:
        """Heads, key width and value width as this engine lays them out."""
        return layer.n_kv_heads, layer.key_dim, layer.value_dim

    def row_bytes(self, layer: Layer, request: Request, geometry: Geometry) -> int:
        """Bytes of one token in one such layer on one GPU."""
        heads, key_dim, value_dim = self.widths(layer)
        heads = shard(heads, request.tensor_parallel, geometry.n_heads, layer.kind)
        key, value = request.key_format, request.value_format
        scaled = layer.key_dim + layer.key_dim // 128 * 4  # fp8, a float32 scale per 128
        compressed = self.sparse_fp8 and layer.kind in ("latent", "indexer")
        sparse = compressed and geometry.of_kind("indexer")
        if layer.kind == "indexer" and sparse:
            return scaled
        if layer.kind == "latent" and heads == 1:
            if key.name == "fp8_ds_mla" or (sparse and key.name.startswith("fp8")):
                return scaled + 2 * layer.value_dim  # rope stays in 16 bits
            if key_dim == layer.key_dim:  # latent and rope are one vector, in one format
                return key.row_bytes(1, key_dim + value_dim)
        elif layer.kind != "indexer":
            said = f"`dtype` fp8_ds_mla is for MLA latents, not for {layer.kind} layers"
            require("fp8_ds_mla" not in (key.name, value.name), said)
        return key.row_bytes(heads, key_dim) + value.row_bytes(heads, value_dim)

    def columns(self, kernel: int, layer: Layer) -> int:
        """Columns kept of a causal convolution: what the next token needs."""
        return kernel - 1

    def state_bytes(self, layer: Layer, request: Request) -> int:
        """Bytes of one layer's states for one sequence on one GPU."""
        total, key = 0, request.key_format
        model = key.name if key.bits in (16, 32, 64) else "bf16"
        for state in layer.states:
            dtype = request.state_dtype or self.state_dtype(state) or model
            columns = self.columns(state.shape[-1], layer) if state.name == "conv" else 0
            elements = state.elements(columns=columns, tensor_parallel=request.tensor_parallel)
            total += elements * FORMATS[dtype].block_bytes
        return total

    def state_dtype(self, state) -> str | None:
        """The state's dtype, None for the model's."""
        fixed = state.name == "recurrent" and state.dtype != "model"
        return self.state_format if fixed else None

    def parts(self, geometry: Geometry, request: Request) -> list[Part]:
        """Everything reserved, one part per kind of layer and width."""
        return [self.part(layer, n, geometry, request) for layer, n in geometry.groups()]

    def part(self, layer: Layer, n_layers: int, geometry: Geometry, request: Request) -> Part:
        """What `n_layers` layers of this kind reserve."""
        state = layer.kind == "state"
        if state:
            row, cells, needed = self.state_bytes(layer, request), request.n_sequences, 1
        else:
            row = self.row_bytes(layer, request, geometry)
            cells, needed = self.cells(layer, request), Allocator.tokens(self, layer, request)
        grows = not state and layer.kind != "cross"
        grows = grows and (layer.window is None or request.seq_len < layer.window)
        return Part(
            kind=layer.kind, n_layers=n_layers, row_bytes=row, cells=cells,
            bytes=n_layers * row * cells, bytes_per_token=n_layers * row * grows,
            stored_bytes=n_layers * row * needed * request.n_sequences,
            widths="" if state else " ({} x ({} + {}))".format(*self.widths(layer)),
        )  # fmt: skip


def shard(kv_heads: int, tensor_parallel: int, n_heads: int, kind: str) -> int:
    """KV heads on one GPU: divided, or replicated where there are fewer heads than GPUs.

    Examples
    --------
    >>> [shard(8, tp, 64, "full") for tp in (1, 4, 16)]
    [8, 2, 1]
    """
    said = f"`tensor_parallel` {tensor_parallel}"
    require(n_heads % tensor_parallel == 0, f"{said} does not divide the {n_heads} attention heads")
    if kv_heads == 1:
        return kv_heads  # MQA and MLA's latent are whole on every GPU
    whole = max(kv_heads, tensor_parallel) % min(kv_heads, tensor_parallel) == 0
    said += f" neither divides nor is a multiple of the {kv_heads} KV heads of the {kind} layers"
    require(whole, said)
    return max(1, kv_heads // tensor_parallel)
