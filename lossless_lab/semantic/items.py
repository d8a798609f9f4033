"""Tables of answered items, a row each: what they must hold, and how those of runs line up."""

from __future__ import annotations

import numpy as np
import pandas as pd

COLUMNS = ("id", "category", "group", "right", "margin_nats", "chance")
SHOWN = ("prompt", "right_answer", "chosen")  # optional: what a reader wants to see
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def aligned(**sides: pd.DataFrame | None) -> dict[str, pd.DataFrame]:
    """The tables that were given, checked, indexed by id and in the order of the first.

    Raises
    ------
    ValueError
        For columns that lack, no items, repeated items, values that are no answer, margin or
        chance, and items that a side lacks or describes otherwise than the first.
    """
    checked = {name: _checked(side, name) for name, side in sides.items() if side is not None}
    first, *_ = checked
    base = checked[first]
    for name, side in checked.items():
        if lost := sorted(set(base.index) ^ set(side.index), key=str):
            raise ValueError(f"`{name}` must hold the {first}'s items; not shared: {lost[:3]}")
        checked[name] = side = side.loc[base.index]
        for column in ("category", "group", "chance", *SHOWN[:2]):
            if column not in base or column not in side:
                continue
            if (other := side[column].fillna("") != base[column].fillna("")).any():
                item = other.idxmax()
                raise ValueError(f"`{name}`: item {item!r} has another {column} than the {first}")
    return checked


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
    margin = numbers["margin_nats"]
    faults = {
        "right": (right.isna(), "true or false"),
        "margin_nats": (~np.isfinite(margin) & ~_blank(side["margin_nats"]), "finite or empty"),
        "chance": (~numbers["chance"].between(0, 1, inclusive="left"), "at least 0 and below 1"),
        **{c: (_blank(side[c]), "a name") for c in ("category", "group")},
    }
    for column, (bad, rule) in faults.items():
        if bad.any():
            item, value = bad.idxmax(), side.loc[bad.idxmax(), column]
            raise ValueError(f"`{name}`: item {item!r} has {column} {value!r}; must be {rule}")
    return side.assign(right=right.astype(bool), **numbers)


def _blank(values: pd.Series) -> pd.Series:
    return values.isna() | (values.astype(str).str.strip() == "")
