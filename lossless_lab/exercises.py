"""The exercises of notebook 01: tells right answers from wrong ones, and says what is wrong."""

from __future__ import annotations

import csv
import json
import operator
import re
from typing import Any

import numpy as np
from rapidfuzz.distance import Indel

from . import paths


def check(exercise: int, answer: Any) -> str:
    """Mark an answer: "right", or "not yet" and what is wrong with it; never the solution.

    Parameters
    ----------
    exercise : its number in notebook 01.
    answer : in the form that the exercise asks for; None is no answer.

    Raises
    ------
    ValueError
        For an exercise that does not exist.

    Examples
    --------
    >>> check(3, 0.4)
    'not yet: this is the share that is rejected: the TV of the two laws'
    """
    said = _said()
    if exercise not in said:
        raise ValueError(f"`exercise` must be one of 1 to {len(said)}; got {exercise!r}")
    if answer is None:
        return "no answer yet"
    try:
        mark = _RULES[exercise](answer) if exercise in _RULES else _listed(said[exercise], answer)
    except (TypeError, ValueError, KeyError, OverflowError):
        return f"not yet: the answer must be {said[exercise]['form']}; got {answer!r}"
    return mark if mark == "right" else f"not yet: {mark}"


def _said() -> dict[int, dict[str, str]]:
    """exercise -> answer as JSON, or "form" or "else" -> what is said to it."""
    found: dict[int, dict[str, str]] = {}
    path = paths.DATA / "exercises" / "01_three_levels.csv"
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        found.setdefault(int(row["exercise"]), {})[row["answer"]] = row["says"]
    return found


def _listed(said: dict[str, str], answer: Any) -> str:
    """What is said to an answer that the table holds: a word, or numbers to within .001."""
    if isinstance(answer, str):
        return said[json.dumps(answer.strip(" ().").lower())]
    known = {key: json.loads(key) for key in said if key not in ("form", "else")}
    given = np.float64(answer)
    near = [key for key, value in known.items() if np.allclose(given - value, 0, atol=1e-3)]
    return said[near[0] if near else "else"]


def _order(answer: Any) -> str:
    with np.errstate(over="ignore", invalid="ignore"):
        a, b, c = np.float16(answer)
        left, right = (a + b) + c, a + (b + c)
    if (np.float64([a, b, c]) != answer).any():
        return f"fp16 does not hold all of these: it makes them {a:g}, {b:g}, {c:g} beforehand"
    same = f"both orders give {left:g}; from which size on does fp16 hold no odd number?"
    return "right" if left != right else same


def _how_many(answer: Any) -> str:
    missed = 0.98 ** operator.index(answer)
    if missed > 0.05:
        return f"if 2 % differ, {answer} prompts still show nothing in {missed:.2%} of cases"
    return "right" if missed / 0.98 > 0.05 else "enough, but fewer would do: 3/n is rough"


def _hidden(answer: Any) -> str:
    right, wrong = answer
    alike = Indel.normalized_similarity(right, wrong)
    if re.findall(r"\d", right) == re.findall(r"\d", wrong):
        return "no digit differs, so it states the same fact"
    return "right" if alike > 0.99 else f"similarity {alike:.3f}: how long a text hides one digit?"


_RULES = {2: _order, 5: _how_many, 6: _hidden}
