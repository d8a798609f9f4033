"""What top-k log-probabilities still prove: the rest of both laws is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import kl_div


class KLBound(NamedTuple):
    """A KL that is at least `nats`, and the reference's mass on tokens that both lists name."""

    nats: float
    covered_mass: float


def kl_lower_bound(
    reference_top: Sequence[tuple[int, float]],
    candidate_top: Sequence[tuple[int, float]],
    *,
    resolution: float = 1e-6,
) -> KLBound:
    """Σ p ln(p/q) over shared tokens and one cell for all others: at most KL(reference‖candidate).

    Merging tokens can only lower a KL (log-sum inequality), so the bound holds whatever hides in
    the rest; every cell adds p ln(p/q) − p + q ≥ 0, so that it is never negative.

    Parameters
    ----------
    reference_top, candidate_top : (token id, ln p in nats) of one position, in any order
        Of the whole law's probabilities, not renormalised to the list. By id: texts of split
        characters collapse.
    resolution : mass that rounding of the candidate's log-probabilities may have taken from its
        rest; without it, a list that sums to 1 would make any other token impossible.

    Raises
    ------
    ValueError
        For an empty list, an id given twice, or probabilities that are no part of a law.

    Examples
    --------
    >>> import math
    >>> half = math.log(0.5)
    >>> found = kl_lower_bound([(0, half), (1, half)], [(0, math.log(0.25)), (7, half)])
    >>> round(found.nats, 4), found.covered_mass
    (0.1438, 0.5)
    """
    p, q = _law(reference_top, "reference_top"), _law(candidate_top, "candidate_top")
    shared = [token for token in p if token in q]
    a, b = (np.array([law[token] for token in shared]) for law in (p, q))
    rest_a = max(1 - a.sum(), 0.0)
    rest_b = max(1 - b.sum(), min(rest_a, resolution))
    bound = kl_div(a, b).sum() + kl_div(rest_a, rest_b)
    return KLBound(nats=float(bound), covered_mass=float(min(a.sum(), 1.0)))


def _law(top: Sequence[tuple[int, float]], name: str) -> dict[int, float]:
    if not top:
        raise ValueError(f"`{name}` must hold at least one token; no list is no evidence")
    law = {int(token): float(np.exp(logprob)) for token, logprob in top}
    if len(law) < len(top):
        raise ValueError(f"`{name}` must hold each token id once; got {len(top) - len(law)} twice")
    if not sum(law.values()) <= 1.01:  # two decimals of ln p; a NaN fails too
        raise ValueError(
            f"`{name}` must hold ln p of one law; its probabilities sum to {sum(law.values()):.6g}"
        )
    return law
