"""False alarms and power of the noise-or-bias test under correlated rounding noise, simulated."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from scipy import stats

from lossless_lab import paths
from lossless_lab.numerical import bias
from lossless_lab.numerical.bias import bias_test

TABLE = paths.DATA / "calibration" / "bias.csv"
ALPHA = 0.05
# name -> (unit of the test, bias in units of the RMS error, changes to `rounding_noise`)
CASES = {
    "320 positions": ("position", 0.0, {}),
    "8 positions": ("position", 0.0, {"n_documents": 1}),
    "40 documents of 8 positions": ("document", 0.0, {"together": 0.3}),
    "bias .05 of the RMS, 320 positions": ("position", 0.05, {}),
    "bias .1 of the RMS, 320 positions": ("position", 0.1, {}),
    "bias .2 of the RMS, 320 positions": ("position", 0.2, {}),
    "bias .1 of the RMS, 2,560 positions": ("position", 0.1, {"n_documents": 320}),
}


def rounding_noise(
    rng: np.random.Generator, *, n_documents: int = 40, together: float = 0.0
) -> np.ndarray:
    """bf16 rounding of hidden states, carried through a matrix: [positions, 48].

    Features share outliers and a heavy-tailed scale by position, and their errors correlate;
    `together` is the share of the rounding error's variance common to a document of 8 positions.
    """
    n_positions, n_features = 8, 48
    shape = n_documents * n_positions, n_features
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1)))
    x[:, :3] *= 20
    error = torch.from_numpy(x).float().bfloat16().double().numpy() - x
    common = rng.standard_normal((n_documents, n_features)) * error.std()
    error = np.sqrt(1 - together) * error
    error += np.sqrt(together) * np.repeat(common, n_positions, axis=0)
    return error @ (rng.standard_normal((n_features, n_features)) + 0.5) / np.sqrt(n_features)


def pvalue(difference: np.ndarray, unit: str) -> float:
    """Of the test whose unit is the position, the document, or (a mutant) the element."""
    if unit == "element":
        return stats.ttest_1samp(difference.ravel(), 0).pvalue
    groups = np.arange(len(difference)) // 8 if unit == "document" else None
    return bias_test(torch.from_numpy(difference), groups=groups).pvalue


def rejections(
    rng: np.random.Generator, unit: str, *, n_repetitions: int, bias: float = 0.0, **noise: float
) -> int:
    """How many of the simulated differences are called biased at 5 %; `bias` in RMS."""
    found = 0
    for _ in range(n_repetitions):
        d = rounding_noise(rng, **noise)
        found += pvalue(d + bias * np.sqrt(np.mean(d**2)), unit) < ALPHA
    return found


def holds(found: int, n_repetitions: int) -> bool:
    """A claim of 5 % fails when the 99.9 % lower limit of the simulated rate passes it."""
    low = stats.binomtest(found, n_repetitions).proportion_ci(0.998, method="exact").low
    return bool(low <= ALPHA)


def code(*parts: Callable) -> str:
    """Hash of what was simulated and of how."""
    text = "".join(inspect.getsource(part) for part in (bias, rounding_noise, *parts))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def calibrate(n_repetitions: int = 2000) -> pd.DataFrame:
    """One row per case: share called biased, beside the 5 % that may be where there is none."""
    rows = []
    for i, (name, (unit, size, noise)) in enumerate(CASES.items()):
        rng = np.random.default_rng(i)
        found = rejections(rng, unit, n_repetitions=n_repetitions, bias=size, **noise)
        rows.append(
            {
                "case": name,
                "unit": unit,
                "bias": size,
                "called_biased": found / n_repetitions,
                "n_repetitions": n_repetitions,
                "claim": "-" if size else ("holds" if holds(found, n_repetitions) else "FAILS"),
                "code": code(),
            }
        )
    frame = pd.DataFrame(rows)
    frame.to_csv(TABLE, index=False)
    return frame
