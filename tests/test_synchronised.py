"""Samplers with the same noise: what parts them, how few samples it takes, what it cannot see."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from conftest import PROMPT_S, build_t0

from lossless_lab import Decoding
from lossless_lab.engines.shared_noise import drawn_with_shared_noise
from lossless_lab.pipeline.sampling import next_tokens_law
from lossless_lab.pipeline.synchronised import Synchronised, compare_synchronised, synchronise
from lossless_lab.statistical.sampler_verdict import judge_sampler
from lossless_lab.stats.power import n_for_tv

RNG = np.random.default_rng(0)
SETTINGS = Decoding(max_new_tokens=2, temperature=1.2, top_k=4, stop_token_ids=())


def test_shared_noise_samples_the_right_law(t0):
    law = next_tokens_law(t0, PROMPT_S, temperature=1.2, top_k=4)
    sampled = drawn_with_shared_noise(t0, PROMPT_S, range(3000), SETTINGS)
    judged = judge_sampler(*law.counted(sampled), margin=0.05)
    assert judged.pvalue > 1e-3 and not judged.n_impossible


@pytest.mark.parametrize("how", ["batches", "assistant", "early exit"])
def test_the_same_seeds_give_the_same_samples_however_they_are_decoded(t0, how):
    long = Decoding(max_new_tokens=12, temperature=1.0, stop_token_ids=())
    seeds = range(12)
    plain = drawn_with_shared_noise(t0, PROMPT_S, seeds, long)
    options = {
        "batches": {},
        "assistant": {"assistant": build_t0(num_hidden_layers=1)},
        "early exit": {"assistant_early_exit": 1},
    }[how]
    order = [*reversed(seeds)] if how == "batches" else seeds
    other = drawn_with_shared_noise(t0, PROMPT_S, order, long, **options)
    found = compare_synchronised(plain, other[::-1] if how == "batches" else other)
    assert (found.n, found.n_differing) == (144, 0)
    assert found.word(0.05) == "EQUIVALENT" and found.word(0.01) == "INCONCLUSIVE"
    assert len(np.unique(plain, axis=0)) == 12


def test_a_changed_model_parts_as_often_as_its_total_variation_says(t0):
    other = build_t0()
    with torch.no_grad():
        other.lm_head.weight *= 1.1
    laws = [next_tokens_law(n, PROMPT_S, temperature=1.2, top_k=4).first() for n in (t0, other)]
    assert (laws[0].ids == laws[1].ids).all()
    tv = 0.5 * np.abs(laws[0].probs - laws[1].probs).sum()
    one = Decoding(max_new_tokens=1, temperature=1.2, top_k=4, stop_token_ids=())
    drawn = [drawn_with_shared_noise(n, PROMPT_S, range(4000), one) for n in (t0, other)]
    found = compare_synchronised(*drawn)
    low, high = found.limits
    assert low <= tv <= high
    share, error = found.n_differing / found.n, math.sqrt(tv / found.n)
    assert tv - 4 * error < share < 2 * tv / (1 + tv) + 4 * error


def disagreement(p, q):
    """Exactly, for two laws: 1 − Σ 1/(Σ_j max(p_j/p_i, q_j/q_i)), by integrating the race."""
    return 1 - sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(len(p)))


def test_disagreement_follows_its_closed_form_and_lies_between_its_bounds():
    rng = np.random.default_rng(3)
    for _ in range(20):
        p, q = rng.dirichlet(np.ones(6), 2)
        tv = 0.5 * np.abs(p - q).sum()
        exact = disagreement(p, q)
        assert tv - 1e-12 <= exact <= 2 * tv / (1 + tv) + 1e-12
    found = synchronise([p], [q], 20_000, rng=rng)
    assert found.n_differing / found.n == pytest.approx(exact, abs=0.015)


def test_many_seeds_of_a_wide_law_need_little_memory():
    """2,000 seeds x 5,000 tokens would be 80 MB at once; the parts are the same draws."""
    rng = np.random.default_rng(8)
    laws = rng.dirichlet(np.ones(5000), 2)
    tracemalloc.start()
    found = synchronise(*laws[:, None], 2000, rng=np.random.default_rng(4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6
    race = np.random.default_rng(4).exponential(size=(2000, 5000))
    differing = ((race / laws[0]).argmin(1) != (race / laws[1]).argmin(1)).sum()
    assert found.n_differing == differing and found.n == 2000


@pytest.mark.slow
def test_coverage_of_the_limits_over_mixed_contexts():
    """2,000 repetitions in which contexts differ by different amounts; each limit fails 5 %."""
    rng = np.random.default_rng(11)
    p = rng.dirichlet(np.ones(5), 8)
    q = 0.7 * p + 0.3 * rng.dirichlet(np.ones(5), 8) * rng.random((8, 1))
    q /= q.sum(1, keepdims=True)
    tv = 0.5 * np.abs(p - q).sum(1).mean()
    found = [synchronise(p, q, 10, rng=rng).limits for _ in range(2000)]
    low, high = np.array(found).T
    assert np.mean(low > tv) < 0.065 and np.mean(high < tv) < 0.065


def test_it_needs_far_fewer_samples_than_counts_do():
    """80 % power at TV .01: about 161 shared seeds; the chi-square needs 47,028 draws."""
    rng = np.random.default_rng(5)
    p = np.full(16, 1 / 16)
    q = p + np.repeat([0.00125, -0.00125], 8)  # TV .01
    n = math.ceil(math.log(0.2) / math.log(1 - 0.01))
    seen = [synchronise([p], [q], n, rng=rng).n_differing > 0 for _ in range(1000)]
    assert n == 161 and np.mean(seen) > 0.77
    assert n_for_tv(0.01, n_tokens=16) > 290 * n
    never = [synchronise([p], [p], n, rng=rng).n_differing for _ in range(200)]
    assert sum(never) == 0  # equal laws never part: no false alarm


def test_words():
    assert Synchronised(n=299, n_differing=0).word(0.01) == "EQUIVALENT"
    assert Synchronised(n=298, n_differing=0).word(0.01) == "INCONCLUSIVE"
    assert Synchronised(n=1000, n_differing=100).word(0.01) == "DIFFERENT"


def test_padding_is_no_agreement():
    found = compare_synchronised(
        [[1, 2, -1], [3, -1, -1], [4, 5, 6]], [[1, 2, -1], [3, 7, 8], [9, 5, 6]]
    )
    assert (found.n, found.n_differing) == (5, 2)  # one side stopped where the other went on


HALF = [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: compare_synchronised([[1, 2]], [[1]]), r"alike; got \(1, 2\) and \(1, 1\)"),
        (lambda: compare_synchronised([[-1, -1]], [[-1, -1]]), "no token ≥ 0"),
        (lambda: synchronise([[math.nan, 1]], HALF, 9, rng=RNG), "row 0 sums to nan"),
        (lambda: synchronise(HALF, [[-0.5, 1.5]], 9, rng=RNG), "smallest entry -0.5"),
        (lambda: synchronise([[0.7, 0.2]], HALF, 9, rng=RNG), "sums to 0.9"),
        (lambda: synchronise([0.5, 0.5], [0.5, 0.5], 9, rng=RNG), r"\[n, vocab_size\] alike"),
        (lambda: synchronise(HALF, [[0.5, 0.25, 0.25]], 9, rng=RNG), r"got \(1, 2\) and \(1, 3\)"),
        (lambda: synchronise(HALF, HALF, 0, rng=RNG), "`n_seeds` must be at least 1 .* got 0"),
        (lambda: synchronise(HALF, HALF, 1.5, rng=RNG), "whole number; got 1.5"),
        (lambda: Synchronised(n=9, n_differing=0).word(2), "`margin` .* got 2"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
