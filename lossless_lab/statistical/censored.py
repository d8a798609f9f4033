"""What top-k log-probabilities still prove: the rest of both laws is unknown."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from decimal import Decimal
from typing import NamedTuple

import numpy as np
from scipy.special import kl_div


class KLBound(NamedTuple):
    """A KL that is at least `nats`, and the reference's mass on tokens that both lists name.

    n_merged entries of the reference's list, of merged_mass together, share their name with
    others, so that nothing tells them apart: they count with the rest.
    """

    nats: float
    covered_mass: float
    n_merged: int = 0
    merged_mass: float = 0.0


def kl_lower_bound(
    reference_top: Sequence[tuple[Hashable, float]],
    candidate_top: Sequence[tuple[Hashable, float]],
    *,
    resolution: float = 1e-6,
    rounding: float | None = None,
) -> KLBound:
    """Σ p ln(p/q) over shared tokens and one cell for all others: at most KL(reference‖candidate).

    Merging tokens can only lower a KL (log-sum inequality), so the bound holds whatever hides in
    the rest; every cell adds p ln(p/q) − p + q ≥ 0, so that it is never negative, and the least of
    it that rounding of both lists allows.

    Parameters
    ----------
    reference_top, candidate_top : (token id, ln p in nats) of one position, in any order
        Of the whole law's probabilities, not renormalised to the list. Where a server gives no
        ids, the token's bytes, or else its text: those of split characters collapse.
    resolution : mass that rounding of the candidate's log-probabilities may have taken from its
        rest; without it, a list that sums to 1 would make any other token impossible.
    rounding : nats by which each ln p may be off, on either side; by default half a unit of the
        last decimal place that its own list shows.

    Raises
    ------
    ValueError
        For an empty list, probabilities that are no part of a law, or a rounding below 0.

    Examples
    --------
    >>> import math
    >>> half = math.log(0.5)
    >>> found = kl_lower_bound([(0, half), (1, half)], [(0, math.log(0.25)), (7, half)])
    >>> round(found.nats, 4), found.covered_mass
    (0.1438, 0.5)
    """
    if rounding is not None and not 0 <= rounding < math.inf:
        raise ValueError(f"`rounding` must be at least 0 nats and finite; got {rounding}")
    tops = reference_top, candidate_top
    off = [_half_a_unit(top) if rounding is None else rounding for top in tops]
    p, q = map(_law, tops, ("reference_top", "candidate_top"), off)
    shared = [name for name in p if len(p[name]) == 1 == len(q.get(name, ()))]
    a, b = (np.array([law[name][0] for name in shared]) for law in (p, q))
    merged = np.array([x for masses in p.values() if len(masses) > 1 for x in masses])
    (a_low, a_high), (b_low, b_high) = map(_cells, (a, b), off)
    b_high[-1] = max(b_high[-1], resolution)
    nearest = np.clip(a_low, b_low, b_high)
    bound = kl_div(np.clip(nearest, a_low, a_high), nearest).clip(0).sum()
    covered = float(min(a.sum(), 1.0))
    return KLBound(float(bound), covered, len(merged), float(merged.sum()))


def _cells(masses: np.ndarray, off: float) -> tuple[np.ndarray, np.ndarray]:
    """Least and most of each mass, and last of the rest, where each ln p may be off."""
    low, high = masses * math.exp(-off), masses * math.exp(off)
    rest = np.maximum([1 - high.sum(), 1 - low.sum()], 0)
    return np.append(low, rest[0]), np.append(high, rest[1])


def _half_a_unit(top: Sequence[tuple[Hashable, float]]) -> float:
    """Of the last decimal place that any of the log-probabilities has."""
    shown = (Decimal(str(np.asarray(x))) for _, x in top if x is not None and math.isfinite(x))
    return 0.5 * 10.0 ** min((x.as_tuple().exponent for x in shown), default=0)


def _law(top: Sequence, side: str, off: float) -> dict[Hashable, list[float]]:
    """Probabilities by name."""
    if not len(top):
        raise ValueError(f"`{side}` must hold at least one token; no list is no evidence")
    law: dict[Hashable, list[float]] = {}
    for name, logprob in top:
        reported = np.nan if logprob is None else logprob  # null, as some servers send
        law.setdefault(name, []).append(float(np.exp(reported)))
    if not (total := sum(map(sum, law.values()))) <= 1.01 * math.exp(off):  # NaN fails too
        raise ValueError(
            f"`{side}` must hold ln p of one law; its probabilities sum to {total:.6g}"
        )
    return law
