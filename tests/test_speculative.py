"""Exact laws of acceptance rules against enumeration of every random branch, in fractions."""

import itertools
import zlib
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lossless_lab.mutants.speculative import SPECULATIVE_MUTANTS, named, target_law
from lossless_lab.statistical.acceptance_integral import accepted
from lossless_lab.statistical.sampler_laws import penalised
from lossless_lab.statistical.speculative import (
    RULES,
    STANDARD,
    Position,
    Rule,
    acceptance,
    emitted,
    expected_tokens,
    joint_law,
    output_law,
    processed,
    speculate,
)
from lossless_lab.statistical.speculative_rules import standard_roles

B07 = [0.7, 0.2, 0.1], [0.2, 0.5, 0.3]


def seeded(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def fractions(rng, n, *, zeros=0.3):
    """A random law of small fractions, some tokens without any mass."""
    weights = rng.integers(1, 9, n) * (rng.random(n) > zeros)
    weights[rng.integers(n)] += 1
    return [Fraction(int(w), int(weights.sum())) for w in weights]


def residual(p, q):
    rest = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    return [x / sum(rest) for x in rest] if sum(rest) else None


def round_outcomes(target, draft, context, gamma):
    """Every way a round can go: (tokens written, its probability). The draft goes first, alone."""
    vocab = range(len(target(context)))
    for drafted in itertools.product(vocab, repeat=gamma):
        chance = Fraction(1)
        for i, token in enumerate(drafted):
            chance *= draft(context + drafted[:i])[token]
        if not chance:
            continue
        for i, token in enumerate(drafted):
            here = context + drafted[:i]
            p, q = target(here), draft(here)
            keep = min(Fraction(1), p[token] / q[token])
            if keep < 1:
                for other, share in enumerate(residual(p, q)):
                    yield (*drafted[:i], other), chance * (1 - keep) * share
            chance *= keep
        for bonus, share in enumerate(target(context + drafted)):
            yield (*drafted, bonus), chance * share


def enumerated(target, draft, gamma, n_tokens, context=()):
    """Law of the next n tokens: rounds until there are enough, every branch of each."""
    law = {}
    for tokens, chance in round_outcomes(target, draft, context, gamma):
        if not chance:
            continue
        if len(tokens) >= n_tokens:
            law[tokens[:n_tokens]] = law.get(tokens[:n_tokens], 0) + chance
            continue
        later = enumerated(target, draft, gamma, n_tokens - len(tokens), context + tokens)
        for rest, share in later.items():
            law[tokens + rest] = law.get(tokens + rest, 0) + chance * share
    return law


def chain(rng, vocab, depth):
    """A law in fractions after every context of up to `depth` tokens."""
    contexts = itertools.chain.from_iterable(
        itertools.product(range(vocab), repeat=k) for k in range(depth + 1)
    )
    return {context: fractions(rng, vocab) for context in contexts}


def stacked(laws, vocab, k):
    rows = [laws[c] for c in itertools.product(range(vocab), repeat=k)]
    return np.array(rows, dtype=float).reshape((vocab,) * (k + 1))


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize(("vocab", "n_tokens"), [(3, 2), (4, 1), (2, 3)])
def test_the_joint_law_equals_every_branch_in_fractions(vocab, n_tokens, gamma, request):
    rng = seeded(request)
    for _ in range(3):
        target, draft = (chain(rng, vocab, gamma + n_tokens) for _ in range(2))
        exact = enumerated(target.__getitem__, draft.__getitem__, gamma, n_tokens)
        positions = [
            Position(target_probs=stacked(target, vocab, k), draft_probs=stacked(draft, vocab, k))
            for k in range(n_tokens)
        ]
        law = joint_law(positions, gamma=gamma)
        for tokens in itertools.product(range(vocab), repeat=n_tokens):
            wanted = exact.get(tokens, Fraction(0))
            straight = Fraction(1)
            for k, token in enumerate(tokens):
                straight *= target[tokens[:k]][token]
            assert wanted == straight, "the enumerator itself is lossless, exactly"
            assert law[tokens] == pytest.approx(float(wanted), abs=1e-15)


def test_b07():
    assert output_law(*B07) == pytest.approx([0.7, 0.2, 0.1], abs=1e-15)
    laws = {
        name: output_law(*B07, rule=SPECULATIVE_MUTANTS[name].build(1.0))
        for name in ("resample-from-target", "greedy-judged-soft", "accept-if-equal")
    }
    assert laws["resample-from-target"] == pytest.approx([0.55, 0.30, 0.15], abs=1e-15)
    assert np.abs(laws["resample-from-target"] - B07[0]).sum() / 2 == pytest.approx(0.15)
    assert laws["greedy-judged-soft"] == pytest.approx([0.6, 0.4, 0], abs=1e-15)
    assert laws["accept-if-equal"] == pytest.approx([0.7, 0.2, 0.1], abs=1e-15)
    assert RULES["standard"] is STANDARD and STANDARD.lossless


@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_acceptance_is_one_minus_total_variation(zeros, request):
    rng = seeded(request)
    p, q = (np.array([fractions(rng, 9, zeros=zeros) for _ in range(50)], float) for _ in range(2))
    tv = [0.5 * np.abs(a - b).sum() for a, b in zip(p, q, strict=True)]
    assert acceptance(p, q) == pytest.approx(1 - np.array(tv), abs=1e-14)
    kept, replaced = emitted(Position(target_probs=p, draft_probs=q))
    assert kept == pytest.approx(np.minimum(p, q), abs=1e-15)
    assert kept + replaced == pytest.approx(p, abs=1e-15)


def test_greedy_and_n_gram_drafts_are_laws_with_one_token(request):
    rng = seeded(request)
    p = rng.dirichlet(np.ones(12), size=12)
    one_hot = np.eye(12)
    assert output_law(p, one_hot) == pytest.approx(p, abs=1e-15)
    assert acceptance(p, one_hot) == pytest.approx(np.diag(p))
    assert output_law(one_hot, p) == pytest.approx(one_hot, abs=1e-15), "a greedy target"


CAP = Fraction(9, 10)
# accept function, and for target p, draft q the share of u it accepts, in fractions
SHAPES = {
    "strict": (lambda p, q, u: u < p / q, lambda p, q: min(1, p / q)),
    "by product": (lambda p, q, u: u * q <= p, lambda p, q: min(1, p / q)),
    "upside down": (lambda p, q, u: 1 - u <= p / q, lambda p, q: min(1, p / q)),
    "capped": (lambda p, q, u: u <= np.minimum(p / q, 0.9), lambda p, q: min(CAP, p / q)),
    "squared": (lambda p, q, u: u**2 <= p / q, None),
    "both ends": (
        lambda p, q, u: np.abs(u - 0.5) >= 0.5 - np.minimum(p / q, 1) / 2,
        lambda p, q: min(1, p / q),
    ),
    "never": (lambda p, q, u: np.zeros(np.broadcast(p, u).shape, bool), lambda p, q: 0),
    "always": (lambda p, q, u: np.ones(np.broadcast(p, u).shape, bool), lambda p, q: 1),
    "in float32": (lambda p, q, u: np.float32(u) <= np.float32(p) / np.float32(q), None),
    "every other quarter": (
        lambda p, q, u: (np.floor(4 * np.asarray(u)) % 2 == 0) & (p >= 0),
        lambda p, q: Fraction(1, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_any_accept_function_is_integrated_over_its_uniform(name, request):
    accept, share = SHAPES[name]
    rng = seeded(request)
    p, q = fractions(rng, 40), fractions(rng, 40, zeros=0)
    floats = np.array(p, float), np.array(q, float)
    place, low, high = accepted(accept, *floats)
    found = np.bincount(place, high - low, minlength=40)
    if share is None:
        ratio = np.minimum(floats[0] / floats[1], 1)
        wanted = np.sqrt(ratio) if name == "squared" else ratio
    else:
        wanted = np.array([share(a, b) for a, b in zip(p, q, strict=True)], dtype=float)
    assert found == pytest.approx(wanted, abs=1e-7 if name == "in float32" else 1e-15)
    assert (low >= 0).all() and (high <= 1).all()


def one_uniform_by_hand(p, q):
    """Law of the rule whose rejecting number draws the replacement, cut at every break point."""
    rest = residual(p, q)
    out = [Fraction(0)] * len(p)
    edges = [sum(rest[:i], Fraction(0)) for i in range(len(p) + 1)] if rest else None
    for token, chance in enumerate(q):
        if not chance:
            continue
        keep = min(Fraction(1), p[token] / chance)
        out[token] += chance * keep
        if keep == 1:
            continue
        for other in range(len(p)):
            out[other] += chance * max(Fraction(0), edges[other + 1] - max(edges[other], keep))
    return out


@pytest.mark.parametrize("vocab", [100, 1000, 5000])
def test_one_heavy_token_rejected_between_the_coarse_numbers_is_seen(vocab, request):
    rng = seeded(request)
    p, q = rng.dirichlet(np.ones(vocab) * 0.3, size=2)
    heavy = vocab // 3 + 1
    p, q = (0.5 * x + 0.5 * (np.arange(vocab) == heavy) for x in (p, q))

    def accept(target, draft, u):
        return (u <= target / draft) & ~(
            np.isclose(draft, q[heavy], rtol=1e-9) & (u > 0.51) & (u < 0.61)
        )

    share = np.minimum(1, p / q)
    lost = min(share[heavy], 0.61) - 0.51
    kept = q * share - lost * q * (np.arange(vocab) == heavy)
    rest = np.maximum(p - q, 0)
    wanted = kept + (1 - kept.sum()) * rest / rest.sum()
    law = output_law(p, q, rule=Rule(name="slit", accept=accept))
    assert law == pytest.approx(wanted, abs=1e-12)
    assert np.abs(law - p).sum() / 2 > 0.01


def test_a_number_used_twice_is_integrated_exactly(request):
    rng = seeded(request)
    rule = SPECULATIVE_MUTANTS["one-uniform"].build(1.0)
    moved = 0
    for _ in range(40):
        p, q = fractions(rng, 6), fractions(rng, 6)
        wanted = one_uniform_by_hand(p, q)
        law = output_law(np.array(p, float), np.array(q, float), rule=rule)
        assert law == pytest.approx(np.array(wanted, float), abs=1e-14)
        moved += wanted != p
    assert moved > 20
    stack = [[fractions(rng, 6) for _ in range(5)] for _ in range(2)]
    p, q = (np.array(side, float) for side in stack)
    rows = [output_law(a, b, rule=rule) for a, b in zip(p, q, strict=True)]
    assert output_law(p, q, rule=rule) == pytest.approx(np.array(rows))


laws = st.lists(st.integers(0, 6), min_size=5, max_size=5).filter(any)


@given(laws, laws)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_standard_rule_keeps_any_law(p, q):
    p, q = (np.array(x) / sum(x) for x in (p, q))
    assert output_law(p, q) == pytest.approx(p, abs=1e-15)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}], ids=str)
def test_two_tokens_of_the_tiny_pair_over_its_whole_vocabulary(settings, tiny_target, tiny_draft):
    """512 x 512 outcomes, every second law by a forward of its own."""
    prompt = tiny_target.tokenizer("def mean(values):\n    return ")["input_ids"]
    after = torch.tensor([[*prompt, token] for token in range(512)])
    with torch.no_grad():
        logits = [model.network(after).logits[:, -2:] for model in (tiny_target, tiny_draft)]
    positions = [processed(*(x[0, 0] for x in logits), **settings)]
    positions.append(processed(*(x[:, 1] for x in logits), **settings))
    right = target_law(positions)
    for gamma in (1, 2, 3):
        law = joint_law(positions, gamma=gamma)
        assert law.shape == (512, 512) and np.abs(law - right).max() <= 1e-15
    wrong = joint_law(positions, gamma=2, rule=SPECULATIVE_MUTANTS["one-uniform"].build(1.0))
    assert np.abs(wrong - right).sum() / 2 > 0.01


FILTERS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in itertools.product((0.6, 1.0, 1.5), (0, 50), (1.0, 0.9), (0.0, 0.05))
] + [{"temperature": 0}]


@pytest.mark.slow
@pytest.mark.smollm2
def test_real_laws_are_kept_under_every_filter(smollm2, request):
    """SmolLM2 on code, drafted by its own first 20 layers, and by itself with half the context."""
    text = "def mean(values):\n    total = sum(values)\n    return total / len(values)\n\n\ndef "
    ids = torch.tensor([smollm2.tokenizer(text)["input_ids"]])
    network = smollm2.network
    with torch.no_grad():
        target = network(ids).logits[0, -12:]
        late = network(ids[:, ids.shape[1] // 2 :]).logits[0, -12:]
        layers = network.model.layers
        network.model.layers = layers[:20]
        try:
            early = network(ids, use_cache=False).logits[0, -12:]
        finally:
            network.model.layers = layers
    assert target.shape[-1] == 49_152
    worst, seen = 0.0, ids[0].tolist()
    for filters, draft, penalty in itertools.product(FILTERS, (early, late), (1.0, 1.3)):
        sides = (penalised(side, seen[:-12], seen[-12:], penalty) for side in (target, draft))
        at = processed(*sides, **filters)
        law = sum(emitted(at))
        worst = max(worst, float(np.abs(law - at.target_probs).max()))
        tv = np.abs(at.target_probs - at.draft_probs).sum(-1) / 2
        assert emitted(at)[0].sum(-1) == pytest.approx(1 - tv, abs=1e-12)
    assert worst <= 1e-12, worst


# -- simulation


def counted(tokens, place, vocab):
    column = tokens[:, place]
    return np.bincount(column[column >= 0], minlength=vocab)


def fits(counts, law):
    """Pooled chi-square of scipy; a token that cannot be is a failure at once."""
    assert not counts[law <= 1e-14].any()
    expected = law * counts.sum()
    big = expected >= 5
    seen = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    return stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue


@pytest.mark.parametrize("name", ["standard", *SPECULATIVE_MUTANTS])
def test_simulated_rounds_follow_the_exact_law(name, request):
    """First position, its acceptance, and the bonus, each over 1e5 rounds; 23 rules at 1e-5."""
    rng = seeded(request)
    rule = STANDARD if name == "standard" else SPECULATIVE_MUTANTS[name].build(0.3)
    at = named(temperature=0.9)[0]
    tokens = speculate([at.target_probs] * 3, [at.draft_probs] * 3, 100_000, rule=rule, rng=rng)
    plain = Position(target_probs=at.target_probs, draft_probs=at.draft_probs)
    kept, replaced = emitted(plain, rule)
    assert fits(counted(tokens, 0, 16), kept + replaced) > 1e-5
    n_second = int((tokens[:, 1] >= 0).sum())
    assert stats.binomtest(n_second, 100_000, float(kept.sum())).pvalue > 1e-5
    bonus = rule.roles(plain).bonus
    if bonus is None:
        assert (tokens[:, 2] == -1).all()
    else:
        assert fits(counted(tokens, 2, 16), bonus / bonus.sum()) > 1e-5


def test_rounds_end_at_the_first_replacement(request):
    tokens = speculate([B07[0]] * 4, [B07[1]] * 4, 20_000, rng=seeded(request))
    length = (tokens >= 0).sum(1)
    assert ((tokens >= 0).cumprod(1).sum(1) == length).all()
    alpha = 0.5
    chances = [0.5, 0.25, 0.125, 0.125]
    assert stats.chisquare(np.bincount(length)[1:], np.array(chances) * 20_000).pvalue > 1e-5
    mean = (1 - alpha**4) / (1 - alpha)
    assert expected_tokens([alpha] * 3) == pytest.approx(mean)
    assert length.mean() == pytest.approx(mean, abs=0.04)


def test_the_published_speeds():
    assert expected_tokens([0.75] * 7) == pytest.approx(3.60, abs=0.005)
    assert expected_tokens([0.8] * 5) == pytest.approx(3.69, abs=0.005)


# -- bad input


@pytest.mark.parametrize("wrong", [[0.5, 1.5], [-0.1], [np.nan], [[0.5, 0.5]], 0.5])
def test_acceptances_are_probabilities(wrong):
    with pytest.raises(ValueError, match="`acceptances` must be a list of probabilities"):
        expected_tokens(wrong)


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ([0.5, 0.4], [0.5, 0.5], "`target_probs` row 0 sums to 0.9, .*within 1e-09"),
        ([0.5, 0.5], [0.5, 0.5 + 1e-8], "`draft_probs` row 0 sums to 1"),
        ([[0.5, 0.5], [1.5, -0.5]], [0.5, 0.5], r"row \(1,\) sums to 1, smallest entry -0.5"),
        ([np.nan, 0.5], [0.5, 0.5], "`target_probs` row 0 sums to nan"),
        (np.float32([0.5, 0.5002]), [0.5, 0.5], "within 0.0001"),
        ([0.5, 0.5], [0.2, 0.3, 0.5], "must have the target's vocabulary, 2 tokens; it has 3"),
        (1.0, [0.5, 0.5], r"`target_probs` must be \[..., vocab_size\]; got shape \(\)"),
    ],
)
def test_bad_laws_are_refused(target, draft, message):
    with pytest.raises(ValueError, match=message):
        output_law(target, draft)


def test_float32_laws_are_taken_at_1e_4_and_no_mass_in_the_draft_is_fine():
    law = output_law(np.float32([0.25, 0.25, 0.50003]), [1.0, 0, 0])
    assert law.sum() == pytest.approx(1, abs=1e-15) and law == pytest.approx(
        [0.25, 0.25, 0.5], abs=1e-4
    )
    assert output_law([1.0, 0, 0], [0, 0.5, 0.5]) == pytest.approx([1, 0, 0])


def test_a_rule_of_ones_own_is_judged_by_its_own_law():
    """A ratio upside down, as a subject that nobody has foreseen."""
    rule = Rule(name="upside down", accept=lambda p, q, u: u <= q / p)
    law = output_law(*B07, rule=rule)
    accept = [Fraction(2, 7), Fraction(1), Fraction(1)]
    q = [Fraction(2, 10), Fraction(5, 10), Fraction(3, 10)]
    kept = [a * b for a, b in zip(accept, q, strict=True)]
    assert law == pytest.approx([float(kept[0] + 1 - sum(kept)), 0.5, 0.3])
    assert target_law(named())[0].sum() == pytest.approx(named()[0].target_probs[0])


@pytest.mark.parametrize(
    "parts, said",
    [
        ({"rest": lambda at: at.target_probs - at.draft_probs}, "`rest` must be at least 0"),
        ({"rest": lambda at: at.target_probs * np.nan}, "`rest` must be at least 0; .*nan"),
        ({"drawn": lambda at: at.draft_probs - 0.3}, "`drawn` must be at least 0"),
    ],
)
def test_rules_whose_weights_are_no_weights_are_refused(parts, said):
    """A residual without its positive part, as people write it."""

    def roles(at):
        return replace(standard_roles(at), **{name: law(at) for name, law in parts.items()})

    rule = Rule(name="forgotten", roles=roles)
    with pytest.raises(ValueError, match=said):
        output_law([0.7, 0.2, 0.1], [0.2, 0.5, 0.3], rule=rule)


def test_an_accept_function_of_ones_and_zeros_is_one_of_true_and_false():
    rule = Rule(name="ints", accept=lambda p, q, u: (u <= p / q).astype(int))
    laws = [[0.7, 0.2, 0.1]] * 2, [[0.2, 0.5, 0.3]] * 2
    drawn = [speculate(*laws, 2000, rule=r, rng=np.random.default_rng(0)) for r in (rule, STANDARD)]
    assert (drawn[0] == drawn[1]).all()


@pytest.mark.parametrize("gamma", [0, -1, 1.5])
def test_a_round_has_a_whole_number_of_proposals(gamma):
    at = Position(target_probs=[0.5, 0.5], draft_probs=[0.9, 0.1])
    with pytest.raises(ValueError, match="`gamma` must be a whole number of at least 1"):
        joint_law([at], gamma=gamma)
