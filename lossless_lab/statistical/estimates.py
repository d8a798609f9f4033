"""A table of statistics over tokens, each with its interval by document and its iid error."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ..stats.intervals import MIN_CLUSTERS, mean_upper_bound, token_mean_interval

PERCENTILES = (99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1)


class Estimate(NamedTuple):
    """A row of the table, without its name and unit."""

    value: float
    low: float = math.nan
    high: float = math.nan
    iid_se: float = math.nan

    def through_exp(self) -> Estimate:
        """Of exp(x), the error by the delta method."""
        value, *limits = np.exp(self[:3]).tolist()
        return Estimate(value, *limits, value * self.iid_se)


class Estimates:
    """Collects rows; knows which token belongs to which document."""

    def __init__(self, documents: np.ndarray, confidence: float) -> None:
        self.documents, self.confidence = documents, confidence
        self.rows: list[dict[str, Any]] = []

    def add(self, statistic: str, estimate: Estimate, unit: str) -> None:
        """One more row."""
        self.rows.append({"statistic": statistic, **estimate._asdict(), "unit": unit})

    def mean(self, x: np.ndarray) -> Estimate:
        """The token mean, its interval by document, and the error of independent tokens."""
        with np.errstate(invalid="ignore"):
            value, finite = float(np.mean(x)), np.isfinite(x).all()
        if not finite:
            return Estimate(value)
        iid_se = float(stats.sem(x)) if len(x) > 1 else math.nan
        if self.documents.max() + 1 < MIN_CLUSTERS:
            return Estimate(value, iid_se=iid_se)
        limits = token_mean_interval(x, self.documents, confidence=self.confidence)
        return Estimate(value, *limits, iid_se)

    def by_document(self, x: np.ndarray) -> Estimate:
        """Mean of x, each document counted once, from 0 up to its one-sided bound."""
        means = np.bincount(self.documents, x) / np.bincount(self.documents)
        if len(means) < MIN_CLUSTERS or not np.isfinite(means).all():
            return Estimate(float(np.mean(means)))
        high = mean_upper_bound(means, confidence=self.confidence)
        return Estimate(float(np.mean(means)), 0.0, high)

    def percentile(self, x: np.ndarray, q: float) -> Estimate:
        """At rank q (n − 1) / 100; an interval where 30 documents reach beyond it on each side."""
        value = _percentile(x, q)
        sides = (len(np.unique(self.documents[side])) for side in (x > value, x < value))
        if math.isnan(value) or min(sides) < MIN_CLUSTERS:
            return Estimate(value)
        low, high = token_mean_interval(x <= value, self.documents, confidence=self.confidence)
        half = 50 * (high - low)
        ranks = np.clip([q - half, q + half], 0, 100)
        return Estimate(value, *(_percentile(x, rank) for rank in ranks))

    def distribution(self, name: str, x: np.ndarray, unit: str) -> None:
        """Rows of the mean, the extremes and the percentiles."""
        self.add(f"mean {name}", self.mean(x), unit)
        self.add(f"maximum {name}", Estimate(float(np.max(x))), unit)
        for q in PERCENTILES:
            self.add(f"{'median' if q == 50 else f'{q:g} %'} {name}", self.percentile(x, q), unit)
        self.add(f"minimum {name}", Estimate(float(np.min(x))), unit)


def _percentile(x: np.ndarray, q: float) -> float:
    """At rank q (n − 1) / 100, linear in between; inf between a number and inf."""
    with np.errstate(invalid="ignore"):
        value = float(np.percentile(x, q))
    above = math.isnan(value) and not np.isnan(x).any()
    return float(np.percentile(x, q, method="higher")) if above else value
