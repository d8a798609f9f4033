"""Notebook 01: what it asks the reader to work out by hand, checked without its own code."""

import itertools
import math
import re
from fractions import Fraction

import ml_dtypes
import nbformat
import numpy as np
import pytest
from scipy import stats

from notebooks import build

SOURCE = build.SOURCES / "01_three_levels.py"
CELLS = [c.source for c in build.read(SOURCE).cells]
EXECUTED = nbformat.read(build.FOLDER / "01_three_levels.ipynb", 4).cells


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


def test_the_broken_rule_errs_by_at_most_what_is_accepted(rule):
    """What the notebook says of the hopeless draft, on random laws in fractions."""
    generator = np.random.default_rng(1)
    for _ in range(50):
        weights = generator.integers(1, 9, (2, 4)).tolist()
        target, draft = ([Fraction(w, sum(row)) for w in row] for row in weights)
        broken = exact_output(target, draft, target)
        tv = sum(abs(b - t) for b, t in zip(broken, target, strict=True)) / 2
        assert tv <= sum(map(min, target, draft))
        p, q = (np.float64([float(x) for x in law]) for law in (target, draft))
        assert np.abs(rule["speculative_law"](p, q, p) - p).sum() / 2 == pytest.approx(float(tv))


def outputs(mark):
    """The frame or text that the committed notebook shows below the code cell with `mark`."""
    (shown,) = [c for c in EXECUTED if c.cell_type == "code" and mark in c.source]
    return "\n".join(o.get("text", "") or o["data"]["text/plain"] for o in shown.outputs)


def column(shown, name):
    """One named column of the tables that pandas printed."""
    tables = re.split(r"\n\s*\n", shown.strip("\n"))
    (table,) = [t for t in tables if name in t.splitlines()[0]]
    head, *rows = table.splitlines()
    end = head.index(name) + len(name)
    return {
        " ".join(row[: head.index(name)].split("  ")[0].split()): row[:end].split()[-1]
        for row in rows
    }


def test_a_tie_is_counted_and_never_passed_off_as_equal():
    """bf16's one lost bracket and one of its kept tokens are ties, counted apart."""
    closest = outputs('["bf16: best", "bf16: second"]').splitlines()[2].split()
    assert closest[2] == closest[3] and closest[4] == "True", "the closest call is a tie"
    greedy = outputs('level_1["1c: times the floor"] =')
    assert column(greedy, "1b: greedy tokens equal")["bf16"] == "200"
    assert column(greedy, "of these, ties")["bf16"] == "1"
    brackets = outputs('level_3["lost"] = ')
    lost, tied = (column(brackets, name)["bf16"] for name in ("lost", "of these, ties"))
    assert lost == tied == "1" and column(brackets, "of these, ties")["draft instead"] == "0"


def test_no_level_is_said_to_imply_none():
    text = " ".join(" ".join(CELLS).replace("\n# ", " ").split())
    assert "no level implied another" not in text and "none implies" not in text
    assert text.count("qual bits imply everything") == 2
    assert "Equal laws do not make sampled tokens equal" in text


@pytest.mark.parametrize("shift", [3.0, 100.0])
def test_exercise_1_by_enumeration(shift):
    """A common move breaks 1a, but neither 1b nor the law, nor 1c once the mean is removed."""
    logits = np.array([1.5, -2.25, 0.75])
    moved = logits + shift
    laws = [np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (logits, moved)]
    assert (logits != moved).all() and logits.argmax() == moved.argmax()
    np.testing.assert_allclose(*laws, rtol=1e-15)
    assert np.std(moved - logits) == 0
