"""Scores of answers, and the comparison of two runs over the same items, category by category."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..results import Result
from ..stats.intervals import MIN_CLUSTERS, share_interval, token_mean_interval
from ..stats.multiplicity import holm
from .items import SHOWN, aligned
from .paired import PairedTable, finding, mcnemar, non_inferiority, paired_table, score_interval
from .text import words

ARTICLES = ("a", "an", "the")
PUNCTUATION = "，。！？；：、“”‘’（）《》"
NO_CONTROL = "no known-bad control was given"


def answer_scores(text: str, answers: Sequence[str]) -> dict[str, float]:
    """Exact match, recall and F1 in words, each against the right answer that suits it best.

    Case, punctuation and English articles do not count; in Chinese each character is a word. Signs,
    points and slashes of numbers do, and so do symbols (+, <, 😀): "-5" and ".5" are not "5".

    Notes
    -----
    Source: Rajpurkar et al. 2016 (SQuAD).

    Examples
    --------
    >>> answer_scores("The capital is Paris.", ["Paris", "Paris, France"])
    {'exact': 0.0, 'recall': 1.0, 'f1': 0.5}
    """
    if not answers:
        raise ValueError("`answers` must hold at least one right answer; got none")
    given, best = _plain(text), dict.fromkeys(("exact", "recall", "f1"), 0.0)
    for right in map(_plain, answers):
        shared = (Counter(given) & Counter(right)).total()
        equal, length = float(given == right), max(len(right), 1)
        scores = equal, shared / length, 2 * shared / (len(given) + length)
        best = {name: max(b, x, equal) for (name, b), x in zip(best.items(), scores, strict=True)}
    return best


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskComparison(Result):
    """Two runs over the same items.

    Parameters
    ----------
    frame : a row per category and one, "all", of those that can show harm. For each: items
        and groups (variants of one text count once); both accuracies; items lost and gained with
        McNemar's p, and after Holm's correction; the difference in accuracy with its limits (each
        one-sided at 95 %); the mean change of the right answer's margin in nats with its 95 %
        interval; the word, and why.
    margin : largest loss of accuracy that counts as none, as a share.
    table : the 2×2 table of "all"; None where no category can show harm.
    worst : the ten items that suffered most, a row each with both sides' answers and margins: lost
        ones first, then by how far the margin fell.
    finding : "the same accuracy, not the same behaviour" where `paired.finding` says so, else "".
    """

    frame: pd.DataFrame
    margin: float
    table: PairedTable | None
    worst: pd.DataFrame
    finding: str

    def to_frame(self) -> pd.DataFrame:
        return self.frame

    def __str__(self) -> str:
        last = self.frame.iloc[-1]
        if self.table is None:
            return f"INCONCLUSIVE: {last['why']}"
        low, high = 100 * last["low"], 100 * last["high"]
        return (
            f"{last['word']} within {100 * self.margin:g} points: {self.table}; difference "
            f"{100 * self.table.difference:+.2f} points, 95 % limits {low:+.2f} to {high:+.2f}"
            + (f"; {self.finding}" if self.finding else "")
        )


def compare_tasks(
    reference: pd.DataFrame,
    candidate: pd.DataFrame,
    *,
    margin: float = 0.02,
    control: pd.DataFrame | None = None,
    reordered: pd.DataFrame | None = None,
) -> TaskComparison:
    """Is the candidate at most `margin` less accurate than the reference, category by category?

    A category can clear a candidate only if it could have shown harm: the reference beats chance
    (95 % lower limit), and a known-bad control is less accurate than it (95 % upper limit below
    0). Else EQUIVALENT becomes INCONCLUSIVE; harm that was shown stays shown.

    Parameters
    ----------
    reference, candidate, control, reordered : one row per item: COLUMNS, and SHOWN where known.
        `margin_nats` is the log-likelihood of the right choice above the best wrong one (NaN for
        free answers). Other slices: any column renamed to `category`.
    margin : share of items.
    control : the same items by a model that is known to be bad (2-bit weights); without one no
        candidate is cleared.
    reordered : the same items by the reference in another harmless order (batch, threads): what
        flips there is no finding. None stands for one that flips nothing.

    Raises
    ------
    ValueError
        For repeated items, items that one side lacks or describes otherwise, values that are no
        answer, margin or chance, and no items.
    """
    sides = aligned(reference=reference, candidate=candidate, control=control, reordered=reordered)
    again = sides.pop("reordered", sides["reference"])
    every = [*sides.values()]
    of_category = every[0].groupby("category", sort=False).groups
    rows = [
        _row(name, [side.loc[at] for side in every], margin) for name, at in of_category.items()
    ]
    for row, p in zip(rows, holm([row["mcnemar_p"] for row in rows]), strict=True):
        row["holm_p"] = float(p)
    able = [row["category"] for row in rows if not row["why"] or NO_CONTROL in row["why"]]
    counted = every[0]["category"].isin(able)
    table, said = None, ""
    if counted.any():
        sides = [side[counted] for side in every]
        rows.append(_row("all", sides, margin))
        table = _table(*sides[:2])
        first = _first_of_group(sides[0])
        flips = paired_table(
            *(s.loc[first.index, "right"] != first["right"] for s in (again, sides[1]))
        )
        said = finding(table, margin=margin, only=(flips.only_candidate, flips.only_reference))
    else:
        rows.append({"category": "all", "word": "INCONCLUSIVE", "why": "no assay sensitivity"})
    return TaskComparison(
        frame=pd.DataFrame(rows),
        margin=margin,
        table=table,
        worst=_worst(*every[:2]),
        finding=said,
    )


def _worst(reference: pd.DataFrame, candidate: pd.DataFrame, n: int = 10) -> pd.DataFrame:
    """Items lost, then those whose margin fell; both sides beside each other."""
    change = candidate["margin_nats"] - reference["margin_nats"]
    lost = reference["right"] & ~candidate["right"]
    order = pd.DataFrame({"lost": ~lost, "change": change})[lost | (change < 0)]
    at = order.sort_values(["lost", "change"], kind="stable").index[:n]
    columns = {c: reference.loc[at, c] for c in ("category", *SHOWN[:2]) if c in reference}
    for name, side in (("reference", reference), ("candidate", candidate)):
        columns |= {name: side.loc[at, "chosen"]} if "chosen" in side else {}
        columns[f"{name}_right"] = side.loc[at, "right"]
        columns[f"{name}_margin_nats"] = side.loc[at, "margin_nats"]
    return pd.DataFrame(columns).reset_index()


def _row(category: str, sides: list[pd.DataFrame], margin: float) -> dict:
    """One category: its table, the difference, the change in margin, and whether it can tell."""
    reference, candidate, *control = sides
    table = _table(reference, candidate)
    low, high = score_interval(table)
    change = _margin_change(reference, candidate)
    word, why = non_inferiority(table, margin=margin), NO_CONTROL
    chance = float(_first_of_group(reference)["chance"].mean())
    n_right = table.both + table.only_reference
    if share_interval(n_right, table.n, alternative="greater").low <= chance:
        why = "the reference does not beat chance"
    elif control:
        loss = score_interval(_table(reference, control[0])).high
        why = "" if loss < 0 else "a known-bad control is not told from the reference"
    if why and word == "EQUIVALENT":
        word = "INCONCLUSIVE"
    return {
        "category": category,
        "n_items": len(reference),
        "n_groups": table.n,
        "reference_accuracy": table.accuracies[0],
        "candidate_accuracy": table.accuracies[1],
        "lost": table.only_reference,
        "gained": table.only_candidate,
        "mcnemar_p": mcnemar(table),
        "low": low,
        "high": high,
        "margin_change_nats": change[0],
        "margin_change_low": change[1],
        "margin_change_high": change[2],
        "word": word,
        "why": f"no assay sensitivity: {why}" if why else "",
    }


def _margin_change(reference: pd.DataFrame, other: pd.DataFrame) -> tuple[float, float, float]:
    """Mean change in nats with its limits; NaN for free answers, and limits below 30 groups."""
    change = other["margin_nats"] - reference["margin_nats"]
    if change.isna().any():
        return (np.nan,) * 3
    groups = reference["group"]
    if groups.nunique() < MIN_CLUSTERS:
        return float(change.mean()), np.nan, np.nan
    return float(change.mean()), *token_mean_interval(change.to_list(), groups.to_list())


def _first_of_group(side: pd.DataFrame) -> pd.DataFrame:
    """One item of each group: variants of one text are no independent evidence."""
    return side[~side.duplicated(["category", "group"])]


def _table(reference: pd.DataFrame, candidate: pd.DataFrame) -> PairedTable:
    first = _first_of_group(reference).index
    return paired_table(reference.loc[first, "right"], candidate.loc[first, "right"])


# What punctuation says in a number, as words: no thousands' comma, a sign, a point, a slash.
_NUMBERS = (
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    (r"(?<![\w.])[-−–](?=\.?\d)", "minus"),
    (r"\.(?=\d)", "point"),
    (r"(?<=\d)/(?=\d)", "over"),
)


def _plain(text: str) -> list[str]:
    """Words without case, punctuation and English articles; as they are where nothing is left."""
    for pattern, word in _NUMBERS:
        text = re.sub(pattern, word, text)
    spoken = (f" {ord(c)}symbol " if unicodedata.category(c) in ("So", "Sm") else c for c in text)
    found = [w for w in words("".join(spoken)) if w not in ARTICLES and w not in PUNCTUATION]
    return found or text.split()
