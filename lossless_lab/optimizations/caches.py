"""The same numbers in another shape: key-value caches, and several prompts in one pass."""

from collections.abc import Sequence

from lossless_lab.optimizations.entry import Optimization
from lossless_lab.optimizations.faults import ignore_padding, stale_slot


def after_the_first(lengths: Sequence[int], rows: Sequence[int]) -> int:
    """Positions that read the cache: every one but the first of a sequence, which prefill makes.

    >>> after_the_first([3, 1], [1, 1])
    2
    """
    return sum(max(length - 1, 0) for length in lengths)


STATIC = Optimization(
    name="static-cache",
    level="1c",
    changes=("cache",),
    transform=lambda network: (network, {"cache": "static"}),
    witness=lambda seen: (
        f"cache layers of class {', '.join(seen.cache)}"
        if seen.cache and all(name.startswith("Static") for name in seen.cache)
        else ""
    ),
    exercised=after_the_first,
    fault=stale_slot,
)


def in_company(lengths: Sequence[int], rows: Sequence[int]) -> int:
    """Positions of sequences that shared their batch with another.

    >>> in_company([3, 2, 4], [2, 2, 1])
    5
    """
    return sum(length for length, n in zip(lengths, rows, strict=True) if n > 1)


def batch(size: int) -> Optimization:
    """Batches of `size` prompts, padded on the left; claims level 1c."""
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


ENTRIES = (STATIC, batch(8))
