"""From tokens to whole sequences: what adds up, on which text, and what only bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from ..results import Result
from ..stats.intervals import cluster_mean_interval
from .distances import MEASURES


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDistance(Result):
    """Distance between two laws of whole sequences of n_tokens after one prompt.

    Parameters
    ----------
    kl_nats, low, high : KL(reference‖candidate) of sequences, and its interval over sequences
    confidence : of the interval, two-sided
    tv_at_most : the smaller of T × mean TV and √(KL/2), at most 1; of the estimates, without error
    n_sequences, n_tokens : how many were drawn from the reference, and their length
    """

    kl_nats: float
    low: float
    high: float
    confidence: float
    tv_at_most: float
    n_sequences: int
    n_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.n_sequences} sequences of {self.n_tokens} tokens drawn from the reference: "
            f"KL(reference‖candidate) {self.kl_nats:.3g} nats [{self.low:.3g}, {self.high:.3g}] "
            f"per sequence, TV of sequences at most about {self.tv_at_most:.3g}"
        )


def sequence_distance(frame: pd.DataFrame, *, confidence: float = 0.95) -> SequenceDistance:
    """KL(P‖Q) of sequences = E Σₜ KL(P(·|x<t)‖Q(·|x<t)), x drawn from P: the chain rule.

    On any other text the sum is no distance between sequences, so only a table that says that its
    tokens were drawn from the reference is taken.

    Parameters
    ----------
    frame : one row per drawn token, with columns document (the sequence) and drawn_from
        As `pipeline.corpus.compare_sequences` makes it; drawn_from is "reference" in every row.

    Raises
    ------
    ValueError
        For text that was not drawn from the reference, sequences of unequal length, fewer than
        30 of them, or a KL that is NaN or inf.

    Examples
    --------
    >>> rows = pd.DataFrame({"document": sorted([*range(30)] * 2), "drawn_from": "reference"})
    >>> rows[["kl_reference_candidate_nats", "total_variation"]] = [0.02, 0.01]
    >>> found = sequence_distance(rows)
    >>> round(found.kl_nats, 6), round(found.tv_at_most, 6)
    (0.04, 0.02)
    """
    origin = frame.get("drawn_from", pd.Series("a corpus", frame.index))
    if (other := origin[origin != "reference"]).size:
        raise ValueError(
            "`frame` must hold tokens drawn from the reference, on which alone KL adds up; "
            f"got text of {other.iloc[0]} in row {other.index[0]}"
        )
    table = frame.groupby("document")
    lengths = table.size()
    if lengths.nunique() != 1:
        raise ValueError(f"`frame` must hold sequences of one length; got {lengths.unique()}")
    sums = table[[MEASURES[0], "total_variation"]].sum(skipna=False)
    low, high = cluster_mean_interval(sums[MEASURES[0]], confidence=confidence)
    kl, tv = sums.mean().tolist()
    return SequenceDistance(
        kl_nats=kl,
        low=max(low, 0.0),
        high=high,
        confidence=confidence,
        tv_at_most=min(tv, math.sqrt(kl / 2), 1.0),
        n_sequences=len(sums),
        n_tokens=int(lengths.iloc[0]),
    )
