"""How alike two texts are: supporting evidence that decides nothing."""

from __future__ import annotations

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

    Notes
    -----
    The normalised Indel similarity of rapidfuzz. No item is ever ignored for being frequent, which
    is what difflib does by default from 200 items on.

    Examples
    --------
    >>> similarity("4.00 GiB", "1.00 GiB"), similarity("", "")
    (0.875, 1.0)
    """
    if len(reference) == 0 and len(candidate) == 0:
        return 1.0
    return float(Indel.normalized_similarity(reference, candidate))
