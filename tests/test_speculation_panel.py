"""Notebook 05's panel and charts without a browser: every number again by hand."""

import functools
import zlib
from dataclasses import replace

import matplotlib
import numpy as np
import pandas as pd
import pytest

from lossless_lab import panels, plots
from lossless_lab.mutants.speculative import SPECULATIVE_MUTANTS
from lossless_lab.panels.speculation import TOP_K, step
from lossless_lab.statistical.speculative import (
    RULES,
    STANDARD,
    Rule,
    joint_law,
    joint_tv_limits,
    processed,
)

matplotlib.use("agg")
B07 = np.log([[[0.7, 0.2, 0.1]] * 3, [[0.2, 0.5, 0.3]] * 3])
BROKEN = SPECULATIVE_MUTANTS["resample-from-target"].build(1.0)
BOTH = {**RULES, BROKEN.name: BROKEN}


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def laws(**state):
    content = step(*B07, **{"position": 0, "rules": BOTH, **state})
    frame = content.frames["laws"]
    return frame, np.exp(frame["candidate_logprob"]).to_numpy(), content.text


def test_b07_right_and_broken():
    frame, output, text = laws(gamma=2)
    assert output == pytest.approx([0.7, 0.2, 0.1])
    assert "Accepted: 50.0%" in text and "1.75 tokens per step of the target (at most 3)" in text
    assert "Output: exactly the target's law, TV 0; next 3 tokens jointly: exactly" in text
    assert frame["target_prob"].to_numpy() == pytest.approx([0.7, 0.2, 0.1])
    _, output, text = laws(rule=BROKEN.name)
    assert output == pytest.approx([0.55, 0.30, 0.15])
    assert "Output: NOT the target's law, TV 0.15; next 5 tokens jointly: NOT" in text


@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize("name", SPECULATIVE_MUTANTS)
def test_the_joint_limits_hold_the_enumerated_law(name, gamma, rng):
    """Of γ + 1 tokens at fixed laws, every outcome summed; both limits are 0 just where it is."""
    rule = SPECULATIVE_MUTANTS[name].build(SPECULATIVE_MUTANTS[name].natural)
    n, seen = 4, gamma + 1
    for _ in range(3):
        logits = rng.normal(0, 1.5, (2, seen, n))
        at = processed(*logits, temperature=0.7)
        p = at.target_probs
        at = replace(at, previous_probs=p[[0, *range(gamma)]])
        spread = [
            processed(*(np.broadcast_to(x[k], (*[n] * k, n)) for x in logits), temperature=0.7)
            for k in range(seen)
        ]
        law = joint_law(spread, gamma=gamma, rule=rule)
        target = functools.reduce(np.multiply.outer, p)
        exact = np.abs(law - target).sum() / 2
        least, most = joint_tv_limits(at, rule=rule)
        assert least - 1e-12 <= exact <= most + 1e-12
        assert (exact < 1e-12) == (most < 1e-12) == (least < 1e-12)


def test_faults_that_the_first_token_does_not_show():
    """A bonus from the draft, a rule that is late by one position, one wrong from the third on."""
    bonus = SPECULATIVE_MUTANTS["bonus-from-draft"].build(1.0)
    _, output, text = laws(rules={"b": bonus}, rule="b", gamma=2)
    assert output == pytest.approx([0.7, 0.2, 0.1])
    # 1/4 of rounds end with a bonus, whose TV to the target is 1/2
    assert "exactly the target's law, TV 0; next 3 tokens jointly: NOT" in text
    assert text.endswith(" the target's law, TV 0.125.")

    def third(at):
        right = STANDARD.roles(at)
        rows = np.arange(len(at.target_probs))[:, None] >= 2
        return replace(right, rest=np.where(rows, at.target_probs, right.rest))

    rules = {"third": Rule(name="third", roles=third)}
    *_, text = laws(rules=rules, rule="third", gamma=2)  # .75 of rounds, TV .15 there
    assert "TV 0; next 3 tokens jointly: NOT the target's law, TV 0.11" in text
    late = SPECULATIVE_MUTANTS["one-position-late"].build(1.0)
    logits = np.log([[[0.7, 0.2, 0.1], [0.1, 0.2, 0.7], [0.4, 0.3, 0.3]], [[0.2, 0.5, 0.3]] * 3])
    for position, word in ((0, "exactly"), (1, "NOT")):
        text = step(*logits, position=position, rules={"late": late}, rule="late").text
        assert f"Output: {word} the target's law" in text and "jointly: NOT" in text


def test_a_rule_without_bonus_ends_a_token_earlier():
    rules = {m: SPECULATIVE_MUTANTS[m].build(1.0) for m in ("strict", "no-bonus")}
    texts = [laws(rules=rules, rule=rule, gamma=2)[2] for rule in rules]
    assert "1.75 tokens per step of the target (at most 3)" in texts[0]
    assert "1.50 tokens per step of the target (at most 2)" in texts[1]
    *_, text = laws(rules=rules, rule="no-bonus", gamma=4, quality=1.0)
    assert "4.00 tokens per step of the target (at most 4)" in text


def test_a_rule_is_told_the_logits_and_the_settings():
    """Judged by the raw draft though drawn after top-k: TV 1/3 where raw and filtered differ."""
    raw = SPECULATIVE_MUTANTS["raw-for-processed"].build(1.0)
    for top_k, word in ((2, "NOT"), ("all", "exactly")):
        assert (
            f"Output: {word} the target's law" in laws(rules={"r": raw}, rule="r", top_k=top_k)[2]
        )


def test_the_settings_make_the_laws():
    frame, *_ = laws(temperature=0.5)
    assert frame["target_prob"].to_numpy() == pytest.approx(np.array([49, 4, 1]) / 54)
    frame, output, _ = laws(top_k=2)
    assert frame["draft_prob"].to_numpy() == pytest.approx([0, 5 / 8, 3 / 8])
    assert output == pytest.approx([7 / 9, 2 / 9, 0])
    frame, *_ = laws(top_p=0.7)
    assert frame["target_prob"].to_numpy() == pytest.approx([1, 0, 0])


@pytest.mark.parametrize(
    ("quality", "draft"),
    [(0, [1 / 3] * 3), (0.25, [4 / 15, 5 / 12, 19 / 60]), (0.5, [0.2, 0.5, 0.3]),
     (0.75, [0.45, 0.35, 0.2]), (1, [0.7, 0.2, 0.1])],
)  # fmt: skip
def test_a_poor_draft_is_slower_and_never_wrong(quality, draft):
    frame, output, text = laws(quality=quality, gamma=3)
    assert frame["draft_prob"].to_numpy() == pytest.approx(draft)
    assert output == pytest.approx([0.7, 0.2, 0.1])
    alpha = np.minimum(draft, [0.7, 0.2, 0.1]).sum()
    assert f"Accepted: {alpha:.1%}" in text
    assert f"{1 + alpha + alpha**2 + alpha**3:.2f} tokens per step" in text


def test_every_setting_has_a_picture_of_its_own():
    logits = np.random.default_rng(0).normal(0, 2, (2, 6, 20))
    panel = panels.speculation(*logits, rules=BOTH, decode=lambda ids: f" t{ids[0]}")
    assert panel.error is None
    seen = {panel.png}
    moves = {"position": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.8, "quality": 0.8}
    for name, value in {**moves, "rule": BROKEN.name}.items():
        panel.controls[name].value = value
        assert panel.error is None and panel.png not in seen, name
        seen.add(panel.png)
    before = panel.text
    panel.controls["gamma"].value = 8
    assert panel.text != before and len(panel.figure.axes) == 2
    assert panel.controls["top_k"].options == TOP_K


def test_the_picture_shows_both_laws_the_smaller_and_the_excess():
    frame = pd.DataFrame(
        {"token": [*"ABC"], "target_prob": [0.7, 0.2, 0.1], "draft_prob": [0.2, 0.5, 0.3]}
    )
    ax = plots.acceptance_picture(frame)
    residual, rejected, accepted = ([r.get_width() for r in c] for c in ax.containers)
    assert residual == [0.7, 0.2, 0.1] and rejected == [0, 0.5, 0.3]
    assert accepted == [0.2, 0.2, 0.1]
    assert [t.get_text() for t in ax.get_yticklabels()] == [*"ABC"]
    plots.acceptance_picture(frame[::-1], ax=ax)
    assert len(ax.containers) == 3, "moved, not drawn anew"
    with pytest.raises(ValueError, match="lacks"):
        plots.acceptance_picture(frame[["token"]])


def test_convergence_and_power():
    n = [100, 1000]
    frame = pd.DataFrame({"sampler": ["good"] * 2 + ["bad"] * 2, "n": n * 2})
    frame["total_variation"] = [0.1, 0.03, 0.12, 0.05]
    frame["null_low"], frame["null_high"] = 0.01, 0.2
    frame["exact"] = [0, 0, 0.04, 0.04]
    ax = plots.convergence(frame)
    named = {a.get_label(): a for a in ax.lines}
    assert named["bad"].get_ydata().tolist() == [0.12, 0.05]
    assert list(named["exact TV: bad"].get_ydata()) == [0.04, 0.04]
    assert "exact TV: bad" in [text.get_text() for text in ax.get_legend().get_texts()]
    assert ax.get_xscale() == ax.get_yscale() == "log" and len(ax.collections) == 2
    found = pd.DataFrame(
        {"instrument": "ours", "total_variation": [0.02, 0.01], "power": [1.0, 0.4]}
    )
    (curve,) = (a for a in plots.power_curves(found).lines if a.get_label() == "ours")
    assert curve.get_xdata().tolist() == [0.01, 0.02] and curve.get_ydata().tolist() == [0.4, 1.0]
