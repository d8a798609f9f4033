"""Rates of the test of a sampler, honest and not."""

import math
import zlib

import numpy as np
import pytest
import torch
from scipy import stats

from lossless_lab.statistical.goodness_of_fit import SIZE, sampler_fit
from lossless_lab.statistical.sampler_laws import sampler_probs
from lossless_lab.stats.intervals import share_interval

V = 64


def laws(rng, n, scale=2.5):
    """Logits as a model has them: some positions nearly certain, others wide open."""
    widths = rng.uniform(0.3, scale, (n, 1))
    return torch.tensor(rng.standard_normal((n, V)) * widths, dtype=torch.float32)


def draw(probs, rng):
    p = probs.double().numpy()
    return (p.cumsum(1) > rng.random((len(p), 1)) * p.sum(1, keepdims=True)).argmax(1).tolist()


def seeded(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


FILTERS = [{}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 7, "min_p": 0.05}]


def rejections(rng, repetitions, n_tokens, settings, emit, stop=()):
    """How often a sampler `emit` is rejected; rows end at `stop`, as generation does."""
    found = 0
    for _ in range(repetitions):
        pieces = []
        for _ in range(n_tokens // 16):
            logits = laws(rng, 16)
            ids = emit(logits, rng)
            n = next((i + 1 for i, token in enumerate(ids) if token in stop), 16)
            pieces.append((logits[:n], ids[:n]))
        found += sampler_fit(pieces, **settings, rng=rng).rejected
    return found


@pytest.mark.parametrize("settings", FILTERS)
@pytest.mark.parametrize("stop", [(), (1, 2, 3)])
def test_an_honest_sampler_is_rejected_as_rarely_as_stated(settings, stop, request):
    def honest(logits, rng):
        return draw(sampler_probs(logits, **settings), rng)

    n = 200
    found = rejections(seeded(request), n, 240, settings, honest, stop)
    low = stats.binomtest(found, n, alternative="greater").proportion_ci(0.999).low
    assert low <= SIZE, f"{found} of {n}"


def speculative(logits, rng, sharpened):
    """Draft, accept with min(1, p/q), else draw from (p − q)+; with p sharpened it is broken."""
    p = (logits * sharpened).softmax(-1).double()
    q = (logits + torch.tensor(rng.standard_normal(logits.shape))).softmax(-1).double()
    drafted = torch.tensor(draw(q, rng))[:, None]
    kept = torch.tensor(rng.random((len(p), 1))) < p.gather(1, drafted) / q.gather(1, drafted)
    rest = torch.tensor(draw((p - q).clamp(min=0) + 1e-300, rng))[:, None]
    return torch.where(kept, drafted, rest)[:, 0].tolist()


BROKEN = {
    "temperature off by 16 %": (lambda x, r: draw(sampler_probs(x, temperature=1 / 1.16), r), 0.9),
    "the broken speculative rule": (lambda x, r: speculative(x, r, 5.0), 0.99),
    "an id that is twice as likely": (lambda x, r: draw(doubled(x), r), 0.9),
    "always the likeliest": (lambda x, r: x.argmax(-1).tolist(), 0.99),
}


def doubled(x):
    return (x + math.log(2) * (torch.arange(V) < V // 4)).softmax(-1)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sampler_is_seen(name, request, record_property):
    emit, power = BROKEN[name]
    n = 30
    found = rejections(seeded(request), n, 1920, {}, emit)
    record_property("power", f"{name}: {found} of {n} rejected at 1,920 tokens")
    assert share_interval(found, n, alternative="greater").low > power - 0.15, f"{found} of {n}"


def test_the_right_speculative_rule_is_not_rejected_more_often(request):
    n = 200
    found = rejections(seeded(request), n, 240, {}, lambda x, r: speculative(x, r, 1.0))
    assert stats.binomtest(found, n, alternative="greater").proportion_ci(0.999).low <= SIZE


def test_one_impossible_token_is_a_finding_by_itself(request):
    rng = seeded(request)
    logits = laws(rng, 16)
    logits[3, 7] = -math.inf
    ids = draw(sampler_probs(logits), rng)
    assert not sampler_fit([(logits, ids)], rng=rng).n_impossible
    ids[3] = 7
    fit = sampler_fit([(logits, ids)], rng=rng)
    assert fit.rejected and fit.n_impossible == 1
    assert "1 of them impossible" in str(fit)
    outside = [int(row.argmin()) for row in logits]
    assert sampler_fit([(logits, outside)], top_p=0.5, rng=rng).n_impossible == 16


def test_a_logit_that_is_no_number_is_no_law():
    logits = torch.zeros(3, 4)
    logits[1, 2] = math.nan
    with pytest.raises(ValueError, match="row 1 is no law; its largest logit is nan"):
        sampler_fit([(logits, [0, 0, 0])], rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("shape", "ids", "says"),
    [
        ((1, 4), [0, 1, 2], r"got 3 ids for logits \(1, 4\) in piece 1"),
        ((3, 4), [0], r"got 1 ids for logits \(3, 4\)"),
        ((0, 4), [1], "got 1 ids"),
        ((2, 4), [], "got 0 ids"),
        ((2, 4), [1, -1], "got -1 as an id"),
        ((2, 4), [1, 4], "got 4 as an id"),
        ((4,), [1], r"got 1 ids for logits \(4,\)"),
    ],
)
def test_one_token_for_each_law(shape, ids, says):
    pieces = [(torch.zeros(1, 4), [0]), (torch.zeros(shape), ids)]
    with pytest.raises(ValueError, match=says):
        sampler_fit(pieces, rng=np.random.default_rng(0))


def test_no_tokens_reject_nothing():
    fit = sampler_fit([(torch.zeros(0, 4), [])], rng=np.random.default_rng(0))
    assert fit.n_tokens == 0 and not fit.rejected
