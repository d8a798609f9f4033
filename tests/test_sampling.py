"""The exact law of the next tokens, draws that share their prefix, and samplers held against it."""

import math

import numpy as np
import pytest
import torch
from conftest import PROMPT_S, build_t0
from scipy import stats

from lossless_lab import Decoding, TransformersEngine
from lossless_lab.engines.speculative import (
    counted_drafts,
    exact_output_law,
    processed_logits,
    speculative_rounds,
)
from lossless_lab.mutants.speculative import SPECULATIVE_MUTANTS
from lossless_lab.pipeline.sampling import JointLaw, draw, next_tokens_law
from lossless_lab.statistical.sampler_verdict import judge_sampler
from lossless_lab.statistical.speculative import STANDARD, emitted, processed

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
]


def reference_law(network, prefix, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """One conditional law by a forward of its own, without a cache, filtered by hand in numpy."""
    with torch.no_grad():
        x = network(torch.tensor([prefix]), use_cache=False).logits[0, -1].double().numpy()
    order = np.argsort(-x, kind="stable")
    p = np.exp((x - x.max()) / temperature)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    if min_p:
        p[p < min_p * p.max()] = 0
        p /= p.sum()
    return p


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_joint_law_is_the_product_of_separate_uncached_forwards(t0, settings):
    law = next_tokens_law(t0, PROMPT_S, **settings)
    assert abs(law.probs.sum() - 1) < 1e-9
    first = reference_law(t0, PROMPT_S, **settings)
    expected = {
        (a, b): first[a] * p
        for a in np.flatnonzero(first)
        for b, p in enumerate(reference_law(t0, (*PROMPT_S, a), **settings))
        if p
    }
    assert [tuple(row) for row in law.ids.tolist()] == sorted(expected)
    wanted = np.array([expected[k] for k in sorted(expected)])
    assert np.allclose(law.probs, wanted, rtol=2e-4, atol=1e-9)
    assert np.allclose(law.first().probs, first[first > 0], rtol=1e-4)


def test_three_tokens_in_chunks_of_prefixes(t0):
    law = next_tokens_law(t0, PROMPT_S, n_tokens=3, top_k=9)
    assert len(law.ids) == 9**3 and abs(law.probs.sum() - 1) < 1e-9
    assert len(np.unique(law.ids, axis=0)) == 9**3
    at = 400
    row = law.ids[at].tolist()
    steps = [reference_law(t0, (*PROMPT_S, *row[:i]), top_k=9)[row[i]] for i in range(3)]
    assert law.probs[at] == pytest.approx(math.prod(steps), rel=2e-4)
    assert np.allclose(  # the first two tokens of three are the two of two
        law.probs.reshape(81, 9).sum(1), next_tokens_law(t0, PROMPT_S, top_k=9).probs, rtol=1e-4
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_law(t0, settings):
    n = 40_000
    sampled = draw(t0, PROMPT_S, n, rng=np.random.default_rng(7), **settings)
    counts, probs = next_tokens_law(t0, PROMPT_S, **settings).counted(sampled)
    assert counts.sum() == n and counts[-1] == 0
    order = np.argsort(probs)
    often = probs[order] * n >= 5
    cells = [counts[order][often], probs[order][often] * n]
    if (~often).sum() > 1:
        cells = [np.append(a, n - a.sum()) for a in cells]
    assert stats.chisquare(*cells).pvalue > 1e-3
    halves = sampled[: n // 2, 0], sampled[n // 2 :, 0]  # in no order that tells
    shares = [np.bincount(h, minlength=97) / (n // 2) for h in halves]
    assert 0.5 * np.abs(shares[0] - shares[1]).sum() < 0.05


def test_drawing_costs_a_forward_per_chunk_of_distinct_prefixes(t0, monkeypatch):
    rows, forward = [], type(t0).forward

    def watched(self, ids, **kwargs):
        rows.append(len(ids))
        return forward(self, ids, **kwargs)

    monkeypatch.setattr(type(t0), "forward", watched)
    sampled = draw(t0, PROMPT_S, 5000, rng=np.random.default_rng(0), top_k=20)
    assert rows == [1, len(set(sampled[:, 0]))] and rows[1] <= 20


def test_draws_depend_on_the_generator_alone(t0):
    a, b, c = (draw(t0, PROMPT_S, 50, rng=np.random.default_rng(i)).tolist() for i in (1, 1, 2))
    assert a == b != c


def test_a_sampler_that_adds_a_token_is_caught_as_impossible(t0):
    law = next_tokens_law(t0, PROMPT_S, top_k=3)
    sampled = draw(t0, PROMPT_S, 2000, rng=np.random.default_rng(0), top_k=4)
    counts, probs = law.counted(sampled)
    assert counts[-1] > 0 and judge_sampler(counts, probs, margin=0.05).n_impossible == counts[-1]


def test_a_sampler_at_another_temperature_is_called_different(t0):
    law = next_tokens_law(t0, PROMPT_S, top_k=4)

    def judged(temperature):
        rng = np.random.default_rng(1)
        sampled = draw(t0, PROMPT_S, 20_000, rng=rng, top_k=4, temperature=temperature)
        return judge_sampler(*law.counted(sampled), margin=0.05)

    assert judged(1.0).word == "EQUIVALENT" and not judged(1.0).rejected
    assert judged(2.0).word == "DIFFERENT"


def test_bad_input_is_named(t0):
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="`prompt_ids` must be at least one; got none"):
        next_tokens_law(t0, ())
    with pytest.raises(ValueError, match="`n_tokens` must be at least one; got 0"):
        next_tokens_law(t0, PROMPT_S, n_tokens=0)
    with pytest.raises(ValueError, match="`n` must be at least 1; got 0"):
        draw(t0, PROMPT_S, 0, rng=rng)
    with pytest.raises(ValueError, match=r"88,529,281 continuations here.*`top_k`"):
        next_tokens_law(t0, PROMPT_S, n_tokens=4)
    with pytest.raises(ValueError, match=r"\[n, 2 or more\] ids; got \(3,\)"):
        next_tokens_law(t0, PROMPT_S, top_k=2).counted([1, 2, 3])
    with pytest.raises(TypeError):
        draw(t0, PROMPT_S, 5, rng=rng, topk=3)


def test_too_few_draws_say_how_many_are_needed(t0):
    law = next_tokens_law(t0, PROMPT_S, top_k=4)
    sampled = draw(t0, PROMPT_S, 100, rng=np.random.default_rng(0), top_k=4)
    verdict = judge_sampler(*law.counted(sampled), margin=0.05)
    assert verdict.word == "INCONCLUSIVE" and 1000 < verdict.n_needed < 20_000
    assert f"{verdict.n_needed} draws needed" in str(verdict)


@pytest.fixture(scope="module")
def draft():
    return build_t0(num_hidden_layers=1)


DECODING = Decoding(temperature=1.2, top_k=6, max_new_tokens=2, stop_token_ids=())


@pytest.fixture(scope="module")
def laws(t0, draft):
    """Next-token logits of T0 and of its first layer, processed by transformers."""
    return [processed_logits(network, PROMPT_S, DECODING) for network in (t0, draft)]


def test_rounds_through_the_installed_acceptance_step(t0, draft, laws):
    law = next_tokens_law(t0, PROMPT_S, temperature=1.2, top_k=6)
    right = law.counted(speculative_rounds(*laws, 3000, seed=0))
    assert not judge_sampler(*right, margin=0.05).rejected
    raw = processed_logits(draft, PROMPT_S)  # judged by a law that it was not drawn from
    wrong = law.counted(speculative_rounds(*laws, 3000, judged=raw, seed=0))
    assert judge_sampler(*wrong, margin=0.05).rejected


def test_the_law_of_the_installed_acceptance_step_is_the_targets(laws):
    for prefix in ((), (17,), (22, 71)):
        target, drafted = (logits(prefix)[0] for logits in laws)
        found = exact_output_law(target, drafted, drafted.double().softmax(-1))
        assert abs(found - target.double().softmax(-1)).max() < 3e-7


def test_b07_a_greedy_draft_judged_by_its_softmax():
    target, drafted = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    law = exact_output_law(target.log(), drafted.log(), torch.tensor([0.0, 1.0, 0.0]))
    assert law.tolist() == pytest.approx([0.6, 0.4, 0.0], abs=1e-6)


def test_rounds_of_drafts_are_counted_and_the_network_left_alone(t0, draft):
    own, ids = set(vars(t0)), torch.tensor([PROMPT_S])
    told = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with counted_drafts(t0) as rounds:
        whole = t0.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **told)
    assert set(vars(t0)) == own and whole.shape[1] == len(PROMPT_S) + 12
    (done,) = TransformersEngine(t0, assistant=draft).generate(
        [PROMPT_S], Decoding(max_new_tokens=12), seed=0
    )
    assert set(vars(t0)) == own and done.timings["rounds"] == len(rounds)
    assert sum(accepted + 1 for _, accepted in rounds) == len(done.output_ids) == 12
    assert all(0 <= accepted <= drafted for drafted, accepted in rounds)


def test_the_frame_and_line_of_a_law():
    law = JointLaw(ids=np.array([[1, 2], [1, 4]]), probs=np.array([0.25, 0.75]))
    assert list(law.to_frame()) == ["token_1", "token_2", "probability"]
    assert str(law) == "2 continuations of 2 tokens, likeliest 0.75"
    assert law.first().probs.tolist() == [1.0]


@pytest.mark.parametrize(
    ("named", "drawn", "judged"),
    [("standard", "processed", "processed"), ("raw-for-processed", "processed", "raw"),
     ("greedy-judged-soft", "greedy", "processed")],
)  # fmt: skip
def test_the_installed_step_and_our_rules_give_one_law(t0, draft, laws, named, drawn, judged):
    """Two integrations that share no code: transformers' function, and a rule that mirrors it."""
    raw = [processed_logits(network, PROMPT_S)(())[0] for network in (t0, draft)]
    target, own = (logits(())[0] for logits in laws)
    at = processed(*raw, temperature=1.2, top_k=6)
    rule = STANDARD if named == "standard" else SPECULATIVE_MUTANTS[named].build(1.0)
    greedy = torch.eye(97, dtype=torch.float64)[own.argmax()]
    shares = greedy if drawn == "greedy" else own.double().softmax(-1)
    found = exact_output_law(target, raw[1] if judged == "raw" else own, shares).numpy()
    assert np.abs(found - sum(emitted(at, rule))).max() < 1e-6
    moved = np.abs(found - at.target_probs).sum() / 2
    assert moved < 1e-6 if named == "standard" else moved > 0.01
