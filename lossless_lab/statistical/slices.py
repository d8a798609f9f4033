"""Where a candidate fails: kinds of tokens or documents against the rest, documents as units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from ..results import Result
from ..stats.intervals import MIN_CLUSTERS
from ..stats.multiplicity import holm, pvalue_text
from .distances import MEASURES
from .estimates import Estimates


def slices(
    frame: pd.DataFrame, by: str, *, measure: str = MEASURES[0], confidence: float = 0.95
) -> pd.DataFrame:
    """Mean over the tokens of each kind, and its difference from the mean over all others.

    Parameters
    ----------
    frame : one row per token, with a column document
        As from `pipeline.compare_on`.
    by : column of kinds, of tokens or of whole documents
        A document may hold tokens of several kinds: the error of a difference counts that.
    measure : column that is averaged.
    confidence : of all intervals together (Bonferroni over kinds).

    Returns
    -------
    DataFrame by falling mean
        kind, n_tokens, n_documents, mean, low, high, difference, pvalue and holm_pvalue, adjusted
        for the number of kinds. NaN where fewer than 30 documents are on a side, or not all
        values are finite.

    Notes
    -----
    The error of a difference is that of ψ = (x − m)/n inside less the same outside, summed by
    document; t on D − 1. Source: Liang and Zeger 1986, as statsmodels' OLS on a dummy.

    Examples
    --------
    >>> rows = pd.DataFrame({"document": range(60), "kind": ["a", "b"] * 30, "kl": [1.0, 0.0] * 30})
    >>> slices(rows, "kind", measure="kl")["difference"].tolist()
    [1.0, -1.0]
    """
    x, kinds = frame[measure].to_numpy(np.float64), _kinds(frame, by).to_numpy(object)
    documents = np.unique(frame["document"].to_numpy(str), return_inverse=True)[1]
    names = list(dict.fromkeys(kinds))
    rows = []
    for name in names:
        inside = np.array([kind == name for kind in kinds])
        own = np.unique(documents[inside], return_inverse=True)[1]
        mean = Estimates(own, 1 - (1 - confidence) / len(names)).mean(x[inside])
        difference, pvalue = _against_rest(x, inside, documents)
        rows.append((name, inside.sum(), own.max() + 1, *mean[:3], difference, pvalue))
    columns = [by, "n_tokens", "n_documents", "mean", "low", "high", "difference", "pvalue"]
    found = pd.DataFrame(rows, columns=columns)
    tested = found["pvalue"].notna()
    found.loc[tested, "holm_pvalue"] = holm(found.loc[tested, "pvalue"])
    return found.sort_values("mean", ascending=False, ignore_index=True)


def _kinds(frame: pd.DataFrame, by: str) -> pd.Series:
    if n := int(frame[by].isna().sum()):
        raise ValueError(f"`by` must name a kind at every token; {by!r} has none at {n} of them")
    return frame[by]


def _against_rest(x: np.ndarray, inside: np.ndarray, documents: np.ndarray) -> tuple[float, float]:
    """Mean inside less mean outside, and the p-value of no difference."""
    if inside.all():
        return np.nan, np.nan
    means = x[inside].mean(), x[~inside].mean()
    difference = float(means[0] - means[1])
    few = min(len(np.unique(documents[side])) for side in (inside, ~inside)) < MIN_CLUSTERS
    if few or not np.isfinite(x).all():
        return difference, np.nan
    psi = np.where(inside, (x - means[0]) / inside.sum(), (means[1] - x) / (~inside).sum())
    by_document = np.bincount(documents, psi)
    n = len(by_document)
    error = np.sqrt(n / (n - 1) * np.sum(by_document**2))
    if error == 0:
        return difference, float(difference == 0)
    return difference, float(2 * stats.t.sf(abs(difference) / error, n - 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Concentration(Result):
    """Whether the worst tokens gather in some kinds of documents.

    Parameters
    ----------
    frame : DataFrame
        One row per kind: n_documents and failed, the mean over documents of the share of tokens
        that are among the worst.
    pvalue : chance of so uneven a spread were the kinds dealt to documents at random.
    threshold : the measure from which a token counts as failed; inf where all of those are not
        finite.
    least : p-value below which this test cannot go.
    """

    frame: pd.DataFrame
    pvalue: float
    threshold: float
    least: float

    def to_frame(self) -> pd.DataFrame:
        """One row per kind."""
        return self.frame

    def __str__(self) -> str:
        kind, _, failed = self.frame.iloc[0]
        other, _, least = self.frame.iloc[-1]
        where = f"at {self.threshold:.3g} or more" if np.isfinite(self.threshold) else "not finite"
        return (
            f"{where}: {failed:.1%} of the tokens of {kind}, {least:.1%} of {other}; "
            f"{pvalue_text(self.pvalue, least=self.least)} for so uneven a spread if kinds were "
            "dealt to documents at random"
        )


def concentration(
    frame: pd.DataFrame,
    by: str,
    *,
    measure: str = MEASURES[0],
    worst: float = 0.05,
    n_resamples: int = 9999,
    rng: np.random.Generator,
) -> Concentration:
    """Σ n (share − mean share)² over kinds of documents, against kinds dealt to them at random.

    A document's share is that of its tokens among the `worst` of all. Documents are permuted, not
    tokens: those of one document go together.

    Parameters
    ----------
    frame, measure : as in `slices`.
    by : column that is the same at all tokens of a document.
    worst : share of tokens that count as failed, in (0, 1)
        More where tokens tie at the cut, which are all in, or are NaN or infinite, which always
        fail; less where the cut is the smallest value of all, which never does.

    Raises
    ------
    ValueError
        When `by` changes within a document, there are not two kinds of two documents, or all
        tokens have the same value.

    Examples
    --------
    >>> rows = pd.DataFrame({"document": range(40), "kind": ["a", "b"] * 20})
    >>> rows["kl"] = (rows["kind"] == "a") * 1.0
    >>> found = concentration(rows, "kind", measure="kl", worst=0.5, rng=np.random.default_rng(0))
    >>> found.frame["failed"].tolist(), found.pvalue < 0.001
    ([1.0, 0.0], True)
    """
    if not 0 < worst < 1:
        raise ValueError(f"`worst` must be between 0 and 1; got {worst}")
    _kinds(frame, by)
    x = frame[measure].to_numpy(np.float64)
    x = np.where(np.isfinite(x), x, np.inf)
    cut = np.sort(x)[-max(1, int(worst * len(x)))]
    failed = x >= cut if cut > x.min() else x > cut
    if not failed.any():
        raise ValueError(f"`measure` must differ between tokens; all are {cut:g}: nothing to rank")
    table = frame.assign(failed=failed).groupby("document")
    kinds = table[by].nunique()
    if (kinds > 1).any():
        raise ValueError(f"`by` must be one kind per document; {kinds.idxmax()} has {kinds.max()}")
    shares = table["failed"].mean().groupby(table[by].first())
    groups = {kind: part.to_numpy() for kind, part in shares}
    if len(groups) < 2:
        raise ValueError(f"`by` must have two kinds or more; got {len(groups)}")
    if alone := [kind for kind, part in groups.items() if len(part) < 2]:
        raise ValueError(f"`by` must have two documents or more of a kind; {alone[0]} has one")
    groups = list(groups.values())
    mean = np.concatenate(groups).mean()

    def spread(*parts: np.ndarray, axis: int) -> np.ndarray:
        return sum(x.shape[axis] * (x.mean(axis) - mean) ** 2 for x in parts)

    test = stats.permutation_test(
        groups, spread, n_resamples=n_resamples, alternative="greater", rng=rng, batch=999
    )
    found = shares.agg(["size", "mean"]).sort_values("mean", ascending=False).reset_index()
    found.columns = [by, "n_documents", "failed"]
    threshold = float(x[failed].min())
    least = 1 / (1 + n_resamples)
    return Concentration(frame=found, pvalue=float(test.pvalue), threshold=threshold, least=least)
