"""The fp64 referee: which of two sides is nearer to the fp64 run of the same weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import nn

from ..results import Result
from .capture import forward, model_inputs
from .float64 import Float64, exact_logits, kept_tokens, narrow_operations, referee
from .noise import centred_rms

__all__ = ["Refereed", "against_referee", "narrow_operations", "referee"]

MIN_ROWS = 8  # fewer rows make no sample: positions are the units then
MARGIN = 1.25  # equally far within 1/MARGIN to MARGIN: equivalent twins lie between .87 and 1.06
_SIDES = ("reference", "candidate")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refereed(Result):
    """Whether the candidate is nearer to the fp64 truth than the reference.

    Parameters
    ----------
    frame : DataFrame
        One row per position: row, position, reference_rms, candidate_rms (to the fp64 logits).
    word : str
        "nearer the truth", "equally far", "farther" or "undecided", said of the candidate.
    ratio : float
        Geometric mean over units of candidate error / reference error; NaN where one is not
        finite.
    confidence_interval : (float, float)
        Of the ratio, 95 %.
    unit : str
        "row", or "position" where there are fewer than MIN_ROWS rows.
    n_units : int
    nonfinite : dict
        Side -> positions whose error is NaN or inf.
    """

    frame: pd.DataFrame
    word: str
    ratio: float
    confidence_interval: tuple[float, float]
    unit: str
    n_units: int
    nonfinite: dict[str, int]

    def __str__(self) -> str:
        bad = ", ".join(f"{side} {n}" for side, n in self.nonfinite.items() if n)
        if bad:
            return f"{self.word}: errors that are NaN or inf at positions: {bad}"
        left, right = (_rms(self.frame[f"{side}_rms"]) for side in _SIDES)
        low, high = self.confidence_interval
        related = " that share their context, so the interval is too narrow"
        small = 1 / MARGIN < self.ratio < MARGIN and self.word in ("nearer the truth", "farther")
        luck = ", a small step, which twins of some models make by luck" if small else ""
        return (
            f"{self.word}: RMS error to fp64 {right:.3g} against the reference's {left:.3g}, ratio "
            f"{self.ratio:.3g} (95 % {low:.3g} to {high:.3g}) over {self.n_units} "
            f"{self.unit}s{related if self.unit == 'position' else ''}{luck}"
        )


def against_referee(
    reference: Any,
    candidate: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    truth: Any = None,
) -> Refereed:
    """RMS error of both sides' logits to fp64, per position, and which side is nearer the truth.

    The word comes from a paired t interval of the mean log ratio of errors over rows, each row's
    error being its RMS over positions: wholly below 1 it is "nearer the truth", wholly above
    "farther"; else "equally far" where it lies within MARGIN, or "undecided" where it is too wide.
    More rows therefore never weaken a word. Ratios within MARGIN are said to be small: equivalent
    twins of one model were measured at .87 to 1.06 of its own error, by luck of their order.

    Parameters
    ----------
    reference, candidate : models in eval mode, results of `load`, or callables from ids
        [batch_size, seq_len] to logits [batch_size, seq_len, vocab_size]
    input_ids : [batch_size, seq_len] token ids; rows are taken as independent prompts, equal
        ones as one.
    attention_mask : [batch_size, seq_len], 1 where a token counts. Callables do not see it.
    truth : network whose fp64 run is the truth; by default the reference's. For quantised
        weights pass the dequantised network, to tell error of the arithmetic from error of the
        format.

    Returns
    -------
    Refereed
        Errors are centred over the vocabulary (`noise.centred_rms`), in the unit of the logits.

    Raises
    ------
    ValueError
        When `truth` is missing and `reference` is no module, logits have other shapes, or a row
        has no token.
    """
    truth = reference if truth is None else truth
    truth = getattr(truth, "network", truth)
    if not isinstance(truth, nn.Module):
        raise ValueError(
            f"`truth` must be a network where `reference` is none; got {type(truth).__name__}"
        )
    network = truth if isinstance(truth, Float64) else referee(truth)
    inputs = model_inputs(input_ids, attention_mask)
    mask = kept_tokens(inputs)
    sides = [_logits(side, inputs) for side in (reference, candidate)]
    rows = []
    for row, (ids, kept) in enumerate(zip(inputs["input_ids"], mask, strict=True)):
        given = [side[row][kept.to(side.device)] for side in sides]
        for start, exact in exact_logits(network, ids[kept]):
            errors = [centred_rms(exact, x[start : start + len(exact)]) for x in given]
            places = kept.nonzero()[start : start + len(exact), 0].tolist()
            rows += [(row, *place) for place in zip(places, *errors, strict=True)]
    frame = pd.DataFrame(rows, columns=["row", "position", "reference_rms", "candidate_rms"])
    return _judged(frame)


def _logits(side: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    side = getattr(side, "network", side)
    ids = inputs["input_ids"]
    with torch.no_grad():
        logits = forward(side, inputs) if isinstance(side, nn.Module) else side(ids)
    logits = torch.as_tensor(logits)
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise ValueError(
            f"logits must be [{', '.join(map(str, ids.shape))}, vocab_size], as `input_ids` are; "
            f"got {tuple(logits.shape)}"
        )
    return logits


def _judged(frame: pd.DataFrame) -> Refereed:
    """The word, from the errors of each position."""
    errors = frame[["reference_rms", "candidate_rms"]]
    bad = {side: int((~np.isfinite(frame[f"{side}_rms"])).sum()) for side in _SIDES}
    rows = errors.pow(2).groupby(frame["row"]).mean().pow(0.5)
    rows = rows[~rows.duplicated()]  # a prompt given twice is one
    unit = "row" if len(rows) >= MIN_ROWS else "position"
    units = rows if unit == "row" else errors[frame["row"].isin(rows.index)]
    low, ratio, high = _mean_ratio(units) if not any(bad.values()) else (np.nan,) * 3
    if any(bad.values()):
        worse = np.sign(bad["candidate"] - bad["reference"]) if 0 in bad.values() else 0
        word = {-1: "nearer the truth", 0: "undecided", 1: "farther"}[int(worse)]
    elif high < 1 or low > 1:
        word = "nearer the truth" if high < 1 else "farther"
    else:
        word = "equally far" if low >= 1 / MARGIN and high <= MARGIN else "undecided"
    return Refereed(
        frame=frame,
        word=word,
        ratio=ratio,
        confidence_interval=(low, high),
        unit=unit,
        n_units=len(units),
        nonfinite=bad,
    )


def _mean_ratio(units: pd.DataFrame) -> tuple[float, float, float]:
    """Lower limit, geometric mean and upper limit of candidate / reference, by Student's t."""
    logs = np.log(units.clip(lower=np.finfo(float).tiny))  # an error of zero is an exact side
    d = (logs["candidate_rms"] - logs["reference_rms"]).to_numpy()
    if len(d) == 1:
        return 0.0, float(np.exp(d[0])), np.inf
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d))
    with np.errstate(over="ignore"):
        return tuple(float(np.exp(x)) for x in (d.mean() - half, d.mean(), d.mean() + half))


def _rms(x: pd.Series) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
