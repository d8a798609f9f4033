"""Notebook 01: what it asks the reader to work out by hand, checked without its own code."""

import itertools
import math
import re
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


def test_a_margin_below_a_step_ends_in_a_tie():
    near, far = (np.array(x, ml_dtypes.bfloat16) for x in ([10.02, 9.99], [10.2, 9.9]))
    assert float(near[0]) == float(near[1]) == 10.0
    assert float(far[0]) - float(far[1]) == 5 / 16


def test_what_settles_the_sentences():
    """Figures of the table that its own cells do not print."""
    assert pytest.approx(0.905, abs=5e-4) == 2 * 95 / (2 * (95 + 10))
    parameters = 8_030_261_248  # Llama 3.1 8B
    assert parameters * 2 / 2**30 == pytest.approx(14.96, abs=0.005)
    naive, latent = 2 * 128 * 128, 512 + 64  # DeepSeek's heads of 128 against its latent
    assert round(naive / latent) == 57


def test_the_claims_are_all_there_and_their_places_exist():
    """Fifteen numbered rows; each place named in italics is a heading, each link a notebook."""
    (table,) = [c for c in CELLS if c.startswith("| | the sentence")]
    rows = [
        line.split("|")
        for line in table.splitlines()
        if line[:3].strip("| ").isdigit() or line[2:4].strip().isdigit()
    ]
    assert [int(row[1]) for row in rows] == list(range(1, 16))
    assert all(row[3].strip().startswith(("false", "it depends")) for row in rows)
    headings = "\n".join(re.findall("^#+ .*$", "\n".join(CELLS), re.M))
    for place, link in ((row[4], re.findall(r"\((\d\d_\w+)\.ipynb\)", row[4])) for row in rows):
        assert all((build.SOURCES / f"{name}.py").exists() for name in link), link
        if not link:
            named = re.findall(r"\*([^*]+)\*", place)
            assert named or "just above" in place
            assert all(name in headings for name in named), (named, place)
