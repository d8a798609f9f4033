"""Scores of answers, and the comparison of two runs over the same items, category by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..results import Result
from ..stats.intervals import MIN_CLUSTERS, share_interval, token_mean_interval
from ..stats.multiplicity import holm
from .paired import PairedTable, mcnemar, non_inferiority, paired_table, score_interval
from .text import words

ARTICLES = ("a", "an", "the")
PUNCTUATION = "，。！？；：、“”‘’（）《》"
TRUTH = {"true": True, "false": False, "1": True, "0": False}
NO_CONTROL = "no known-bad control was given"
COLUMNS = ("id", "category", "group", "right", "margin_nats", "chance")


def answer_scores(text: str, answers: Sequence[str]) -> dict[str, float]:
    """Exact match, recall and F1 in words, each against the right answer that suits it best.

    Case, punctuation and English articles do not count; in Chinese each character is a word.

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
        scores = float(given == right), shared / max(len(right), 1), 0.0
        if given or right:
            scores = *scores[:2], 2 * shared / (len(given) + len(right))
        best = {name: max(b, x) for (name, b), x in zip(best.items(), scores, strict=True)}
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
    worst : ids of items whose margin fell most, worst first.
    """

    frame: pd.DataFrame
    margin: float
    table: PairedTable | None
    worst: tuple[str, ...]

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
        )


def compare_tasks(
    reference: pd.DataFrame,
    candidate: pd.DataFrame,
    *,
    margin: float = 0.02,
    control: pd.DataFrame | None = None,
) -> TaskComparison:
    """Is the candidate at most `margin` less accurate than the reference, category by category?

    A category can clear a candidate only if it could have shown harm: the reference beats chance
    (95 % lower limit), and a known-bad control is less accurate than it (95 % upper limit below
    0). Else EQUIVALENT becomes INCONCLUSIVE; harm that was shown stays shown.

    Parameters
    ----------
    reference, candidate, control : one row per item: COLUMNS. `margin_nats` is the log-likelihood
        of the right choice above the best wrong one (NaN for free answers).
    margin : share of items.
    control : the same items by a model that is known to be bad (2-bit weights); without one no
        candidate is cleared.

    Raises
    ------
    ValueError
        For repeated items, items that one side lacks or describes otherwise, values that are no
        answer, margin or chance, and no items.
    """
    sides = {"reference": reference, "candidate": candidate}
    sides |= {} if control is None else {"control": control}
    checked = {name: _checked(side, name) for name, side in sides.items()}
    ids = checked["reference"].index
    for name, side in checked.items():
        if lost := sorted(set(ids) ^ set(side.index)):
            raise ValueError(f"`{name}` must hold the reference's items; not shared: {lost[:3]}")
        for column in ("category", "group", "chance"):
            if (other := side.loc[ids, column] != checked["reference"][column]).any():
                item = other.idxmax()
                raise ValueError(f"`{name}`: item {item!r} has another {column} than the reference")
    aligned = [side.loc[ids] for side in checked.values()]
    of_category = aligned[0].groupby("category", sort=False).groups
    rows = [
        _row(name, [side.loc[at] for side in aligned], margin) for name, at in of_category.items()
    ]
    for row, p in zip(rows, holm([row["mcnemar_p"] for row in rows]), strict=True):
        row["holm_p"] = float(p)
    able = [row["category"] for row in rows if not row["why"] or NO_CONTROL in row["why"]]
    counted = aligned[0]["category"].isin(able)
    if counted.any():
        rows.append(_row("all", [side[counted] for side in aligned], margin))
    else:
        rows.append({"category": "all", "word": "INCONCLUSIVE", "why": "no assay sensitivity"})
    change = aligned[1]["margin_nats"] - aligned[0]["margin_nats"]
    return TaskComparison(
        frame=pd.DataFrame(rows),
        margin=margin,
        table=_table(*(side[counted] for side in aligned[:2])) if counted.any() else None,
        worst=tuple(change.dropna().sort_values().index[:10]),
    )


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


def _checked(side: pd.DataFrame, name: str) -> pd.DataFrame:
    """Indexed by id, after the rules that do not need the other side."""
    if missing := [column for column in COLUMNS if column not in side]:
        raise ValueError(f"`{name}` must have the columns {', '.join(COLUMNS)}; lacks {missing}")
    if not len(side):
        raise ValueError(f"`{name}` must hold at least one item; got none")
    if (repeated := side["id"][side["id"].duplicated()]).any():
        raise ValueError(f"`{name}` holds the item {repeated.iloc[0]!r} more than once")
    side = side.set_index("id")
    right = side["right"].map(lambda x: TRUTH.get(str(x).lower()))
    numbers = {c: pd.to_numeric(side[c], errors="coerce") for c in ("margin_nats", "chance")}
    faults = {
        "right": right.isna(),
        "margin_nats": ~np.isfinite(numbers["margin_nats"]) & ~_blank(side["margin_nats"]),
        "chance": ~numbers["chance"].between(0, 1, inclusive="left"),
        **{c: _blank(side[c]) for c in ("category", "group")},
    }
    for column, bad in faults.items():
        if bad.any():
            item = bad.idxmax()
            raise ValueError(f"`{name}`: item {item!r} has {column} {side.loc[item, column]!r}")
    return side.assign(right=right.astype(bool), **numbers)


def _blank(values: pd.Series) -> pd.Series:
    return values.isna() | (values.astype(str).str.strip() == "")


def _plain(text: str) -> list[str]:
    """Words without case, punctuation and English articles."""
    return [w for w in words(text) if w not in ARTICLES and w not in PUNCTUATION]
