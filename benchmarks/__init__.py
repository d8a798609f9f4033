"""Times that are quoted anywhere: one module per room, each with a function `bench()`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One quoted time, beside the best known alternative where there is one."""

    name: str
    seconds: float
    alternative: str = ""
    alternative_seconds: float | None = None
    limit: float | None = None  # on the ratio where there is an alternative, else on the seconds

    @property
    def ratio(self) -> float | None:
        """Seconds as a multiple of the alternative's."""
        return self.alternative_seconds and self.seconds / self.alternative_seconds

    @property
    def within(self) -> bool:
        """Whether the limit holds; true where none is stated."""
        measured = self.seconds if self.ratio is None else self.ratio
        return self.limit is None or measured <= self.limit


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, repeats: int = 5, warm_up: int = 1
) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, so that a slow spell hits all alike.

    >>> sorted(interleaved({"a": lambda: 0, "b": lambda: 0}, repeats=3))
    ['a', 'b']
    """
    seconds = {name: [] for name in calls}
    for turn in range(warm_up + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
