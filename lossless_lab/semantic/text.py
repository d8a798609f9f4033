"""How alike two texts are: supporting evidence that decides nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rapidfuzz.distance import Indel


def similarity(reference: Sequence, candidate: Sequence) -> float:
    """2·LCS / (n + m): the share of items in a longest common subsequence, the same both ways.

    Parameters
    ----------
    reference, candidate : two texts (compared by character) or two lists of token ids.

    Returns
    -------
    float in [0, 1]; 1 exactly where the two are equal, two empty ones included, and never else.

    Raises
    ------
    TypeError
        For a text against a list.

    Notes
    -----
    The normalised Indel similarity of rapidfuzz. No item is ever ignored for being frequent, which
    is what difflib does by default from 200 items on. High values prove little: one digit changed
    in a sentence leaves it near 1.

    Examples
    --------
    >>> similarity("4.00 GiB", "1.00 GiB"), similarity("", "")
    (0.875, 1.0)
    """
    if isinstance(reference, str) != isinstance(candidate, str):
        raise TypeError(
            "`reference` and `candidate` must both be texts or both lists of ids; "
            f"got {type(reference).__name__} and {type(candidate).__name__}"
        )
    return float(Indel.normalized_similarity(reference, candidate))


def shown(similarity: float) -> str:
    """Three decimals, rounded down, so that only what is equal reads as 1.000.

    Examples
    --------
    >>> shown(similarity("a" * 20_000, "a" * 19_999 + "b")), shown(1.0)
    ('0.999', '1.000')
    """
    return f"{math.floor(similarity * 1000) / 1000:.3f}"
