"""Two runs on the same items: McNemar's test, Tango's interval, non-inferiority, items needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from ..results import Result
from ..stats.intervals import Interval
from ..stats.multiplicity import pvalue_text
from ..stats.power import check_fractions
from .items import TRUTH


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTable(Result):
    """The 2×2 table of items that each side answered right or wrong.

    Parameters
    ----------
    both, only_reference, only_candidate, neither : numbers of items, by who was right.

    Raises
    ------
    ValueError
        For a negative count, or no item at all.
    """

    both: int
    only_reference: int
    only_candidate: int
    neither: int

    def __post_init__(self) -> None:
        counts = (self.both, self.only_reference, self.only_candidate, self.neither)
        if min(counts) < 0 or not sum(counts):
            raise ValueError(f"counts must be 0 or more, with one item at least; got {counts}")

    @property
    def n(self) -> int:
        return self.both + self.only_reference + self.only_candidate + self.neither

    @property
    def difference(self) -> float:
        """Accuracy of the candidate minus that of the reference."""
        return (self.only_candidate - self.only_reference) / self.n

    @property
    def flip_rate(self) -> float:
        """Share of items that changed between right and wrong, in either direction."""
        return (self.only_candidate + self.only_reference) / self.n

    @property
    def accuracies(self) -> tuple[float, float]:
        """Of the reference and of the candidate."""
        right = self.both + self.only_reference, self.both + self.only_candidate
        return right[0] / self.n, right[1] / self.n

    def __str__(self) -> str:
        accuracies = "{:.3f} and {:.3f}".format(*self.accuracies)
        flips = f"{self.only_reference} lost, {self.only_candidate} gained"
        return (
            f"accuracy {accuracies} on {self.n} items, {100 * self.flip_rate:.1f} % flipped "
            f"({flips}; McNemar {pvalue_text(mcnemar(self))})"
        )


def paired_table(reference: Sequence[bool], candidate: Sequence[bool]) -> PairedTable:
    """Counts of items by who was right; the two lists are item by item the same items.

    Raises
    ------
    ValueError
        For lists of unlike or no length, and what is neither true nor false: a missing answer has
        to be counted as wrong, or left out on both sides, by whoever knows why it is missing.

    Examples
    --------
    >>> table = paired_table([True, True, False], [True, False, False])
    >>> table.both, table.only_reference, table.only_candidate, table.neither
    (1, 1, 0, 1)
    """
    sides = []
    for name, side in (("reference", reference), ("candidate", candidate)):
        right = [TRUTH.get(str(x).lower()) for x in side]
        if None in right:
            i = right.index(None)
            raise ValueError(f"`{name}`[{i}] must be true or false; got {list(side)[i]!r}")
        sides.append(np.array(right, bool))
    a, b = sides
    if len(a) != len(b):
        raise ValueError(f"both sides must score the same items; got {len(a)} and {len(b)}")
    return PairedTable(
        both=int((a & b).sum()),
        only_reference=int((a & ~b).sum()),
        only_candidate=int((~a & b).sum()),
        neither=int((~a & ~b).sum()),
    )


def mcnemar(table: PairedTable) -> float:
    """Exact two-sided p-value of "lost and gained items are equally likely": a fair coin's; not 0.

    Notes
    -----
    Source: McNemar 1947, in its exact binomial form. Equal accuracy is not shown by a large p.

    Examples
    --------
    >>> round(mcnemar(PairedTable(both=180, only_reference=15, only_candidate=3, neither=22)), 4)
    0.0075
    """
    n = table.only_reference + table.only_candidate
    p = stats.binomtest(table.only_candidate, n).pvalue if n else 1.0
    return max(float(p), float(np.finfo(float).tiny))


def score_interval(table: PairedTable, *, confidence: float = 0.95) -> Interval:
    """Tango's interval of the difference (candidate − reference), each limit one-sided.

    The differences d whose score test |b − c − nd| / √(n(2q + d(1 − d))) stays below z, q being the
    likeliest share of items lost if d were true.

    Parameters
    ----------
    confidence : of each limit alone, so that 0.975 gives the usual two-sided 95 % interval.

    Notes
    -----
    Source: Tango 1998, Statist. Med. 17, 891. Its true size at a nominal 5 % oscillates, up to
    about 6 %.

    Examples
    --------
    R's PropCIs gives [0.177034, 0.732008] for 7 gained, none lost of 14.

    >>> table = PairedTable(both=3, only_reference=0, only_candidate=7, neither=4)
    >>> [round(x, 6) for x in score_interval(table, confidence=0.975)]
    [0.177034, 0.732008]
    """
    check_fractions(confidence=confidence)
    z = float(stats.norm.ppf(confidence))
    mean, edge = table.difference, 1 - 1e-9
    low, high = -1.0, 1.0
    if mean > -edge and _score(table, -edge) > z:
        low = optimize.brentq(lambda d: _score(table, d) - z, -edge, mean)
    if mean < edge and _score(table, edge) < -z:
        high = optimize.brentq(lambda d: _score(table, d) + z, mean, edge)
    return Interval(float(low), float(high))


def items_needed(
    margin: float, discordance: float, *, power: float = 0.8, confidence: float = 0.95
) -> int:
    """n at which an equal candidate is shown non-inferior with this power: ψ ((z + z')/margin)².

    Parameters
    ----------
    margin : largest loss of accuracy that counts as none, in shares.
    discordance : ψ, the share of items on which the two sides differ.

    Examples
    --------
    One point at 5 % discordance takes about 3,100 items.

    >>> items_needed(0.01, 0.05)
    3092
    """
    if not (0 < margin < 1 and 0 < discordance <= 1):
        raise ValueError(
            f"`margin` and `discordance` must be above 0 and below 1; got {margin}, {discordance}"
        )
    return math.ceil(discordance * (_quantiles(power, confidence) / margin) ** 2)


def smallest_margin(
    n: int, discordance: float, *, power: float = 0.8, confidence: float = 0.95
) -> float:
    """The margin within which n items show an equal candidate non-inferior with this power.

    Examples
    --------
    >>> round(100 * smallest_margin(1319, 0.05), 2), round(100 * smallest_margin(300, 0.05), 1)
    (1.53, 3.2)
    """
    if not n >= 1:
        raise ValueError(f"`n` must be at least 1; got {n}")
    return float(_quantiles(power, confidence) * math.sqrt(discordance / n))


def _quantiles(power: float, confidence: float) -> float:
    check_fractions(power=power, confidence=confidence)
    return float(stats.norm.ppf(confidence) + stats.norm.ppf(power))


def non_inferiority(table: PairedTable, *, margin: float, confidence: float = 0.95) -> str:
    """ "EQUIVALENT" where the interval's lower limit is above −margin, "DIFFERENT" where the upper
    one is below it, else "INCONCLUSIVE". One-sided: a better candidate is not inferior.

    Examples
    --------
    >>> table = PairedTable(both=1290, only_reference=10, only_candidate=10, neither=9)
    >>> non_inferiority(table, margin=0.02), non_inferiority(table, margin=0.005)
    ('EQUIVALENT', 'INCONCLUSIVE')
    """
    if not 0 < margin < 1:
        raise ValueError(f"`margin` must be above 0 and below 1, a share of items; got {margin}")
    low, high = score_interval(table, confidence=confidence)
    return "EQUIVALENT" if low > -margin else "DIFFERENT" if high < -margin else "INCONCLUSIVE"


def finding(
    table: PairedTable, *, margin: float = 0.02, only: tuple[int, int] | None = None
) -> str:
    """ "the same accuracy, not the same behaviour" where both halves hold, else "".

    The same accuracy: as many right, or Tango's interval within ±`margin`. Not the same behaviour:
    more items flip than under a harmless re-ordering of the reference, by the exact one-sided test
    of the items that flip on one side alone. Either half is wrong at most 5 % of the time (the
    interval's 5 % oscillates), so the finding is too.

    Parameters
    ----------
    only : items that only the candidate flips, and that only the re-ordering does; None for a
        re-ordering that flips nothing, against which five flips are needed.

    Examples
    --------
    >>> twenty = PairedTable(both=150, only_reference=20, only_candidate=20, neither=30)
    >>> finding(twenty), finding(twenty, only=(25, 18))
    ('the same accuracy, not the same behaviour', '')
    """
    low, high = score_interval(table)
    same = table.difference == 0 or (-margin < low and high < margin)
    ours, theirs = only or (table.only_reference + table.only_candidate, 0)
    flips = stats.binom.sf(ours - 1, ours + theirs, 0.5)
    return "the same accuracy, not the same behaviour" if same and flips <= 0.05 else ""


def _score(table: PairedTable, d: float) -> float:
    """Tango's z of the hypothesis that the accuracies differ by d."""
    n, c, b = table.n, table.only_reference, table.only_candidate
    linear = -b - c + (2 * n - b + c) * d
    lost = (math.sqrt(max(linear**2 + 8 * n * c * d * (1 - d), 0.0)) - linear) / (4 * n)
    spread = math.sqrt(max(n * (2 * lost + d * (1 - d)), 0.0))
    gap = b - c - n * d
    return gap / spread if spread else math.copysign(math.inf, gap) if gap else 0.0
