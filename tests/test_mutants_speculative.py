"""Broken acceptance rules: each law again by enumeration in fractions, and who moves it by what."""

import math
from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from lossless_lab.mutants.speculative import (
    KINDS,
    SPECULATIVE_MUTANTS,
    named,
    target_law,
)
from lossless_lab.statistical.speculative import Position, processed

LOSSY = [n for n, m in SPECULATIVE_MUTANTS.items() if m.kind != "lossless"]
LOSSLESS = [n for n, m in SPECULATIVE_MUTANTS.items() if m.kind == "lossless"]
B07 = Position(target_probs=[0.7, 0.2, 0.1], draft_probs=[0.2, 0.5, 0.3])
VOCAB = range(16)


# -- laws of the named chain, written again without the package


def normal(weights):
    total = sum(weights)
    return [w / total for w in weights]


def law(logits, *, temperature=1.0, top_k=0, top_p=1.0, top_p_first=False):
    """Softmax and filters of distinct logits, in fractions of the float64 exponentials."""
    ranked = sorted(VOCAB, key=lambda i: -logits[i])
    weights = normal([Fraction(math.exp(x / temperature)) for x in logits])

    def nucleus(weights):
        total, kept = Fraction(0), set()
        for i in ranked:
            if total < Fraction(top_p):
                kept.add(i)
            total += weights[i]
        return normal([w if i in kept else Fraction(0) for i, w in enumerate(weights)])

    def likeliest(weights):
        kept = ranked[: top_k or len(ranked)]
        return normal([w if i in kept else Fraction(0) for i, w in enumerate(weights)])

    for step in (nucleus, likeliest) if top_p_first else (likeliest, nucleus):
        weights = step(weights)
    return weights


def logits_after(context):
    """Of target and draft: Zipf's law, in another order after each first token."""
    c = context[0] if context else None
    after = (0, 2) if c is None else (3 * c, 3 * c + 2 + c % 3)
    ranks = [[(5 * t + shift) % 16 for t in VOCAB] for shift in after]
    return [-math.log(1 + r) for r in ranks[0]], [-0.7 * math.log(1 + r) for r in ranks[1]]


def bf16(x):
    return float(np.float64(x).astype(ml_dtypes.bfloat16))


def laws_at(context, settings):
    t, d = logits_after(context)
    temperature = settings.get("temperature", 1.0)
    return SimpleNamespace(
        p=law(t, **settings),
        q=law(d, **settings),
        raw_p=law(t),
        raw_q=law(d),
        warm_q=law(d, temperature=2.0),
        cold_p=law(t, temperature=temperature**2),
        first_p=law(t, **settings, top_p_first=True),
        rounded_q=law([bf16(x) for x in d]),
        before=law(logits_after(context[:-1])[0], **settings),
    )


# -- one position of each rule: mass of every token as accepted, as replaced, and the bonus's law


def positive(p, q):
    return [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]


def ratio(p, q):
    return lambda d: min(Fraction(1), p[d] / q[d]) if q[d] else Fraction(1)


def branches(drawn, keep, rest, *, strikes=False):
    kept, replaced = [Fraction(0)] * len(drawn), [Fraction(0)] * len(drawn)
    for d, chance in enumerate(drawn):
        if not chance:
            continue
        kept[d] += chance * keep(d)
        weights = [w if x != d or not strikes else Fraction(0) for x, w in enumerate(rest)]
        for x, w in enumerate(weights if keep(d) < 1 else []):
            replaced[x] += chance * (1 - keep(d)) * w / sum(weights)
    return kept, replaced


def standard(a, p=None, q=None, drawn=None, rest=None):
    p, q = p or a.p, q or a.q
    return *branches(drawn or a.q, ratio(p, q), rest or positive(p, q)), p


def with_one_uniform(a):
    rest = normal(positive(a.p, a.q))
    edges = [sum(rest[:i], Fraction(0)) for i in range(17)]
    kept, replaced, _ = standard(a)
    replaced = [
        sum(
            a.q[d] * max(Fraction(0), edges[x + 1] - max(edges[x], ratio(a.p, a.q)(d)))
            for d in VOCAB
        )
        for x in VOCAB
    ]
    return kept, replaced, a.p


def two_candidates(a, pruned):
    first, rest = branches(a.q, ratio(a.p, a.q), positive(a.p, a.q))
    left = sum(rest)
    p = normal(positive(a.p, a.q)) if pruned else a.p
    second, after = branches(a.q, ratio(p, a.q), positive(p, a.q))
    kept = [x + left * y for x, y in zip(first, second, strict=True)]
    return kept, [left * x for x in after], a.p


def favourite(q):
    return [Fraction(int(i == q.index(max(q)))) for i in range(len(q))]


def normal_bf16(q):
    return normal([Fraction(bf16(float(x))) for x in q])


def typical(p):
    """Whether each token is kept: above min(.09, .3 e^−entropy) of the target's law."""
    entropy = -sum(float(x) * math.log(x) for x in p if x)
    return [Fraction(int(x > min(0.09, 0.3 * math.exp(-entropy)))) for x in p]


ORACLES = {
    "resample-from-target": lambda a: standard(a, rest=a.p),
    "target-but-not-the-rejected": lambda a: (
        *branches(a.q, ratio(a.p, a.q), a.p, strikes=True), a.p
    ),
    "greedy-judged-soft": lambda a: standard(a, drawn=favourite(a.q)),
    "raw-for-processed": lambda a: standard(a, q=a.raw_q, drawn=a.q),
    "other-temperature": lambda a: standard(a, q=a.warm_q, drawn=a.q),
    "residual-of-raw-target": lambda a: standard(a, rest=positive(a.raw_p, a.q)),
    "ratio-capped": lambda a: (
        *branches(
            a.q, lambda d: min(Fraction(9, 10), a.p[d] / a.q[d]), positive(a.p, a.q)
        ), a.p
    ),
    "ensemble": lambda a: (
        *branches(
            a.q,
            lambda d: min(Fraction(1), Fraction(3, 10) + Fraction(7, 10) * a.p[d] / a.q[d]),
            positive(a.p, a.q),
        ), a.p
    ),
    "typical-acceptance": lambda a: (*branches(a.q, typical(a.p).__getitem__, a.p), a.p),
    "bonus-from-draft": lambda a: (*standard(a)[:2], a.q),
    "one-uniform": with_one_uniform,
    "one-position-late": lambda a: standard(a, p=a.before),
    "tree-not-pruned": lambda a: two_candidates(a, pruned=False),
    "temperature-twice": lambda a: standard(a, p=a.cold_p),
    "top-p-first": lambda a: standard(a, p=a.first_p),
    "stop-token-barred": lambda a: (
        *branches(a.q, ratio(a.p, a.q), [0, *positive(a.p, a.q)[1:]]), a.p
    ),
    "bf16-probs-drawn": lambda a: standard(a, drawn=normal_bf16(a.q)),
    "bf16-logits-drawn": lambda a: standard(a, drawn=a.rounded_q),
    "strict": standard,
    "no-bonus": lambda a: (*standard(a)[:2], None),
    "residual-not-normalised": standard,
    "temperature-twice-at-1": lambda a: standard(a, p=a.cold_p),
    "accept-if-equal": lambda a: (*branches(a.q, lambda d: a.p[d], a.p, strikes=True), a.p),
    "two-candidates": lambda a: two_candidates(a, pruned=True),
}  # fmt: skip


def enumerated(name, settings):
    """Joint law of two tokens by rounds of one proposal: accepted then bonus, or two rounds."""
    first = ORACLES[name](laws_at((), settings))
    joint = np.zeros((16, 16))
    for x in VOCAB:
        kept, replaced, bonus = ORACLES[name](laws_at((x,), settings))
        anew = [float(k + r) for k, r in zip(kept, replaced, strict=True)]
        after = anew if bonus is None else [float(b) for b in bonus]
        joint[x] = float(first[0][x]) * np.array(after) + float(first[1][x]) * np.array(anew)
    return joint


@pytest.mark.parametrize("name", SPECULATIVE_MUTANTS)
def test_every_law_equals_its_enumeration_in_fractions(name):
    mutant = SPECULATIVE_MUTANTS[name]
    wanted = enumerated(name, mutant.settings)
    found = mutant.joint_law(named(**mutant.settings))
    assert wanted.sum() == pytest.approx(1, abs=1e-12)
    assert found == pytest.approx(wanted, abs=1e-13)
    target = np.array(
        [
            [float(a * b) for b in laws_at((x,), mutant.settings).p]
            for x, a in enumerate(laws_at((), mutant.settings).p)
        ]
    )
    assert target_law(named(**mutant.settings)) == pytest.approx(target, abs=1e-13)
    assert mutant.total_variation() == pytest.approx(np.abs(wanted - target).sum() / 2, abs=1e-12)


@pytest.mark.parametrize("name", LOSSY)
def test_every_lossy_one_moves_the_law_and_less_at_a_smaller_dose(name):
    mutant = SPECULATIVE_MUTANTS[name]
    tv = [mutant.total_variation(dose=dose) for dose in mutant.doses]
    assert tv == sorted(tv, reverse=True) and tv[-1] > 1e-7
    assert mutant.natural == mutant.doses[0] == max(mutant.doses)
    if mutant.kind == "sampling":
        assert tv[0] > 0.01
    else:
        assert tv[0] < 0.001, "a million draws would be needed"


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("name", LOSSLESS)
def test_no_lossless_one_moves_the_law(name, gamma):
    mutant = SPECULATIVE_MUTANTS[name]
    assert mutant.total_variation(gamma=gamma) <= 1e-12
    rng = np.random.default_rng(gamma)
    for _ in range(5):
        first, after = (rng.dirichlet(np.full(20, 0.3), size=(2, *rows)) for rows in ((), (20,)))
        positions = [Position(target_probs=p, draft_probs=q) for p, q in (first, after)]
        assert mutant.total_variation(positions, gamma=gamma) <= 1e-12


def test_kinds_and_names():
    assert {m.kind for m in SPECULATIVE_MUTANTS.values()} == set(KINDS)
    for name, mutant in SPECULATIVE_MUTANTS.items():
        rule = mutant.build(mutant.natural)
        assert rule.name == mutant.name == name and rule.note == mutant.imitates
        assert rule.lossless == (mutant.kind == "lossless")
    assert set(ORACLES) == set(SPECULATIVE_MUTANTS)


# of the last: .3 is rejected at B, then A : C = 7 : 1, and .2 at C, then A : B = 7 : 2
BY_HAND = {
    "resample-from-target": [0.55, 0.30, 0.15],
    "greedy-judged-soft": [0.6, 0.4, 0.0],
    "target-but-not-the-rejected": [
        0.2 + 0.3 * 7 / 8 + 0.2 * 7 / 9, 0.2 + 0.2 * 2 / 9, 0.1 + 0.3 / 8
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_b07_by_hand(name):
    mutant, tv = (
        SPECULATIVE_MUTANTS[name],
        0.5 * np.abs(np.subtract(BY_HAND[name], [0.7, 0.2, 0.1])),
    )
    assert mutant.joint_law([B07]) == pytest.approx(BY_HAND[name], abs=1e-15)
    assert mutant.total_variation([B07]) == pytest.approx(tv.sum(), abs=1e-15)
    assert mutant.total_variation([B07], dose=0.25) == pytest.approx(tv.sum() / 4, abs=1e-15)


@pytest.mark.smollm2
@pytest.mark.slow
def test_bf16_draws_on_real_laws_are_of_the_published_size(smollm2, record_property):
    """Median TV 1.6e-4 for probabilities and 1.6e-3 for logits, within a factor of 3."""
    import torch

    text = "The law of large numbers says that the mean of many draws comes close to what it "
    ids = torch.tensor([smollm2.tokenizer(text * 3)["input_ids"]])
    with torch.no_grad():
        logits = smollm2.network(ids).logits[0, 4:]
    at = processed(logits, logits.roll(1, 0))
    for name, size in (("bf16-probs-drawn", 1.6e-4), ("bf16-logits-drawn", 1.6e-3)):
        drawn = SPECULATIVE_MUTANTS[name].build(1.0).roles(at).drawn
        drawn = drawn / drawn.sum(-1, keepdims=True)
        median = np.median(np.abs(drawn - at.draft_probs).sum(-1) / 2)
        record_property(name, f"median TV {median:.2g} over {len(logits)} positions")
        assert size / 3 < median < size * 3, (name, median)


def test_filters_off_make_raw_and_processed_the_same():
    for name in ("raw-for-processed", "residual-of-raw-target", "top-p-first"):
        assert SPECULATIVE_MUTANTS[name].total_variation(named()) <= 1e-12
    for settings in ({}, {"temperature": 1.0}):
        assert SPECULATIVE_MUTANTS["temperature-twice"].total_variation(named(**settings)) <= 1e-12
