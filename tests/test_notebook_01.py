"""Notebook 01: what it asks the reader to work out by hand, checked without its own code."""

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from scipy import stats

from notebooks import build

SOURCE = build.SOURCES / "01_three_levels.py"
CELLS = [c.source for c in build.read(SOURCE).cells]


def cell(mark):
    """The one code cell that holds `mark`."""
    (found,) = [c for c in CELLS if mark in c]
    return found


@pytest.fixture
def rule():
    """The notebook's own functions of the rejection rule."""
    names = {"np": np}
    exec(cell("def speculative_law"), names)
    return names


def exact_output(target, draft, after_rejection):
    """Law of the emitted token: every proposal, accepted or rejected, in fractions."""
    law = [Fraction(0)] * len(target)
    for proposed, chance in enumerate(draft):
        accept = min(Fraction(1), target[proposed] / chance) if chance else Fraction(0)
        law[proposed] += chance * accept
        for token, weight in enumerate(after_rejection):
            law[token] += chance * (1 - accept) * weight
    return law


def exact_residual(target, draft):
    positive = [max(Fraction(0), t - d) for t, d in zip(target, draft, strict=True)]
    return [x / sum(positive) for x in positive]


def tenths(*numbers):
    return [Fraction(n, 10) for n in numbers]


def test_three_tokens_by_enumeration_in_fractions():
    target, draft = tenths(7, 2, 1), tenths(2, 5, 3)
    right = exact_output(target, draft, exact_residual(target, draft))
    broken = exact_output(target, draft, target)
    assert right == target
    assert broken == [Fraction(55, 100), Fraction(30, 100), Fraction(15, 100)]
    assert sum(abs(a - b) for a, b in zip(broken, target, strict=True)) / 2 == Fraction(15, 100)


def test_the_bug_of_exercise_2():
    target, draft = tenths(7, 2, 1), tenths(2, 5, 3)
    accept = min(Fraction(1), target[1] / draft[1])  # B is always proposed
    residual = exact_residual(target, draft)
    law = [(1 - accept) * r for r in residual]
    law[1] += accept
    assert law == tenths(6, 4, 0)


@pytest.mark.parametrize("broken", [False, True])
def test_the_notebook_s_rule_equals_the_enumeration(rule, broken):
    laws = [w for w in itertools.product(range(5), repeat=3) if sum(w) == 4]
    for target, draft in itertools.permutations(laws, 2):
        exact = [Fraction(n, 4) for n in target], [Fraction(n, 4) for n in draft]
        p, q = (np.array([float(x) for x in law]) for law in exact)
        after = p if broken else rule["missing"](p, q)
        expected = exact_output(*exact, exact[0] if broken else exact_residual(*exact))
        np.testing.assert_allclose(
            rule["speculative_law"](p, q, after), np.float64(expected), atol=1e-15
        )


def test_doubled_logits_square_the_probabilities():
    squares = [x * x for x in tenths(7, 2, 1)]
    law = [x / sum(squares) for x in squares]
    assert [round(float(x), 3) for x in law] == [0.907, 0.074, 0.019]
    assert round(float(law[0] - Fraction(7, 10)), 3) == 0.207


def test_sums_in_another_order():
    for dtype, big in ((ml_dtypes.bfloat16, 256), (np.float16, 2048)):
        big, one = dtype(big), dtype(1)
        assert (float((big + one) + one), float(big + (one + one))) == (big, float(big) + 2)
        grid = {float(dtype(x)) for x in np.arange(float(big), 2 * float(big), 0.25)}
        assert grid == set(np.arange(float(big), 2 * float(big) + 1, 2)), "even numbers only"


def test_steps_of_a_logit_between_8_and_16():
    assert float(np.spacing(np.float32(8))) == 2**-20 == pytest.approx(1e-6, rel=0.05)
    assert float(np.spacing(ml_dtypes.bfloat16(8))) == 1 / 16


def test_cache_size_and_similarity():
    right, wrong = "The KV cache needs 4.00 GiB", "The KV cache needs 1.00 GiB"
    assert len(right) == 27 and sum(a != b for a, b in zip(right, wrong, strict=True)) == 1
    assert sum(map(int.bit_length, (8, 4096, 32, 8, 128, 2, 2))) - 7 == 32


@pytest.mark.parametrize(("n", "share"), [(3, 0.63), (30, 0.095), (59, 0.0495)])
def test_what_no_difference_leaves_open(n, share):
    exact = stats.binomtest(0, n, alternative="less").proportion_ci(0.95, method="exact").high
    assert exact == pytest.approx(1 - 0.05 ** (1 / n)) == pytest.approx(share, abs=0.004)


def test_draws_agree_with_the_sum_of_squares():
    p = np.array([0.7, 0.2, 0.1])
    pairs = itertools.product(range(3), repeat=2)
    assert math.fsum(p[a] * p[b] for a, b in pairs if a == b) == pytest.approx((p**2).sum())


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({1: "a", 2: "C", 3: "(b)", 4: " c ", 5: "a."}, "right"),
        ({1: "b", 2: "a", 3: "c", 4: "b", 5: "c"}, "not yet, see"),
        (dict.fromkeys(range(1, 6), ""), "no answer"),
    ],
)
def test_the_self_check_marks_answers(answers, expected, capsys):
    exec(cell("KEYS = "), {"MY_ANSWERS": answers, "hashlib": __import__("hashlib")})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(expected in line for line in lines)


def test_hints_of_the_self_check_name_headings():
    names = {"MY_ANSWERS": {}, "hashlib": __import__("hashlib")}
    exec(cell("KEYS = "), names)
    headings = "\n".join(c for c in CELLS if "## " in c)
    assert all(f"## {hint}" in headings for hint in names["SECTIONS"].values())
