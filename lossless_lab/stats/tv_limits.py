"""Upper limits of the total variation to a known law, from shares; no idea of models."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

_TANGENTS = 33


def weights(q: np.ndarray) -> np.ndarray:
    """q^⅔, floored where it would divide by nothing, summing to 1."""
    w = np.maximum(q, 1e-6 / len(q)) ** (2 / 3)
    return w / w.sum()


def share_limit(k: ArrayLike, n: int, alpha: float) -> np.ndarray:
    """Exact upper limit of a probability, of k in n draws.

    >>> round(float(share_limit(0, 59, 0.05)), 4)
    0.0495
    """
    k = np.asarray(k)
    return np.where(k < n, special.betainccinv(k + 1, np.maximum(n - k, 1), alpha), 1.0)


def any_limit(excess: Callable[[float], float], n: int, alpha: float) -> float:
    """Smallest over tangents slope·x + offset of the binomial limit u of offset + excess(slope)."""
    k = np.unique((n * np.sin(np.pi * np.arange(_TANGENTS) / (2 * _TANGENTS)) ** 2).astype(int))
    u, after = share_limit(k, n, alpha), share_limit(k + 1, n, alpha)
    slopes = n * (after - u)
    return float(min(u[i] - slopes[i] * k[i] / n + excess(slopes[i]) for i in range(len(k))))


def spread_limit(u: float, squares: float, q: np.ndarray, n: int, alpha: float) -> float:
    """Largest t whose 4t² the estimate u would not reject.

    Its variance is at most 4(max p/w)4t²/n + 2Σ(p/w)²/n², and p/w ≤ q/w + 2t where 4t² = U. Few
    pairs estimate too small a Σ(p/w)² and U together: it is taken as (1 + 4t²)Σ(q/w)² at least,
    what it is where all tokens gain or lose the share 2t of their q.
    """
    ratio, z = q / weights(q), -special.ndtri(alpha)
    expected = float((ratio**2).sum())

    def above(t: float) -> float:
        most = max(squares, (1 + 4 * t**2) * expected)
        variance = 16 * (ratio.max() + 2 * t) * t**2 / n + 2 * most / n**2
        return 4 * t**2 - max(u, 0.0) - z * math.sqrt(variance)

    return float(optimize.brentq(above, 0, 1)) if above(1) > 0 else 1.0


def mean_excess(q: np.ndarray, n: int, *, slope: float = 1.0) -> float:
    """Σ E(slope·X/n − q)₊ for X binomial(n, q), by the normal law and at most slope·q each.

    With slope 1 the mean of TV̂ for a perfect sampler; up to 8 % above it for tokens expected once.
    """
    gain, error = (slope - 1) * q, slope * np.sqrt(q * (1 - q) / n)
    z = np.divide(gain, error, out=np.zeros_like(q), where=error > 0)
    mean = gain * special.ndtr(z) + error * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return float(np.minimum(mean, slope * q).sum())
