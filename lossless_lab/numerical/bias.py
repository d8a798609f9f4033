"""Noise or bias: is a mean signed error over independent units zero?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy import stats

from ..results import Result
from ..stats.multiplicity import pvalue_text


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasTest(Result):
    """Student's t test that a mean over independent units is zero.

    `minimum_detectable` is the true mean that this test finds with 80 % power at 5 %.
    """

    mean: float
    standard_error: float
    statistic: float
    pvalue: float
    minimum_detectable: float
    n_units: int

    def __str__(self) -> str:
        return (
            f"{self.mean:+.3g} ± {self.standard_error:.2g} over {self.n_units} units, "
            f"{pvalue_text(self.pvalue)}; {self.minimum_detectable:.2g} would be found with 80 % "
            "power"
        )


def bias_test(difference: torch.Tensor, *, groups: Sequence | None = None) -> BiasTest:
    """Is the mean signed difference zero? t = mean(m) / (sd(m) / √n), m the means of the units.

    Features of a position share its rounding errors, so the position is the unit; where positions
    of a document go together as well, the document is: pass `groups`.

    Parameters
    ----------
    difference : [positions, features], candidate − reference, finite
    groups : [positions], the document of each position

    Raises
    ------
    ValueError
        When `difference` is not finite or not [positions, features], or `groups` of another length.

    Examples
    --------
    Unit means 1, 2, 3: mean 2, standard error 1/√3.

    >>> test = bias_test(torch.tensor([[0.0, 2.0], [2.0, 2.0], [3.0, 3.0]]))
    >>> round(test.statistic ** 2, 9), round(test.pvalue, 4)
    (12.0, 0.0742)
    """
    d = torch.as_tensor(difference)
    if d.ndim != 2 or not d.numel() or not bool(d.isfinite().all()):
        raise ValueError(
            f"`difference` must be finite and [positions, features]; got {tuple(d.shape)} with "
            f"{int((~d.isfinite()).sum())} values that are not finite"
        )
    means = d.mean(1, dtype=torch.float64).cpu().numpy()
    if groups is None:
        return t_test(means)
    if len(groups) != len(means):
        raise ValueError(f"`groups` must name {len(means)} positions; got {len(groups)}")
    return t_test(pd.Series(means).groupby(np.asarray(groups)).mean().to_numpy())


def t_test(means: np.ndarray) -> BiasTest:
    """The test itself, on one mean per unit; all NaN for fewer than two units."""
    n = len(means)
    mean, error = (means.mean() if n else math.nan), math.nan
    if n > 1:
        error = means.std(ddof=1) / math.sqrt(n)
    statistic = mean / error if error else (math.copysign(math.inf, mean) if mean else 0.0)
    power = stats.t.ppf([0.975, 0.8], n - 1).sum() if n > 1 else math.nan
    return BiasTest(
        mean=float(mean),
        standard_error=float(error),
        statistic=float(statistic),
        pvalue=float(2 * stats.t.sf(abs(statistic), n - 1)) if n > 1 else math.nan,
        minimum_detectable=float(power * error),
        n_units=n,
    )
