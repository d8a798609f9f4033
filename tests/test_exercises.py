"""The exercises of notebook 01: right answers pass, wrong ones are told why, none is given away."""

import csv
import json
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from lossless_lab import paths
from lossless_lab.exercises import check
from notebooks import build

NOTEBOOK = build.read(build.SOURCES / "01_three_levels.py")
SOLUTIONS = build.FOLDER / "solutions" / "01_three_levels.md"
LONG = "It takes " + "a very " * 30 + "long time, {} minutes."


def solutions():
    """The answers that the teacher's page gives."""
    names = {}
    (block,) = re.findall(r"```python\n(.*?)```", SOLUTIONS.read_text("utf-8"), re.S)
    exec(block, names)
    return names["ANSWERS"]


def exercises_asked():
    """Numbers of the exercises in the notebook's text."""
    (cell,) = [c.source for c in NOTEBOOK.cells if c.source.startswith("## Exercises")]
    return [int(n) for n in re.findall(r"^(\d+)\. ", cell, re.M)]


def test_every_exercise_has_a_solution_that_is_right():
    given = solutions()
    assert list(given) == exercises_asked() == list(range(1, len(given) + 1))
    assert {n: check(n, answer) for n, answer in given.items()} == dict.fromkeys(given, "right")


def law_of_a_greedy_draft():
    """B is proposed every time: kept with probability .2/.5, else A, the only token missing."""
    kept = Fraction(2, 10) / Fraction(5, 10)
    return [1 - kept, kept, 0]


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (1, "A"),
        (1, "(a)"),
        (2, (2048.0, 1.0, 1.0)),
        (2, [4096, 2, 2]),
        (2, (60000.0, 60000.0, -60000.0)),  # overflows in one order alone
        (3, Fraction(1, 2) + Fraction(1, 10)),
        (4, law_of_a_greedy_draft()),
        (5, int(np.ceil(np.log(0.05) / np.log(0.98)))),
        (6, (LONG.format(17), LONG.format(71))),
        (7, "1B "),
        (8, 2),
        (9, np.int64(3)),
        (2, torch.tensor([2048, 1, 1])),
        (2, torch.tensor([2048.0, 1, 1], dtype=torch.bfloat16)),
        (2, pd.Series([2048, 1, 1])),
        (3, Decimal("0.6")),
        (3, torch.tensor(0.6, requires_grad=True)),
        (4, (0.6, 0.4, 1 - 0.6 - 0.4)),  # may come out just below 0
        (5, 149.0),
        (6, (LONG.format("1,024"), LONG.format("1,025"))),
    ],
)
def test_right_answers_from_elsewhere(exercise, answer):
    assert check(exercise, answer) == "right"


@pytest.mark.parametrize(
    ("exercise", "answer", "why"),
    [
        (1, "b", "softmax"),
        (1, "c", "overtakes"),
        (2, (1, 1, 1), "both give 3"),
        (2, (256, 1, 1), "both give 258"),
        (2, (2049, 1, 1), "does not hold all of these: it makes them 2048"),
        (3, 0.4, "another share"),
        (3, 0.5, "two separate draws"),
        (3, 5 / 9, "a proposed A is kept"),
        (3, 0.7, "token by token"),
        (4, (0.7, 0.2, 0.1), "drawn from the very law"),
        (4, (0.55, 0.30, 0.15), "broken rule of the table"),
        (4, (0, 1, 0), "not kept every time"),
        (4, (0.5, 0.5, 0.5), "sum to 1"),
        (5, 50, "show nothing in 36.42%"),
        (5, 148, "show nothing in 5.03%"),
        (5, 150, "fewer would do"),
        (6, ("4.00 GiB", "1.00 GiB"), "similarity 0.875"),
        (6, ("four", "five"), "in digits"),
        (6, (LONG, LONG + "7"), "in digits"),
        (6, (LONG.format("4.0"), LONG.format("4.00")), "same fact"),
        (6, (LONG.format("1,000"), LONG.format("1000")), "same fact"),
        (7, "2", "greedy text"),
        (8, "1b", "not what is drawn"),
        (9, "1a", "stricter"),
        (10, "1b", "checksum"),
    ],
)
def test_a_typical_wrong_answer_is_told_why(exercise, answer, why):
    said = check(exercise, answer)
    assert said.startswith("not yet: ") and why in said


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (1, "d"), (1, 1), (1, ["a"]), (2, (1, 2)), (2, "abc"), (2, (1, 2, 3, 4)), (3, "much"),
        (2, (2048, "1", 1)), (2, (2048, None, 1)), (2, (np.inf, -np.inf, 1)), (2, torch.ones(2)),
        (3, {}), (3, []), (3, [[]]), (3, np.array([])), (3, [0.6] * 5), (3, [0.6]), (3, np.nan),
        (3, -0.6), (3, 60), (3, "0.6"), (3, True), (3, 0.6 + 0j), (4, (0.5, 0.5)), (4, "a"),
        (4, np.nan), (4, (-1, 2, 0)), (4, ((1, 2), 0, 0)), (4, 0.6), (5, "149"), (5, [149]),
        (5, -5), (5, 0), (5, 148.5), (5, np.inf), (5, 10**400), (6, "one text"), (6, (1, 2)),
        (6, (LONG,)), (7, "4"), (7, 2.5), (7, None.__class__), (10, {"1a"}),
        (9, pd.DataFrame({"a": [3]})),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_told_the_form(exercise, answer):
    assert check(exercise, answer).startswith("not yet: the answer must be ")


@pytest.mark.parametrize("answer", ["z" * 9999, 10**400, [1] * 9999, np.ones(9999)])
@pytest.mark.parametrize("exercise", [1, 3, 5])
def test_a_long_answer_is_repeated_in_short(exercise, answer):
    assert len(check(exercise, answer)) < 150


def test_no_answer_and_no_such_exercise():
    assert {check(n, None) for n in exercises_asked()} == {"no answer yet"}
    for unknown in (0, 11, "1", [1], {}, torch.tensor([1])):
        with pytest.raises(ValueError, match=f"one of 1 to 10; got {re.escape(repr(unknown))}"):
            check(unknown, "a")


def test_what_is_said_never_holds_the_solution():
    """Of what is said to wrong answers, no word is the right claim or number."""
    path = paths.DATA / "exercises" / "01_three_levels.csv"
    rows = list(csv.DictReader(path.read_text("utf-8").splitlines()))
    right = {r["exercise"]: json.loads(r["answer"]) for r in rows if r["says"] == "right"}
    assert right["7"] == "1b" and right["3"] == 0.6
    for row in rows:
        if row["exercise"] in right and row["says"] != "right" and row["answer"] != "form":
            shown = {str(x).removeprefix("0") for x in np.ravel(right[row["exercise"]])} - {"a"}
            assert not shown & set(re.findall(r"[\w.]+", row["says"])), row
            assert "share that is rejected" not in row["says"], "1 minus it is the answer"


def test_the_notebook_gives_no_answer_away():
    text = "\n".join(c.source for c in NOTEBOOK.cells)
    assert "solutions/01_three_levels.md" in text and SOLUTIONS.exists()
    assert "149" not in text and "ANSWERS = {1: None" in text
    (shown,) = re.findall(r"forms such as `(\{.*?\})`", text)
    wrong = {n: check(n, answer) for n, answer in eval(shown).items()}
    forms = re.compile("the answer must be one of the letters|token by token|does it sum to 1")
    assert len(wrong) == 3 and all(map(forms.search, wrong.values())), "a form, and no hint"
    assert not re.search(r"<summary>Answers?</summary>", text)


def test_the_number_of_prompts_is_the_exact_bound():
    bound = {
        n: stats.binomtest(0, n, alternative="less").proportion_ci(0.95, method="exact").high
        for n in (148, 149)
    }
    assert bound[149] < 0.02 < bound[148]
    assert [check(5, n) == "right" for n in range(140, 160)].count(True) == 1
