"""Many p-values at once, over tokens, positions or prompts; and how one is printed."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

LEAST = 1e-290  # p-value: what floating point leaves of any test, Holm over all its tests


def holm(pvalues: ArrayLike) -> np.ndarray:
    """max over j ≤ i of (m − j + 1)·p_j, sorted: the chance of any false alarm stays below α.

    Parameters
    ----------
    pvalues : [m], whatever their dependence.

    Returns
    -------
    Adjusted p-values in the given order; compare each with α.

    Raises
    ------
    ValueError
        When one is not in [0, 1], or they are no list.

    Notes
    -----
    Source: Holm 1979, Scand. J. Statist. 6; equal to statsmodels' multipletests.

    >>> holm([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]
    """
    p = _pvalues(pvalues)
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(adjusted, 1)


def benjamini_hochberg(pvalues: ArrayLike) -> np.ndarray:
    """min over j ≥ i of m·p_j / j, sorted: at most a share α of the alarms is false.

    Notes
    -----
    Source: Benjamini and Hochberg 1995, through scipy.stats.false_discovery_control; for
    independent or positively dependent tests.

    >>> benjamini_hochberg([0.01, 0.04, 0.03]).round(4).tolist()
    [0.03, 0.04, 0.04]
    """
    return stats.false_discovery_control(_pvalues(pvalues))


def pvalue_text(pvalue: float, *, least: float = LEAST) -> str:
    """A p-value as "p = …", or as "p ≤ …" where it is no more than the least the test can give.

    Parameters
    ----------
    least : 1/(1 + n) of n resamples, or LEAST.

    >>> pvalue_text(0.0123), pvalue_text(0.001, least=0.001)
    ('p = 0.012', 'p ≤ 0.001 (the least this test can give)')
    """
    if math.isnan(pvalue):
        return "nothing to test"
    if pvalue > least:
        return f"p = {pvalue:.2g}"
    return f"p ≤ {least:.2g} (the least this test can give)"


def _pvalues(pvalues: ArrayLike) -> np.ndarray:
    p = np.asarray(pvalues, dtype=np.float64)
    if p.ndim != 1:
        raise ValueError(f"`pvalues` must be [m]; got shape {p.shape}")
    bad = np.flatnonzero(~((p >= 0) & (p <= 1)))
    if len(bad):
        raise ValueError(f"`pvalues` must lie in [0, 1]; got {p[bad[0]]} at {bad[0]}")
    return p
