"""What top-k log-probabilities still prove: the rest of both laws is unknown."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
) -> KLBound:
    """Σ p ln(p/q) over shared tokens and one cell for all others: at most KL(reference‖candidate).

    Merging tokens can only lower a KL (log-sum inequality), so the bound holds whatever hides in
    the rest; every cell adds p ln(p/q) − p + q ≥ 0, so that it is never negative.

    Parameters
    ----------
    reference_top, candidate_top : (token id, ln p in nats) of one position, in any order
        Of the whole law's probabilities, not renormalised to the list. Where a server gives no
        ids, the token's bytes, or else its text: those of split characters collapse.
    resolution : mass that rounding of the candidate's log-probabilities may have taken from its
        rest; without it, a list that sums to 1 would make any other token impossible.

    Raises
    ------
    ValueError
        For an empty list, or probabilities that are no part of a law.

    Examples
    --------
    >>> import math
    >>> half = math.log(0.5)
    >>> found = kl_lower_bound([(0, half), (1, half)], [(0, math.log(0.25)), (7, half)])
    >>> round(found.nats, 4), found.covered_mass
    (0.1438, 0.5)
    """
    p, q = _law(reference_top, "reference_top"), _law(candidate_top, "candidate_top")
    shared = [name for name in p if len(p[name]) == 1 == len(q.get(name, ()))]
    a, b = (np.array([law[name][0] for name in shared]) for law in (p, q))
    merged = np.array([x for masses in p.values() if len(masses) > 1 for x in masses])
    rest_a = max(1 - a.sum(), 0.0)
    rest_b = max(1 - b.sum(), min(rest_a, resolution))
    bound = kl_div(a, b).sum() + kl_div(rest_a, rest_b)
    covered = float(min(a.sum(), 1.0))
    return KLBound(float(bound), covered, len(merged), float(merged.sum()))


def _law(top: Sequence[tuple[Hashable, float]], side: str) -> dict[Hashable, list[float]]:
    """Probabilities by name."""
    if not len(top):
        raise ValueError(f"`{side}` must hold at least one token; no list is no evidence")
    law: dict[Hashable, list[float]] = {}
    for name, logprob in top:
        law.setdefault(name, []).append(float(np.exp(logprob)))
    if not (total := sum(map(sum, law.values()))) <= 1.01:  # two decimals of ln p; NaN fails too
        raise ValueError(
            f"`{side}` must hold ln p of one law; its probabilities sum to {total:.6g}"
        )
    return law
