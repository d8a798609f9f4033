"""Upper limits of the total variation to a known law, from shares; no idea of models."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, special, stats

_TANGENTS = 33


def weights(q: np.ndarray) -> np.ndarray:
    """q^⅔, floored where it would divide by nothing, summing to 1."""
    w = np.maximum(q, 1e-4 / len(q)) ** (2 / 3)
    return w / w.sum()


def any_limit(excess: Callable[[float], float], n: int, alpha: float) -> float:
    """Smallest over tangents slope·x + offset of the binomial limit u of offset + excess(slope)."""
    k = np.unique((n * np.sin(np.pi * np.arange(_TANGENTS) / (2 * _TANGENTS)) ** 2).astype(int))
    u, after = (np.append(stats.beta.isf(alpha, x[x < n] + 1, n - x[x < n]), x[x == n] / n)
                for x in (k, k + 1))  # fmt: skip
    slopes = n * (after - u)
    return float(min(u[i] - slopes[i] * k[i] / n + excess(slopes[i]) for i in range(len(k))))


def spread_limit(u: float, squares: float, q: np.ndarray, n: int, alpha: float) -> float:
    """Largest t whose 4t² the estimate u would not reject.

    Its variance is at most 4(max p/w)4t²/n + 2Σ(p/w)²/n², and p/w ≤ q/w + 2t where 4t² = U.
    """
    ratio = q / weights(q)
    squares, z = max(float((ratio**2).sum()), squares), stats.norm.isf(alpha)

    def above(t: float) -> float:
        variance = 16 * (ratio.max() + 2 * t) * t**2 / n + 2 * squares / n**2
        return 4 * t**2 - max(u, 0.0) - z * math.sqrt(variance)

    return float(optimize.brentq(above, 0, 1)) if above(1) > 0 else 1.0


def mean_excess(p: np.ndarray, q: np.ndarray, n: int, *, slope: float = 1.0) -> float:
    """Σ E(slope·X/n − q)₊ for X binomial(n, p); with Σ p = Σ q and slope 1, the mean TV̂."""
    if slope <= 0:
        return 0.0
    a = n * q / slope
    k = np.minimum(np.floor(a), n)
    tail = np.where(k > 0, special.bdtrc(np.minimum(np.maximum(k - 1, 0), n - 1), n - 1, p), 1.0)
    return float((slope * p * tail - q * special.bdtrc(k, n, p)).sum())
