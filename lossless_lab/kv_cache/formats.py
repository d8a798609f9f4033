"""Bytes that a stored element takes, for every format in which engines keep K and V."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lossless_lab.kv_cache.checks import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Elements are stored in blocks of `block`, which take `block_bytes` with their scales."""

    name: str
    block: int = 1
    block_bytes: float = 1
    head_bytes: int = 0  # scales per token and head, beside the elements

    @property
    def bits(self) -> float:
        """Bits per element, block scales included."""
        return 8 * self.block_bytes / self.block

    def row_bytes(self, heads: int, width: int) -> int:
        """Bytes of `heads` vectors of `width` elements: heads x width x block_bytes / block.

        Examples
        --------
        >>> FORMATS["q8_0"].row_bytes(8, 128)   # 1,024 elements in 32 blocks of 34 bytes
        1088
        """
        require(
            width % self.block == 0,
            f"`dtype` {self.name} has blocks of {self.block} elements; they do not divide a head"
            f" of width {width}",
        )
        return int(heads * width * self.block_bytes / self.block) + heads * self.head_bytes


# Names with the first one leading, elements and bytes of a block, bytes beside each head.
_ROWS = [
    ("float64 f64 fp64", 1, 8, 0),
    ("float32 f32 fp32 float", 1, 4, 0),
    ("float16 f16 fp16 half", 1, 2, 0),
    ("bfloat16 bf16 auto", 1, 2, 0),  # "auto", engines' own default, is a 16-bit float
    ("fp8 fp8_e4m3 fp8_e5m2 fp8_e4m3fn float8_e4m3fn float8_e5m2 f8", 1, 1, 0),
    ("int8 i8 uint8", 1, 1, 0),
    ("int4 i4 uint4", 2, 1, 0),
    ("int2", 4, 1, 0),
    # vLLM, vllm/v1/kv_cache_interface.py: one float32 scale per token and head, K and V each.
    ("fp8_per_token_head", 1, 1, 4),
    ("int8_per_token_head", 1, 1, 4),
    ("int4_per_token_head", 2, 1, 4),
    # vLLM, same file: packed 4-bit values and one fp8 scale per 16 of them.
    ("nvfp4 fp4 fp4_e2m1", 16, 9, 0),
    # vLLM, flashmla_sparse.py: fp8 latent with a float32 scale per 128, rope left in 16 bits.
    ("fp8_ds_mla", 1, 1, 0),
    # ggml/src/ggml-common.h, block structs.
    ("q8_0", 32, 34, 0),
    ("q6_0", 32, 26, 0),  # ik_llama.cpp only
    ("q5_1", 32, 24, 0),
    ("q5_0", 32, 22, 0),
    ("q4_1", 32, 20, 0),
    ("q4_0", 32, 18, 0),
    ("iq4_nl", 32, 18, 0),
    ("mxfp4", 32, 17, 0),
]  # fmt: skip
FORMATS = {
    alias: Format(name=names.split()[0], block=block, block_bytes=size, head_bytes=scale)
    for names, block, size, scale in _ROWS
    for alias in names.split()
}


def storage_format(dtype) -> Format:
    """The format of that name; "int4-g64" means groups of 64 with fp16 scale and zero point.

    Parameters
    ----------
    dtype : str, torch.dtype or Format
        A name as an engine spells it ("bf16", "q8_0", "fp8_e4m3"), or a Format of your own.

    Raises
    ------
    ValueError
        If no format has that name.

    Examples
    --------
    >>> storage_format("int4-g64").bits   # 4 bits, and 32 bits for every 64 elements
    4.5
    """
    if isinstance(dtype, Format):
        return dtype
    name = str(dtype).removeprefix("torch.").lower()
    grouped = re.fullmatch(r"int([248])[-_]g([1-9]\d*)", name)
    if grouped:
        bits, group = int(grouped[1]), int(grouped[2])
        return Format(name=name, block=group, block_bytes=group * bits / 8 + 4)
    require(
        name in FORMATS, f"`dtype` {dtype!r} is unknown; known are {', '.join(sorted(FORMATS))}"
    )
    return FORMATS[name]


def storage_formats(dtype) -> tuple[Format, Format]:
    """K's and V's formats: one name for both, a pair, or a mapping with "k" and "v"."""
    keyed = isinstance(dtype, dict)
    require(
        not keyed or set(dtype) == {"k", "v"},
        f"`dtype` {dtype!r} must have exactly the keys 'k' and 'v'",
    )
    pair = (dtype["k"], dtype["v"]) if keyed else dtype
    pair = pair if isinstance(pair, (tuple, list)) else (pair, pair)
    require(len(pair) == 2, f"`dtype` {dtype!r} must be one name, or a pair for K and V")
    return storage_format(pair[0]), storage_format(pair[1])
