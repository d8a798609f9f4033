"""How often intervals over simulated corpora of correlated tokens hold the truth."""

from __future__ import annotations

import hashlib
import inspect
import math

import numpy as np
import pandas as pd
from scipy import signal, stats

from lossless_lab import paths
from lossless_lab.statistical.estimates import Estimates
from lossless_lab.stats.intervals import (
    bounded_mean_interval,
    cluster_mean_interval,
    mean_upper_bound,
    token_mean_interval,
)

TABLE = paths.DATA / "calibration" / "coverage.csv"
DOCUMENTS = (32, 128, 150)
LENGTHS = (20, 101)  # tokens of a document, all lengths as likely
COMMON, NEIGHBOUR = 0.3, 0.5  # share of a document in z's variance; correlation of neighbours
# What a token's value is, from its standard normal z.
VALUES = {
    "TV": lambda z: np.minimum(1, 0.01 * np.exp(z)),
    "KL": lambda z: 1e-4 * np.exp(1.5 * z),
    "same top token": lambda z: (z < 2).astype(float),
}
# interval -> values, the level claimed for it, and from how many documents on
CASES = {
    "token mean": ("TV", 0.92, 128),
    "token mean of KL": ("KL", 0.92, 128),
    "token mean of KL, longer is worse": ("KL", 0.92, 128),
    "share of the same top token": ("same top token", 0.92, 128),
    "median of KL": ("KL", 0.92, 128),
    "95 % percentile of KL": ("KL", 0.92, 128),
    "one-sided bound, skewness removed": ("TV", 0.95, 128),
    "one-sided bound, betting": ("TV", 0.95, 32),
    "one-sided bound, t": ("TV", math.nan, 0),
    "iid": ("TV", math.nan, 0),
    "iid of KL": ("KL", math.nan, 0),
}


def corpus(rng: np.random.Generator, n_documents: int, case: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and document numbers of all tokens: shared by document, and correlated along it."""
    n = rng.integers(*LENGTHS, n_documents)
    noise = rng.standard_normal((n_documents, LENGTHS[1] - 1))
    noise[:, 1:] *= math.sqrt(1 - NEIGHBOUR**2)
    along = signal.lfilter([1], [1, -NEIGHBOUR], noise, axis=1)
    z = math.sqrt(COMMON) * rng.standard_normal((n_documents, 1)) + math.sqrt(1 - COMMON) * along
    x = VALUES[CASES[case][0]](z)
    if "longer" in case:
        x = x * n[:, None] / 60
    there = np.arange(x.shape[1]) < n[:, None]
    return x[there], np.repeat(np.arange(n_documents), n)


def truth(case: str) -> float:
    """By integration over z, and over lengths where they matter."""
    values = VALUES[CASES[case][0]]
    if "percentile" in case or "median" in case:
        return float(values(stats.norm.ppf(0.5 if "median" in case else 0.95)))
    z = (np.arange(400_000) + 0.5) / 400_000 * 20 - 10
    mean = float(np.sum(values(z) * stats.norm.pdf(z)) * 20 / len(z))
    n = np.arange(*LENGTHS)
    return mean * float(np.mean(n**2) / np.mean(n) / 60) if "longer" in case else mean


def interval(case: str, x: np.ndarray, documents: np.ndarray) -> tuple[float, float, float]:
    """Estimate, lower and upper limit at 95 %."""
    if "percentile" in case or "median" in case:
        return Estimates(documents, 0.95).percentile(x, 50 if "median" in case else 95)[:3]
    if "bound" in case:
        means = np.bincount(documents, x) / np.bincount(documents)
        bounds = {
            "betting": lambda: bounded_mean_interval(means).high,
            "skewness removed": lambda: mean_upper_bound(means),
            "t": lambda: cluster_mean_interval(means, alternative="less").high,
        }
        return float(means.mean()), 0.0, bounds[case.split(", ")[1]]()
    if "iid" in case:
        half = stats.norm.isf(0.025) * stats.sem(x)
        return float(x.mean()), x.mean() - half, x.mean() + half
    return float(x.mean()), *token_mean_interval(x, documents)


def simulated(case: str, n_documents: int, n_repetitions: int, rng: np.random.Generator) -> dict:
    """How many intervals hold the truth, and their mean width against a simple valid one.

    For an interval that is 3.92 standard deviations of the estimate, which only a simulation
    knows; for a bound, Hoeffding's √(ln 20 / 2D) above the mean.
    """
    wanted = truth(case)
    found = [interval(case, *corpus(rng, n_documents, case)) for _ in range(n_repetitions)]
    value, low, high = np.array(found).T
    given = ~np.isnan(low)  # refused where too few documents reach beyond a percentile
    if "bound" in case:
        width = np.mean(high - value) / math.sqrt(math.log(20) / (2 * n_documents))
    else:
        wide = (high - low)[given]
        width = wide.mean() / (3.92 * value.std(ddof=1)) if len(wide) else math.nan
    hits, n = int(np.sum((low <= wanted) & (wanted <= high))), int(given.sum())
    return {
        "interval": case,
        "n_documents": n_documents,
        "covered": hits / n if n else math.nan,
        "width": float(width),
        "n_repetitions": n_repetitions,
        "n_given": n,
    }


def claim(row: dict) -> str:
    """A claim fails when the 99 % upper limit of the simulated coverage is below it."""
    _, level, start = CASES[row["interval"]]
    if math.isnan(level) or row["n_documents"] < start or not row["n_given"]:
        return "-"
    hits, n = round(row["covered"] * row["n_given"]), row["n_given"]
    high = stats.binomtest(hits, n).proportion_ci(0.98, method="exact").high
    return f"{level:.0%} " + ("holds" if high >= level else "FAILS")


def code() -> str:
    """Hash of what was simulated and of how."""
    parts = corpus, truth, interval, simulated, Estimates.percentile, token_mean_interval
    parts += mean_upper_bound, bounded_mean_interval, cluster_mean_interval
    text = "".join(map(inspect.getsource, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def calibrate(n_repetitions: int = 2000) -> pd.DataFrame:
    """One row per kind of interval and number of documents."""
    rows = []
    for i, case in enumerate(CASES):
        for n_documents in DOCUMENTS:
            rng = np.random.default_rng([i, n_documents])
            row = simulated(case, n_documents, n_repetitions, rng)
            rows.append(row | {"claim": claim(row), "code": code()})
    frame = pd.DataFrame(rows).round({"width": 3})
    frame.to_csv(TABLE, index=False)
    return frame
