"""Bytes that a stored element takes, for every format in which engines keep K and V."""

import re
from dataclasses import dataclass

from lossless_lab.kv_cache.checks import require
from lossless_lab.kv_cache.facts import FACTS


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


FORMATS = {
    alias: Format(
        name=row["names"].split()[0], block=row["block"], block_bytes=row["block_bytes"],
        head_bytes=row["head_bytes"],
    )
    for row in FACTS["formats"]
    for alias in row["names"].split()
}  # fmt: skip


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
