"""Flip risk: against enumeration and a simulation, its survival curve, and what it refuses."""

import numpy as np
import pytest
import torch
from scipy import stats

from lossless_lab.numerical.flips import TopTwo, flip_risk, top_two


def top(margins, rival_wins_ties=False):
    """Greedy token 1 everywhere, its rival 0 or 2."""
    margins = np.asarray(margins, dtype=float)
    return TopTwo(np.tile([1, 0 if rival_wins_ties else 2], (len(margins), 1)), margins)


def risk_of(margins, noise, **options):
    """One prompt, and `noise` dealt out to as many variants as are needed."""
    return flip_risk(
        {"p": top(margins, **options)}, [{"p": np.full(len(margins), e)} for e in noise]
    )


def test_the_margin_is_that_of_the_two_largest_logits_and_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 5.0, 4.0], [2.0, -9.0, 2.0]], dtype=torch.bfloat16)
    found = top_two(logits)
    assert found.ids.tolist() == [[1, 2], [0, 2]] and found.margin.tolist() == [1.0, 0.0]
    moved = torch.tensor([[9.0, 4.0, 4.5], [2.0, 99.0, 2.0]])
    assert found.change(moved).tolist() == [-1.5, 0.0]


def test_flipped_equals_argmax_of_the_two_ties_included():
    rng = np.random.default_rng(3)
    x, y = (torch.from_numpy(rng.integers(0, 4, (4000, 5)).astype(np.float32)) for _ in range(2))
    found = top_two(x)
    pair = np.sort(found.ids, axis=1)  # among the two only: argmax of the other run
    best = pair[np.arange(len(x)), y.gather(1, torch.from_numpy(pair)).argmax(1)]
    assert (found.ids[:, 0] == x.argmax(1).numpy()).all()
    assert (found.flipped(found.change(y)) == (best != found.ids[:, 0])).all()


def test_probability_equals_counting_by_hand():
    noise, margins = [-2.0, -1.0, 0.0, 1.0], (0.0, 0.5, 1.0, 3.0)
    strict = [sum(e < -m for e in noise) / 4 for m in margins]
    with_ties = [sum(e <= -m for e in noise) / 4 for m in margins]
    assert risk_of(margins, noise).frame["flip_probability"].tolist() == strict
    lower = risk_of(margins, noise, rival_wins_ties=True).frame["flip_probability"]
    assert lower.tolist() == with_ties != strict


def test_heavy_tails_are_kept_where_a_gaussian_of_the_same_width_loses_them():
    rng = np.random.default_rng(1)
    noise = rng.standard_t(2.5, size=(40, 500)) * 0.05
    margins = np.full(500, 0.6)
    risk = flip_risk({"p": top(margins)}, [{"p": row} for row in noise])
    true = stats.t(2.5).cdf(-0.6 / 0.05)
    gaussian = stats.norm(scale=noise.std()).cdf(-0.6)
    assert risk.frame["flip_probability"].mean() == pytest.approx(true, rel=0.35)
    assert gaussian < true / 10


def test_ties_are_counted_apart_and_the_first_flip_is_due_at_the_mean_rate():
    risk = risk_of([0.0, 0.0, 1.0, 1.0], [-2.0, 2.0])
    assert risk.tie_share == 0.5
    assert risk.expected_tokens == 2.0
    assert "exact ties at 50.0%" in str(risk)


def test_survival_covers_simulated_first_flips_at_its_stated_rate():
    """Prompts flip by their own probabilities: the band holds the share alive 95 % of the time."""
    rng = np.random.default_rng(2)
    n_prompts, n_tokens, n_variants = 30, 40, 12
    margins = {f"p{i}": rng.exponential(1.0, n_tokens) for i in range(n_prompts)}

    def variant():
        return {name: rng.standard_t(4, n_tokens) * 0.1 for name in margins}

    tops = {name: top(m) for name, m in margins.items()}
    curve = flip_risk(tops, [variant() for _ in range(n_variants)]).survival()
    held = []
    for _ in range(400):
        change = variant()
        kept = np.array([np.cumprod(change[n] >= -margins[n]) for n in margins])
        share = kept.mean(0)[[9, 19, 39]]
        rows = curve.iloc[[9, 19, 39]]
        held.append(((rows["low"] <= share) & (share <= rows["high"])).tolist())
    covered = np.sum(held, axis=0)
    upper = stats.beta.ppf(0.99, covered + 1, 400 - covered)
    assert (upper >= 0.95).all(), covered / 400
    wide = (curve["high"] - curve["low"]).iloc[[9, 19, 39]]
    simple = 2 * np.sqrt(np.log(2 / 0.05) / (2 * n_prompts))  # Hoeffding's, for any law
    assert (wide < simple).all()


def test_expected_survival_is_the_product_over_tokens_and_prompts_end_when_they_end():
    risk = flip_risk(
        {"a": top([0, 0]), "b": top([9])}, [{"a": np.array([-1.0, 1.0]), "b": np.array([0.0])}]
    )
    curve = risk.survival().set_index("n_tokens")
    p = risk.frame.set_index(["prompt_id", "position"])["flip_probability"]
    # one variant, and the pooled noise of three changes as two more
    assert p.tolist() == pytest.approx([(1 + 2 / 3) / 3, (0 + 2 / 3) / 3, 0.0])
    assert curve.loc[1, "expected_share"] == pytest.approx((2 - p["a", 0] - p["b", 0]) / 2)
    assert curve.loc[2, "n_prompts"] == 1
    assert curve.loc[2, "expected_share"] == pytest.approx((1 - p["a", 0]) * (1 - p["a", 1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "at least one harmless variant"),
        ([{}], "2 positions of prompt 'p'; got 0"),
        ([{"p": [0.0]}], "got 1"),
        ([{"p": [0.0, float("nan")]}], "1 are not"),
    ],
)
def test_what_cannot_be_used_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        flip_risk({"p": top([1, 2])}, changes)
