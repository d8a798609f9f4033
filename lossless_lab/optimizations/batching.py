"""Several prompts in one forward pass, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence

from lossless_lab.optimizations.entry import Optimization
from lossless_lab.optimizations.faults import ignore_padding


def in_company(lengths: Sequence[int], rows: Sequence[int]) -> int:
    """Positions of sequences that shared their batch with another.

    >>> in_company([3, 2, 4], [2, 2, 1])
    5
    """
    return sum(length for length, n in zip(lengths, rows, strict=True) if n > 1)


def batch(size: int) -> Optimization:
    """Batches of `size` prompts; claims level 1c."""
    if size < 2:
        raise ValueError(f"`size` must be at least 2 to be a batch; got {size}")
    return Optimization(
        name=f"batch-{size}",
        level="1c",
        changes=("batch_size",),
        transform=lambda network: (network, {"batch_size": size}),
        witness=lambda seen: f"{seen.rows} rows in one pass" if seen.rows > 1 else "",
        exercised=in_company,
        fault=ignore_padding,
    )


ENTRIES = (batch(8),)
