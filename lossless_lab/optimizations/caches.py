"""Other shapes of the key-value cache, with the same numbers in it."""

from __future__ import annotations

from collections.abc import Sequence

from lossless_lab.optimizations.entry import Optimization
from lossless_lab.optimizations.faults import stale_slot


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
ENTRIES = (STATIC,)
