"""The difference of two tensors: how large, where, in which rounding steps, noise or bias."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from ..results import Result
from .bias import BiasTest, t_test
from .nonfinite import Index, Nonfinite, count_nonfinite
from .ulps import paired, ulp_quantiles

_CHUNK = 1 << 16  # elements per chunk in higher precision: 512 KiB in float64, in cache


class Extreme(NamedTuple):
    """A largest value and its index."""

    value: float
    index: Index


class Sums(NamedTuple):
    """Σd², Σx², Σy², Σxy and max |d| over n pairs, d = y − x, and what follows from them."""

    n: int
    difference: float
    reference: float
    candidate: float
    product: float
    largest: float

    @property
    def relative_rms(self) -> float:
        """√(Σd² / Σx²); NaN without pairs, and where float64 has no squares so small."""
        if not self.difference:
            return 0.0 if self.n and not self.largest else math.nan
        return math.sqrt(self.difference / self.reference) if self.reference else math.inf

    @property
    def figures(self) -> dict[str, float]:
        """The row of a table; NaN or inf in any pair reaches every figure it is part of."""
        norms = self.reference, self.candidate
        cosine = math.nan
        if all(norms):
            cosine = self.product / math.sqrt(self.reference) / math.sqrt(self.candidate)
        return {
            "rms_difference": math.sqrt(self.difference / self.n) if self.n else math.nan,
            "rms_reference": math.sqrt(self.reference / self.n) if self.n else math.nan,
            "relative_rms": self.relative_rms,
            "max_abs_difference": self.largest,
            "sqnr_db": -20 * math.log10(self.relative_rms) if self.relative_rms else math.inf,
            "cosine": 1.0 if self.relative_rms == 0 else cosine,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference(Result):
    """How a candidate tensor differs from the reference.

    Parameters
    ----------
    nonfinite : Nonfinite
        NaN and inf by side and place; every other figure is over the pairs finite on both sides.
    sums : Sums
    max_abs, max_rel : Extreme
        Largest |d| and |d| / |reference|, with their index.
    mismatch_share : float
        Share of finite pairs that are not equal.
    ulps : dict
        Quantile (.5, .9, .99, 1) -> ULP distance of the pairs not near zero (|reference| at least
        1/64 of its RMS), exact up to 256, rounded down by at most .8 % above; NaN without pairs.
    shift, scale : BiasTest
        Of the mean signed difference, and of Σ d·x / Σ x², each position (or group) one unit.
    """

    nonfinite: Nonfinite
    sums: Sums
    max_abs: Extreme
    max_rel: Extreme
    mismatch_share: float
    ulps: dict[float, float]
    shift: BiasTest
    scale: BiasTest

    @property
    def answer(self) -> str:
        """ "equal", "not finite" (NaN or inf on one side, or nothing else), "bias" (either test,
        each at 2.5 %), "no bias found", or "undecided" (fewer than two units, or than 7 that are
        all alike, as coins often are).
        """
        if self.nonfinite.first is not None or not self.sums.n:
            return "not finite"
        if self.mismatch_share == 0:
            return "equal"
        tests = self.shift, self.scale
        found = [t for t in tests if t.pvalue < 0.025]
        if any(t.n_units > 6 or t.standard_error > 0 for t in found):
            return "bias"
        return "undecided" if found or self.shift.n_units < 2 else "no bias found"

    def to_frame(self) -> pd.DataFrame:
        """One row; ULP quantiles as columns ulp_q50 …"""
        row = {
            **self.sums.figures,
            "max_abs_index": self.max_abs.index,
            "max_rel_difference": self.max_rel.value,
            "max_rel_index": self.max_rel.index,
            "mismatch_share": self.mismatch_share,
            **{f"ulp_q{100 * q:.0f}": ulp for q, ulp in self.ulps.items()},
            "mean_error": self.shift.mean,
            "mean_error_se": self.shift.standard_error,
            "mean_error_pvalue": self.shift.pvalue,
            "scale_error": self.scale.mean,
            "scale_error_se": self.scale.standard_error,
            "scale_error_pvalue": self.scale.pvalue,
            "answer": self.answer,
            "n_nonfinite": self.nonfinite.total,
        }
        return pd.DataFrame([row])

    def __str__(self) -> str:
        found = "" if not self.nonfinite.total else f"{self.nonfinite}; "
        if not self.sums.n:
            return f"{found}no finite pair"
        if self.answer == "equal":
            return f"{found}{self.sums.n} finite pairs, all equal"
        figures = self.sums.figures
        return (
            f"{found}{100 * self.mismatch_share:.3g} % of {self.sums.n} pairs differ, at most by "
            f"{self.max_abs.value:.3g} at {self.max_abs.index}, relative RMS "
            f"{figures['relative_rms']:.3g} ({figures['sqnr_db']:.1f} dB): {self.answer}; "
            f"mean error {self.shift}; scale error {self.scale}"
        )


def tensor_difference(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    *,
    dtype: str | torch.dtype | None = None,
    groups: Sequence | None = None,
) -> TensorDifference:
    """d = candidate − reference: extremes, RMS, SQNR = −20 log10(√Σd² / √Σx²), ULP, noise or bias.

    Noise or bias: two t tests over positions, of the mean signed d (a shift) and of Σ d·x / Σ x²
    (a scale; a factor on all values has no shift where they are symmetric). Errors that cancel
    over the features of a position are not seen by either. Two fixed programs that are both right
    may still differ by a tiny bias of their own: hold its size against that of equivalent twins.

    Parameters
    ----------
    reference, candidate : [..., features], any unit; all leading dimensions are positions. One
        dimension is positions of one feature each.
    dtype : of the rounding steps; the coarser of the two dtypes by default.
    groups : [positions], the document of each: positions that share their context are no
        independent units, documents are.

    Raises
    ------
    ValueError
        When the shapes differ, there is no element, or `groups` has another length.

    Notes
    -----
    A ULP is relative to the value, so pairs near zero differ by huge numbers of them for errors
    that do not matter; they are left out here, and flagged in `ulp_histogram`.

    Examples
    --------
    >>> d = tensor_difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    >>> d.max_abs, d.mismatch_share, d.sums.relative_rms
    (Extreme(value=0.5, index=(1,)), 0.5, 0.1)
    """
    x, y = paired(reference, candidate)
    for side, z in (("reference", x), ("candidate", y)):
        if not z.is_floating_point() and max(map(abs, map(int, z.aminmax()))) > 2**53:
            raise ValueError(f"`{side}` must hold integers up to 2^53, which float64 has exactly")
    ulps, shape = ulp_quantiles(x, y, dtype=dtype), x.shape
    nonfinite = count_nonfinite(x, y)
    x, y = _rows(x), _rows(y)
    moments, rows = np.zeros(4), np.zeros((4, len(x)))  # rows: n, Σd, Σdx, Σx²
    largest = [(0.0, 0), (0.0, 0)]
    unequal = 0
    for row, column, a, b in _chunks(x, y):
        finite = a.isfinite() & b.isfinite()
        a, b = (z.where(finite, 0.0) for z in (a, b))
        d = b - a
        moments += _moments(a, b, d)
        unequal += int((d != 0).sum())
        per_row = torch.stack([finite.sum(1), d.sum(1), (d * a).sum(1), a.square().sum(1)])
        rows[:, row : row + len(a)] += per_row.cpu().numpy()
        for i, size in enumerate((d.abs(), torch.where(d == 0, 0.0, d / a).abs())):
            at = int(size.argmax())
            place = (row + at // a.shape[1]) * x.shape[1] + column + at % a.shape[1]
            largest[i] = max(largest[i], (float(size.flatten()[at]), place), key=lambda e: e[0])
    if groups is not None:
        if len(groups) != rows.shape[1]:
            raise ValueError(f"`groups` must name {rows.shape[1]} positions; got {len(groups)}")
        rows = pd.DataFrame(rows.T).groupby(np.asarray(groups), dropna=False).sum().to_numpy().T
    n, d, dx, xx = rows
    extremes = [Extreme(v, tuple(map(int, np.unravel_index(i, shape)))) for v, i in largest]
    sums = Sums(int(n.sum()), *moments.tolist(), extremes[0].value)
    return TensorDifference(
        nonfinite=nonfinite,
        sums=sums,
        max_abs=extremes[0],
        max_rel=extremes[1],
        mismatch_share=unequal / sums.n if sums.n else math.nan,
        ulps=ulps,
        shift=t_test(d[n > 0] / n[n > 0]),
        scale=t_test(dx[xx > 0] / xx[xx > 0]),
    )


def error_sums(reference: torch.Tensor, candidate: torch.Tensor) -> Sums:
    """The sums alone, in one fast pass; NaN and inf are kept and reach the figures.

    Examples
    --------
    >>> error_sums(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])).figures["relative_rms"]
    0.1
    """
    x, y = paired(reference, candidate)
    total, largest = np.zeros(4), torch.zeros((), dtype=torch.float64, device=x.device)
    for _, _, a, b in _chunks(_rows(x), _rows(y)):
        d = b - a
        total += _moments(a, b, d)
        low, high = d.aminmax()
        largest = torch.maximum(largest, torch.maximum(-low, high))
    return Sums(x.numel(), *total.tolist(), float(largest))


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1)


def _chunks(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor, ...]]:
    """(first row, first column, both pieces in float64) of two [rows, columns]."""
    columns = min(x.shape[1], _CHUNK)
    rows = _CHUNK // columns
    for row in range(0, len(x), rows):
        for column in range(0, x.shape[1], columns):
            here = slice(row, row + rows), slice(column, column + columns)
            yield row, column, x[here].double(), y[here].to(x.device).double()


def _moments(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> np.ndarray:
    a, b, d = a.flatten(), b.flatten(), d.flatten()
    return torch.stack([d.dot(d), a.dot(a), b.dot(b), a.dot(b)]).cpu().numpy()
