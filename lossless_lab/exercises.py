"""The exercises of notebook 01: tells right answers from wrong ones, and says what is wrong."""

from __future__ import annotations

import json
import re
import reprlib
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
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
    >>> check(3, 60)
    'not yet: the answer must be a share from 0 to 1; got 60'
    """
    said = _said()
    if not (isinstance(exercise, int) and exercise in said):
        raise ValueError(
            f"`exercise` must be one of 1 to {len(said)}; got {reprlib.repr(exercise)}"
        )
    if answer is None:
        return "no answer yet"
    try:
        given = _in_form(exercise, answer)
        mark = _RULES[exercise](given) if exercise in _RULES else _listed(said[exercise], given)
    except (TypeError, ValueError, KeyError, OverflowError):
        return f"not yet: the answer must be {said[exercise]['form']}; got {reprlib.repr(answer)}"
    return mark if mark == "right" else f"not yet: {mark}"


def _said() -> dict[int, dict[str, str]]:
    """exercise -> answer as JSON, or "form" or "else" -> what is said to it."""
    path = paths.DATA / "exercises" / "01_three_levels.csv"
    table = pd.read_csv(path, dtype={"answer": str, "says": str}, keep_default_na=False)
    return {n: dict(zip(of.answer, of.says, strict=True)) for n, of in table.groupby("exercise")}


def _in_form(exercise: int, answer: Any) -> Any:
    """A word, or numbers of the shape, decimals and range asked for; ValueError for others."""
    if exercise not in _NUMBERS:
        return answer if exercise in _RULES else str(answer).strip(" ().").lower()
    shape, decimals, low, high = _NUMBERS[exercise]
    given = np.asarray(answer.tolist() if hasattr(answer, "tolist") else answer)
    if given.dtype.kind not in "iufO" or given.shape != shape:
        raise ValueError
    given = given.astype(np.float64)
    if not np.allclose(given, given.round(decimals).clip(low, high), rtol=0):
        raise ValueError
    return given


def _listed(said: dict[str, str], given: str | np.ndarray) -> str:
    """What is said to an answer that the table holds: a word, or numbers to within .001."""
    if isinstance(given, str):
        return said[json.dumps(given)]
    # neither "form" nor "else"
    near = [k for k in said if k[0] not in "fe" and np.allclose(given, json.loads(k), 0, 1e-3)]
    return said[near[0] if near else "else"]


def _order(given: np.ndarray) -> str:
    with np.errstate(over="ignore"):
        a, b, c = np.float16(given)
        left, right = (a + b) + c, a + (b + c)
    if (np.float64([a, b, c]) != given).any():
        return f"fp16 does not hold all of these: it makes them {a:g}, {b:g}, {c:g} beforehand"
    return "right" if left != right else f"both give {left:g}; how large is a step of fp16 there?"


def _how_many(given: np.ndarray) -> str:
    missed = 0.98 ** float(given)
    if missed > 0.05:
        return f"if 2 % differ, {given:g} prompts still show nothing in {missed:.2%} of cases"
    return "right" if missed / 0.98 > 0.05 else "enough, but fewer would do: 3/n is rough"


def _hidden(texts: tuple[str, str]) -> str:
    found = [re.findall(r"-?\d[\d,]*(?:\.\d+)?", text) for text in texts]
    right, wrong = ([Decimal(x.replace(",", "")) for x in numbers] for numbers in found)
    if not (right and wrong):
        return "write a number into both, in digits: nothing else is read here"
    if right == wrong:
        return "all numbers have the same values, so both state the same fact"
    alike = Indel.normalized_similarity(*texts)
    return "right" if alike > 0.99 else f"similarity {alike:.3f}: how long a text hides one digit?"


_RULES = {2: _order, 5: _how_many, 6: _hidden}
# exercise -> shape, decimals, smallest, largest
_NUMBERS = {2: ((3,), 9, -1e9, 1e9), 3: ((), 9, 0, 1), 4: ((3,), 9, 0, 1), 5: ((), 0, 1, 1e6)}
