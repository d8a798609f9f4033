"""Every statistic of two models' laws over a corpus, with intervals by document."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..results import Result
from ..stats.intervals import MIN_CLUSTERS
from .distances import LOGPROBS, MEASURES
from .estimates import Estimate, Estimates

DISTANCES = {
    "KL(reference‖candidate)": (MEASURES[0], "nats"),
    "KL(candidate‖reference)": (MEASURES[1], "nats"),
    "JS": ("js_nats", "nats"),
    "TV": ("total_variation", "probability"),
    "Hellinger": ("hellinger", "1"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DistanceSummary(Result):
    """All statistics over the tokens of a corpus, and what kept any from being a number.

    Parameters
    ----------
    frame : DataFrame
        statistic, value, low, high, iid_se, unit; low and high are NaN where there is no interval.
    n_tokens, n_documents : int
    confidence : float
    undefined, infinite : tuples of (document, position, token id)
        Tokens where a law or KL(reference‖candidate) is undefined (NaN), or infinite; the id is
        the one that the candidate cannot produce, or −1 where that is not known.
    """

    frame: pd.DataFrame
    n_tokens: int
    n_documents: int
    confidence: float
    undefined: tuple[tuple[str, int, int], ...]
    infinite: tuple[tuple[str, int, int], ...]

    def value(self, statistic: str) -> float:
        """The value of one statistic, by its name in the table."""
        return float(self.frame.set_index("statistic")["value"][statistic])

    def to_frame(self) -> pd.DataFrame:
        """One row per statistic."""
        return self.frame

    def __str__(self) -> str:
        rows = self.frame.set_index("statistic")

        def shown(name: str) -> str:
            row = rows.loc[name]
            interval = "" if math.isnan(row.low) else f" [{row.low:.3g}, {row.high:.3g}]"
            return f"{name} {row.value:.3g}{interval}"

        text = (
            f"{self.n_tokens} tokens of {self.n_documents} documents: "
            f"{shown('mean KL(reference‖candidate)')} nats, {shown('mean TV')}, "
            f"{shown('same top token')}"
        )
        if (sequence := rows.value["T × mean TV"]) < 1:
            text += f"; T × mean TV = {sequence:.2g}, a bound only on text drawn from the reference"
        for word, places in (("undefined", self.undefined), ("infinite", self.infinite)):
            if places:
                document, position, token = places[0]
                named = f", token {token}" if token >= 0 else ""
                text += f"; {word} at {len(places)}, first {document!r} position {position}{named}"
        if self.n_documents < MIN_CLUSTERS:
            text += f"; no intervals, which need {MIN_CLUSTERS} documents"
        return text


def distance_summary(frame: pd.DataFrame, *, confidence: float = 0.95) -> DistanceSummary:
    """Means, percentiles and extremes over tokens of the columns of `divergences`.

    Parameters
    ----------
    frame : one row per token
        As from `pipeline.compare_on`, or frames of `divergences` below each other. The column
        document (else prompt_id) says which tokens go together. With reference_logprob and
        candidate_logprob, perplexities, Δp = p(candidate) − p(reference) of the correct token and
        changes between right and wrong are added.
    confidence : of low and high, two-sided, each token mean clustered by document.

    Returns
    -------
    DistanceSummary
        `iid_se` is the error that llama-perplexity prints, as if tokens were independent; it is
        beside the interval to be compared with it, not to be used.

    Raises
    ------
    ValueError
        For an empty frame.

    Notes
    -----
    All are per-token figures in nats or probabilities (1, not 100 %). "T × mean TV" bounds the TV
    of a sequence of T tokens, T the mean length here; like a sum of KL, it is one only on text
    sampled from the reference, and on other text an indication. The q % percentile interpolates
    linearly at rank q (n − 1) / 100 of the sorted values (numpy's and llama-perplexity's rule).
    Its interval inverts that of the share of tokens below (Woodruff 1952), and is left out where
    fewer than 30 documents have a token above it, or below; an extreme has none. Errors of
    perplexities by the delta method. NaN and inf are never left out: a mean over one is one.

    Source: the statistics of llama.cpp, tools/perplexity. Its own figures also leave out tokens
    below e^-16 and the first half of each window, and round the reference to 16 bits.

    Examples
    --------
    >>> import torch
    >>> from lossless_lab.statistical.divergences import divergences
    >>> a, b = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 2.0]])
    >>> found = distance_summary(divergences(a, b, correct_ids=[0]).frame)
    >>> round(found.value("mean TV"), 3), round(found.value("PPL ratio"), 3)
    (0.462, 2.718)
    """
    if not len(frame):
        raise ValueError("`frame` must hold at least one token; got none")
    documents = frame["document" if "document" in frame else "prompt_id"].to_numpy(str)
    codes = np.unique(documents, return_inverse=True)[1]
    table = Estimates(codes, confidence)
    for name, (column, unit) in DISTANCES.items():
        table.distribution(name, _numbers(frame, column), unit)
    tv, unit = _numbers(frame, "total_variation"), "probability"
    length = len(codes) / (codes.max() + 1)
    sequence = np.minimum(1, length * np.array(table.mean(tv)[:3]))
    table.add("T × mean TV", Estimate(*sequence.tolist()), unit)
    table.add("mean TV by document, one-sided", table.by_document(tv), unit)
    for side in ("reference", "candidate"):
        table.add(f"entropy {side}", table.mean(_numbers(frame, f"{side}_entropy_nats")), "nats")
    bad = frame["js_nats"].isna().to_numpy()
    agree = np.where(bad, math.nan, frame["top1_agree"].to_numpy(float))
    table.add("same top token", table.mean(agree), "share")
    table.add("flips of the top token", table.mean(1 - agree), "share")
    table.add("top-10 overlap", table.mean(_numbers(frame, "top10_overlap")), "share")
    if set(LOGPROBS) <= set(frame):
        _of_correct_tokens(table, frame, bad)
    forward = _numbers(frame, MEASURES[0])
    lost = frame.get("unreachable_id", pd.Series(pd.NA, frame.index, dtype="Int64")).fillna(-1)
    places = list(zip(documents.tolist(), frame["position"].tolist(), lost.tolist(), strict=True))
    return DistanceSummary(
        frame=pd.DataFrame(table.rows),
        n_tokens=len(frame),
        n_documents=int(codes.max()) + 1,
        confidence=confidence,
        undefined=tuple(places[i] for i in np.flatnonzero(bad)),
        infinite=tuple(places[i] for i in np.flatnonzero(np.isposinf(forward))),
    )


def _of_correct_tokens(table: Estimates, frame: pd.DataFrame, bad: np.ndarray) -> None:
    reference, candidate = (_numbers(frame, name) for name in LOGPROBS)
    with np.errstate(invalid="ignore", over="ignore"):
        step = np.exp(reference) * np.expm1(candidate - reference)
        change = np.where(np.isfinite(reference), step, np.exp(candidate))
        sides = {"candidate": table.mean(-candidate), "reference": table.mean(-reference)}
        ratio = table.mean(reference - candidate)
        perplexities = {side: mean.through_exp() for side, mean in sides.items()}
        q, p = (perplexities[side].value for side in sides)
        moved = q * (-candidate - sides["candidate"].value)
        moved = moved - p * (-reference - sides["reference"].value) + (q - p)
        spread = np.std(reference), np.std(candidate)
        together = np.mean((reference - reference.mean()) * (candidate - candidate.mean()))
        correlation = together / (spread[0] * spread[1]) if all(spread) else math.nan
    for side, estimate in perplexities.items():
        table.add(f"PPL {side}", estimate, "1")
    table.add("correlation of ln PPL", Estimate(float(correlation)), "1")
    table.add("ln PPL ratio", ratio, "nats")
    table.add("PPL ratio", ratio.through_exp(), "1")
    table.add("PPL difference", table.mean(moved), "1")
    table.distribution("Δp", change, "probability")
    square = table.mean(change**2)
    root = [math.sqrt(max(v, 0)) for v in square[:3]]
    error = square.iid_se / (2 * root[0]) if root[0] else square.iid_se
    table.add("RMS Δp", Estimate(*root, error), "probability")
    right = [
        (frame[f"{side}_top_id"] == frame["token_id"]).to_numpy(bool)
        for side in ("reference", "candidate")
    ]
    for name, (was, is_now) in {"right to wrong": right, "wrong to right": right[::-1]}.items():
        table.add(name, table.mean(np.where(bad, math.nan, was & ~is_now)), "share")


def _numbers(frame: pd.DataFrame, column: str) -> np.ndarray:
    return frame[column].to_numpy(np.float64)
