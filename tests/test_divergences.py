"""Distances between laws against mpmath, scipy, numpy and closed forms; mutants must be seen."""

import math

import mpmath
import numpy as np
import pandas as pd
import pytest
import scipy.spatial.distance
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import divergences as benchmark
from lossless_lab.statistical import distances, laws
from lossless_lab.statistical.divergences import (
    MEASURES,
    by_prompt,
    distribution,
    divergences,
    from_logits,
    from_probs,
    js_divergence,
    kl_divergence,
    total_variation,
)

INF = math.inf
FIVE = (*MEASURES, "hellinger")
BATCH = [[2, 1, 0, 0.5], [0, 0, 3, 1]], [[1.5, 1, 0.2, 0.5], [0, 0.5, 2, 1]]


def exact(a, b):
    """FIVE of two rows of logits in 50 digits, by their definitions."""
    with mpmath.workdps(50):

        def law(row):
            weights = [mpmath.exp(float(x)) if x > -INF else mpmath.mpf(0) for x in row]
            total = mpmath.fsum(weights)
            return [w / total for w in weights]

        def kl(p, q):
            if any(x > 0 and y == 0 for x, y in zip(p, q, strict=True)):
                return mpmath.inf
            return mpmath.fsum(x * mpmath.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)

        p, q = law(a), law(b)
        m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
        tv = mpmath.fsum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2
        steps = (mpmath.sqrt(x) - mpmath.sqrt(y) for x, y in zip(p, q, strict=True))
        root = mpmath.sqrt(mpmath.fsum(step**2 for step in steps) / 2)
        return [float(v) for v in (kl(p, q), kl(q, p), (kl(p, m) + kl(q, m)) / 2, tv, root)]


def rows(kind, size, scale, dtype):
    rng = torch.Generator().manual_seed(size)

    def noise():
        return torch.randn(size, dtype=torch.float64, generator=rng)

    a = noise() * 3
    if kind == "peaked":
        a[1] += 30
    if kind == "far":
        return (10 * a).to(dtype), (30 * noise()).to(dtype)
    b = a.to(dtype).double() + scale * noise()
    if kind == "shifted":
        b = b + 4
    if kind == "masked":
        a[2:4] = b[2:4] = -INF
    if kind == "filtered":  # the candidate reaches only a part of the vocabulary
        b[a < 0] = -INF
    if kind == "rare":  # one token far off, with next to no mass
        a[0], b[0] = -60, -40
    return a.to(dtype), b.to(dtype)


KINDS = ("random", "peaked", "masked", "filtered", "shifted", "rare", "far")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-6)])
def test_relative_precision_against_mpmath(kind, dtype, tolerance):
    """From 1e-12 up, where the textbook sum in float32 is lost below 1e-8."""
    for size in (5, 97, 700):
        for scale in (2e-6, 1e-5, 1e-3, 0.1, 1.0, 5.0):
            a, b = rows(kind, size, scale, dtype)
            row = divergences(a[None], b[None]).frame.iloc[0]
            for measure, truth in zip(FIVE, exact(a, b), strict=True):
                if truth >= 1e-12:
                    assert row[measure] == pytest.approx(truth, rel=tolerance), (measure, scale)
                assert row[measure] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-6)])
def test_relative_precision_at_49152_entries(dtype, tolerance):
    a, b = rows("masked", 49152, 4e-6, dtype)
    row = divergences(a[None], b[None]).frame.iloc[0]
    expected = exact(a, b)
    assert 1e-12 < min(expected) < 1e-11
    assert row[list(FIVE)].tolist() == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("mask", [-900.0, -1e4, -1e9, -1e15, -1e30, torch.finfo().min])
def test_masks_of_large_finite_logits(mask):
    """Not −inf but `finfo.min`, as attention masks and logit processors write it."""
    even, bare = [0.0, 0.0, 0.0], [0.0, 0.0, mask]
    for a, b in ((even, bare), (bare, even)):
        found = divergences(torch.tensor([a]), torch.tensor([b])).frame.iloc[0]
        for name, value in zip(FIVE, exact(a, b), strict=True):
            assert found[name] == pytest.approx(value, rel=1e-6)


def test_the_textbook_sum_would_fail():
    a, b = rows("random", 2000, 1e-5, torch.float32)
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    truth = exact(a, b)[0]
    assert abs(float((p.exp() * (p - q)).sum()) / truth - 1) > 1


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_bounds_that_every_pair_obeys(data):
    size = data.draw(st.integers(1, 9))
    logit = st.one_of(st.floats(-50, 50, width=32), st.just(-INF))
    pair = [data.draw(st.lists(logit, min_size=size, max_size=size)) for _ in range(2)]
    if not all(any(x > -INF for x in row) for row in pair):
        return
    a, b = (torch.tensor([row], dtype=torch.float32) for row in pair)
    forward, backward, js, tv = divergences(a, b).frame.iloc[0][list(MEASURES)]
    assert min(forward, backward, js, tv) >= 0
    assert js <= math.log(2) and tv <= 1
    floor = tv**2 * (1 - 1e-4) - 1e-30  # what underflows is let go
    assert forward >= 2 * floor and backward >= 2 * floor  # Pinsker
    assert floor / 2 <= js <= tv * math.log(2) * (1 + 1e-4)
    swapped = divergences(b, a).frame.iloc[0]
    assert swapped[MEASURES[1]] == pytest.approx(forward, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_identical_logits_give_exactly_zero(dtype):
    x = torch.randn(40, 301, generator=torch.Generator().manual_seed(0)).to(dtype) * 9
    x[:, 5:9] = -INF
    found = divergences(x, x.clone())
    assert (found.frame[[*MEASURES, "logit_rms"]] == 0).all(axis=None)
    assert found.frame["top1_agree"].all() and not found.infinite and not found.undefined


def test_values_of_the_known_cases():
    kl = lambda a, b: float(kl_divergence(a, b))  # noqa: E731
    masked = from_logits([2, 1, 0, -INF]), from_logits([2, 1.5, 0, -INF])
    assert kl(*masked) == pytest.approx(0.02499, abs=5e-6)
    log_probs = [law.logits.log_softmax(-1) for law in masked]
    assert torch.nn.functional.kl_div(*log_probs[::-1], reduction="sum", log_target=True).isnan()
    p, q = from_probs([0.5, 0.5, 0]), from_probs([0.25, 0.25, 0.5])
    assert kl(p, q) == pytest.approx(math.log(2), rel=1e-12) and kl(q, p) == INF
    p, q = from_probs([0.4, 0.6, 0]), from_probs([0.5, 0.5, 0])
    assert kl(p, q) == pytest.approx(0.0201, abs=5e-5)
    broken = from_probs([0.7, 0.2, 0.1]), from_probs([0.6, 0.4, 0])
    assert kl(*broken) == INF and float(total_variation(*broken)) == pytest.approx(0.2, rel=1e-12)


@pytest.mark.filterwarnings("ignore:reduction")
def test_direction_and_averaging_of_a_batch():
    """Mean over positions, not over positions × vocabulary, and the direction that is asked for."""
    a, b = (torch.tensor(side, dtype=torch.float64) for side in BATCH)
    found = divergences(a, b)
    assert found.mean(MEASURES[0]) == pytest.approx(0.0811, abs=5e-5)
    assert found.mean(MEASURES[1]) == pytest.approx(0.0943, abs=5e-5)
    kl_div = torch.nn.functional.kl_div
    logs = b.log_softmax(-1), a.log_softmax(-1)
    batchmean = kl_div(*logs, log_target=True, reduction="batchmean")
    assert found.mean(MEASURES[0]) == pytest.approx(float(batchmean), rel=1e-12)
    assert kl_div(*logs, log_target=True, reduction="mean") == pytest.approx(float(batchmean) / 4)


def test_raw_against_processed_logprobs():
    """The same model, one side already divided by a temperature of 0.7."""
    logits = np.array([1.2, 0.7, 0, -0.9])
    a, b = from_logits(logits), from_logits(logits / 0.7)
    values = kl_divergence(a, b), kl_divergence(b, a), total_variation(a, b)
    assert np.allclose(values, (0.0285, 0.0252, 0.0890), atol=5e-5)
    sides = torch.tensor(logits)[None], torch.tensor(logits / 0.7)[None]
    assert divergences(*sides).mean(MEASURES[0]) == pytest.approx(float(values[0]), rel=1e-9)
    processed = np.array([-0.542, -1.256, -2.256, -3.542])  # as a server prints them
    recovered = from_logits(0.7 * processed)  # p^T, renormalised
    assert float(kl_divergence(from_logits([-0.708, -1.208, -1.908, -2.808]), recovered)) < 1e-6


def test_equal_to_scipy():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(50), (2, 6))
    a, b = from_probs(p), from_probs(q)
    kl, js = kl_divergence(a, b), js_divergence(a, b)
    assert np.allclose(kl, scipy.stats.entropy(p, q, axis=1), rtol=1e-12)
    root = [scipy.spatial.distance.jensenshannon(*pair) for pair in zip(p, q, strict=True)]
    assert np.allclose(js, np.square(root), rtol=1e-9) and not np.allclose(js, root, rtol=0.1)
    assert np.allclose(total_variation(a, b), abs(p - q).sum(1) / 2, rtol=1e-12)
    stacked = kl_divergence(from_probs(p.reshape(2, 3, 50)), from_probs(q.reshape(2, 3, 50)))
    assert np.array_equal(stacked, kl.reshape(2, 3))


def test_stored_rounded_logprobs_never_give_a_negative_kl():
    """Rounded to bf16 they no longer sum to 1; the plain sum then falls below 0."""
    rng = torch.Generator().manual_seed(1)
    logp = (torch.randn(200, 500, generator=rng, dtype=torch.float64) * 4).log_softmax(-1)
    stored = logp.bfloat16().double()
    plain = (logp.exp() * (logp - stored)).sum(-1)
    assert plain.min() < 0
    ours = kl_divergence(from_logits(logp), from_logits(stored))
    assert ours.min() >= 0 and ours.max() < 1e-3


def independent(a, b):
    """MEASURES, margin and centred RMS per position in float64 numpy, from the definitions."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (a, b))
    log_p, log_q = (x - scipy.special.logsumexp(x, axis=1, keepdims=True) for x in (a, b))
    p, q = np.exp(log_p), np.exp(log_q)
    log_m = np.log((p + q) / 2)
    top = np.sort(a, axis=1)
    return pd.DataFrame(
        {
            MEASURES[0]: (p * (log_p - log_q)).sum(1),
            MEASURES[1]: (q * (log_q - log_p)).sum(1),
            MEASURES[2]: ((p * (log_p - log_m)).sum(1) + (q * (log_q - log_m)).sum(1)) / 2,
            MEASURES[3]: abs(p - q).sum(1) / 2,
            "top1_agree": a.argmax(1) == b.argmax(1),
            "reference_margin": top[:, -1] - top[:, -2],
            "logit_rms": (b - a).std(axis=1),
        }
    )


def agree(found, expected):
    return all(
        np.allclose(found[name].astype(float), expected[name].astype(float), rtol=1e-4, atol=1e-9)
        for name in expected
    )


@pytest.fixture(scope="module")
def tiny_logits(tiny_target):
    """Logits [positions, vocab_size] of the tiny pair's target in float32 and rounded to bf16."""
    import copy

    network = tiny_target.network
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(0, network.config.vocab_size, (1, 40), generator=rng)
    half = copy.deepcopy(network).bfloat16()
    with torch.no_grad():
        return network(ids).logits[0], half(ids).logits[0].float()


def test_the_tiny_pair_agrees_with_numpy(tiny_logits):
    assert agree(divergences(*tiny_logits).frame, independent(*tiny_logits))


@pytest.mark.parametrize(
    "mutate",
    [
        lambda a, b: (b, a),  # direction swapped
        lambda a, b: (a[1:], b[:-1]),  # shifted by one position
        lambda a, b: (a, b * 1.02),  # a scale that is forgotten
        lambda a, b: (a, torch.cat([b[:, 1:], b[:, :1]], 1)),  # vocabulary off by one
        lambda a, b: (a, b.masked_fill(b < b.median(-1, True).values, -1e4)),  # tail cut off
    ],
)
def test_mutants_are_caught(tiny_logits, mutate):
    a, b = tiny_logits
    found = divergences(*mutate(a, b)).frame
    assert not agree(found, independent(a, b)[: len(found)])


def test_a_missing_renormalisation_is_caught(tiny_logits, monkeypatch):
    monkeypatch.setattr(distances.torch, "softmax", lambda x, dim, out: torch.exp(x, out=out))
    monkeypatch.setattr(distances, "_law", lambda x: (x.double().exp(), x.double()))
    assert not agree(divergences(*tiny_logits).frame, independent(*tiny_logits))


@pytest.mark.parametrize("kind", ("random", "peaked"))
def test_only_what_float32_cannot_give_is_computed_in_float64(kind, monkeypatch):
    again = []
    slow = distances._in_float64
    monkeypatch.setattr(distances, "_in_float64", lambda a, *r: again.append(len(a)) or slow(a, *r))
    for scale in (0, 2e-6, 1e-3, 0.1, 1.0):
        divergences(*(z[None] for z in rows(kind, 700, scale, torch.float32)))
    # a law of 1 − 1e-10 on one token, its distance below what an offset of 0.1 lets be seen
    assert again == ([1, 1] if kind == "peaked" else [])
    again.clear()
    pairs = [rows(name, 97, 1e-3, torch.float32) for name in KINDS]
    found = divergences(*map(torch.stack, zip(*pairs, strict=True))).frame
    assert again == [4]  # masked, filtered, shifted and far
    alone = pd.concat([divergences(a[None], b[None]).frame for a, b in pairs], ignore_index=True)
    pd.testing.assert_frame_equal(found, alone.assign(position=range(len(KINDS))), rtol=1e-6)


def test_the_plain_way_to_write_it_computes_the_same_set(tiny_logits):
    """So that the benchmark's comparison is fair."""
    a, b = (z.double() for z in tiny_logits)
    correct = torch.arange(len(a)) % a.shape[1]
    found = divergences(a.float(), b.float(), correct_ids=correct.tolist()).frame
    plain = {k: v.numpy() for k, v in benchmark.plain(a, b, correct).items()}
    names = {
        "forward": MEASURES[0], "backward": MEASURES[1], "js": MEASURES[2], "tv": MEASURES[3],
        "hellinger": "hellinger", "margin": "reference_margin",
    }  # fmt: skip
    for name, column in names.items():
        np.testing.assert_allclose(found[column], plain[name], rtol=1e-4, atol=1e-6)
    pairs = {
        "entropies": ("reference_entropy_nats", "candidate_entropy_nats"),
        "tops": ("reference_top_id", "candidate_top_id"),
        "correct": ("reference_logprob", "candidate_logprob"),
        "logits": ("logit_rms", "logit_peak"),
    }
    for name, columns in pairs.items():
        np.testing.assert_allclose(found[list(columns)].T, plain[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["top10_overlap"] * 10, plain["overlap"])


@pytest.mark.slow
def test_compiled_it_gives_the_same_values():
    """Within 2e-5 of eager (sums in another order), exactly 0 on identical logits."""
    pairs = [rows("random", 4096, scale, torch.float32) for scale in (0, 1e-5, 0.1, 1.0)]
    a, b = map(torch.stack, zip(*pairs, strict=True))
    eager, sure = distances._in_float32(a, b, a.argmax(-1, True), None, None)
    compiled, same = benchmark.compiled()(a, b, a.argmax(-1, True), None, None)
    assert sure.all() and same.all()
    for name in eager:
        torch.testing.assert_close(compiled[name], eager[name], rtol=2e-5, atol=0)
    assert all(compiled[name][0] == 0 for name in FIVE)
    plain = torch.compile(lambda x: torch.expm1(x))(torch.full((512,), 1e-9))
    if (plain == 0).all():  # why it needs an expm1 of its own
        broken, _ = torch.compile(distances._in_float32)(a, b, a.argmax(-1, True), None, None)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(broken["hellinger"], eager["hellinger"], rtol=1e-4, atol=0)


def test_float32_agrees_with_float64_wherever_it_answers():
    """Any size, spread, peak, distance and offset: what is called sure is right to 5e-5."""
    rng, answered = torch.Generator().manual_seed(6), 0

    def between(low, high):
        return float(low + (high - low) * torch.rand(1, generator=rng))

    for _ in range(200):
        size = int(10 ** between(0.4, 3.2))
        a = torch.randn(4, size, generator=rng) * 10 ** between(-1, 1.3)
        a[:2, int(between(0, size - 1))] += between(0, 40)
        b = a + 10 ** between(-6, 1.2) * torch.randn(4, size, generator=rng)
        b[::2] += between(-2, 2)
        found, sure = distances._in_float32(a, b, a.argmax(-1, True), None, None)
        exact = distances._in_float64(a, b, None)
        for name, least in zip(FIVE, (1e-12, 1e-12, 1e-12, 1e-9, 1e-6), strict=True):
            judged = sure & (exact[name] >= least)
            torch.testing.assert_close(found[name][judged], exact[name][judged], rtol=5e-5, atol=0)
        answered += int(sure.sum())
    assert answered > 500


@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 1000, 4096])
def test_the_likeliest_tokens_without_sorting_all(size):
    x = torch.randint(0, 50, (20, size), generator=torch.Generator().manual_seed(size)).float()
    x[3, size // 2], x[4] = math.nan, -INF
    k = min(10, size)
    first, values, ids = distances.likeliest(x, k)
    assert torch.equal(first, x.argmax(-1))
    torch.testing.assert_close(values, x.topk(k).values, equal_nan=True)
    finite = torch.arange(20) != 4
    torch.testing.assert_close(
        x.gather(1, ids.clamp(max=size - 1))[finite], values[finite], equal_nan=True
    )
    assert all(len(set(row)) == k for row in ids.tolist())


def test_infinite_kl_names_the_likeliest_lost_token():
    a = torch.tensor([[1.0, 3.0, 2.0, 0.0], [1.0, 1.0, 1.0, -INF]])
    b = torch.tensor([[1.0, -INF, -INF, 0.0], [1.0, 1.0, 1.0, 0.0]])
    found = divergences(a, b)
    assert found.frame[MEASURES[0]].tolist()[0] == INF and found.mean(MEASURES[0]) == INF
    assert found.frame["logit_rms"].tolist() == [INF, INF]
    assert found.infinite == ((0, "reference‖candidate", 1), (1, "candidate‖reference", 3))
    assert "KL(reference‖candidate) at position 0: token 1 is unreachable" in str(found)
    lost = torch.softmax(a[0], 0)[1:3].sum()
    assert found.frame["total_variation"][0] == pytest.approx(float(lost), rel=1e-6)
    # a token whose probability underflows in float32 is still one that the reference can produce
    tiny = divergences(torch.tensor([[0.0, -300.0]]), torch.tensor([[0.0, -INF]]))
    assert tiny.infinite == ((0, "reference‖candidate", 1),)


def test_undefined_positions_are_located_and_never_averaged_away():
    a, b = torch.zeros(4, 3), torch.zeros(4, 3)
    b[1, 2], a[2], b[3, 0] = math.nan, -INF, INF
    found = divergences(a, b, prompt_id="p")
    assert found.undefined == (
        (1, "candidate", "1 NaN"),
        (2, "reference", "all -inf"),
        (3, "candidate", "1 +inf"),
    )
    assert found.frame["total_variation"].isna().tolist() == [False, True, True, True]
    assert math.isnan(found.mean("total_variation"))
    assert math.isnan(by_prompt(found.frame)["mean_total_variation"][0])
    assert math.isnan(by_prompt(found.frame)[f"max_{MEASURES[0]}"][0])
    assert "undefined at 3 positions, first 1 (candidate: 1 NaN)" in str(found)
    assert found.frame["total_variation"].mean() == 0  # what pandas alone would have said
    assert np.isnan(kl_divergence(from_logits(a), from_logits(b))[1:]).all()


def test_temperature_changes_the_laws_and_not_the_logits(tiny_logits):
    a, b = tiny_logits
    warm, plain = divergences(a, b, temperature=0.7).frame, divergences(a, b).frame
    assert agree(warm[list(MEASURES)], independent(a / 0.7, b / 0.7)[list(MEASURES)])
    for name in ("reference_margin", "logit_rms", "reference_top_id"):
        np.testing.assert_allclose(warm[name], plain[name], rtol=1e-5)


def test_columns_ids_and_an_empty_prompt():
    a = torch.zeros(2, 3)
    frame = divergences(a, a, prompt_id="p", token_ids=[7, 9]).frame
    assert frame["token_id"].tolist() == [7, 9] and frame["position"].tolist() == [0, 1]
    empty = divergences(torch.zeros(0, 3), torch.zeros(0, 3))
    assert list(empty.frame.columns) == list(frame.columns) and len(empty.frame) == 0
    assert math.isnan(empty.mean("total_variation")) and str(empty).startswith("0 positions")


def test_means_by_prompt():
    a, b = (torch.tensor(side, dtype=torch.float64) for side in BATCH)
    parts = divergences(a, b, prompt_id="p"), divergences(a[:1], a[:1], prompt_id="q")
    table = by_prompt(pd.concat([part.frame for part in parts])).set_index("prompt_id")
    assert table.loc["p", f"mean_{MEASURES[0]}"] == pytest.approx(0.0811, abs=5e-5)
    assert table.loc["q", "n_positions"] == 1 and table.loc["q", "max_js_nats"] == 0


def test_chunks_change_nothing(tiny_logits, monkeypatch):
    whole = divergences(*tiny_logits).frame
    monkeypatch.setattr(laws, "_CHUNK", 3 * tiny_logits[0].shape[1])
    assert agree(divergences(*tiny_logits).frame, whole[[*MEASURES, "logit_rms", "top1_agree"]])


def test_nothing_large_is_ever_in_float64():
    """No float64 tensor beyond one chunk, whatever the number of positions."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
                sizes.append(out.numel())
            return out

    x = torch.zeros(300, 4096)
    with Watch():
        divergences(x, x + 1)
    assert max(sizes) <= laws._CHUNK < x.numel() / 4


def test_one_position_as_a_table():
    logits = torch.tensor([0.0, 5.0, 4.0, -INF]), torch.tensor([3.0, 5.0, 0.0, -INF])
    table = distribution(*logits, k=2, tokenizer_decode=lambda ids: "�")
    assert table["token_id"].tolist() == [1, 2, 0]  # ids keep apart what text cannot
    expected = scipy.special.log_softmax(logits[1].double().numpy())[[1, 2, 0]]
    assert np.allclose(table["candidate_logprob"], expected, rtol=1e-12)
    whole = distribution(*logits, k=None)
    assert len(whole) == 4 and whole["reference_logprob"].iloc[-1] == -INF
    assert whole["token"].tolist() == ["1", "2", "0", "3"]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: divergences(torch.zeros(2, 3), torch.zeros(2, 4)), ValueError, "one vocabulary"),
        (lambda: divergences(torch.zeros(3), torch.zeros(3)), ValueError, "positions, vocab_size"),
        (
            lambda: divergences(torch.zeros(1, 3), torch.zeros(1, 3), temperature=0),
            ValueError,
            "`temperature` must be above 0 and finite; got 0",
        ),
        (
            lambda: divergences(torch.zeros(2, 3), torch.zeros(2, 3), token_ids=[1]),
            ValueError,
            "one id per position, 2; got 1",
        ),
        (lambda: from_probs([[0.5, 0.5], [0.6, 0.34]]), ValueError, "row 1 sums to 0.94"),
        (lambda: from_probs([1.5, -0.5]), ValueError, "smallest entry -0.5"),
        (lambda: from_probs([math.nan, 1.0]), ValueError, "row 0 sums to nan"),
        (
            lambda: kl_divergence([0.5, 0.5], [0.5, 0.5]),
            TypeError,
            "must be from_logits",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
