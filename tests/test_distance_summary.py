"""Statistics over a corpus against an independent script of llama-perplexity's formulas."""

import math
import re
import zlib

import mpmath
import numpy as np
import pandas as pd
import pytest
import scipy.special
import scipy.stats
import statsmodels.api as sm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lossless_lab.statistical import estimates
from lossless_lab.statistical.censored import kl_lower_bound
from lossless_lab.statistical.divergences import divergences, from_logits, kl_divergence
from lossless_lab.statistical.summary import distance_summary

INF = math.inf
N_DOCUMENTS, VOCAB = 40, 60


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(scope="module")
def corpus():
    """float64 logits of both sides, next ids and documents of unequal length: 40 of them."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(5, 60, N_DOCUMENTS)
    documents = np.repeat([f"d{i}" for i in range(N_DOCUMENTS)], lengths)
    n = len(documents)
    a = rng.normal(0, 2.5, (n, VOCAB))
    scale = np.repeat(np.exp(rng.normal(-1.5, 0.7, N_DOCUMENTS)), lengths)  # documents differ
    b = a + scale[:, None] * rng.normal(0, 1, (n, VOCAB))
    return a, b, rng.integers(0, VOCAB, n), documents


def frame_of(a, b, ids, documents):
    found = divergences(torch.tensor(a), torch.tensor(b), correct_ids=ids)
    return found.frame.assign(document=documents)


@pytest.fixture(scope="module")
def summary(corpus):
    return distance_summary(frame_of(*corpus))


def llama_perplexity(a, b, ids):
    """What the tool prints, from its formulas, on float64 log-probabilities: value and ±."""
    n = len(a)
    base, mine = (x - scipy.special.logsumexp(x, axis=1, keepdims=True) for x in (a, b))
    nll_base, nll = (-x[np.arange(n), ids] for x in (base, mine))
    kld = scipy.special.rel_entr(np.exp(base), np.exp(mine)).sum(1)
    step = np.exp(-nll) - np.exp(-nll_base)

    def error(x):
        return math.sqrt((np.mean(x**2) - np.mean(x) ** 2) / (n - 1))

    covariance = (np.mean(nll * nll_base) - nll.mean() * nll_base.mean()) / (n - 1)
    ppl, ppl_base = math.exp(nll.mean()), math.exp(nll_base.mean())
    e, e_base = error(nll), error(nll_base)
    log_error = math.sqrt(e**2 + e_base**2 - 2 * covariance)
    spread = (ppl * e) ** 2 + (ppl_base * e_base) ** 2 - 2 * ppl * ppl_base * covariance
    rms = math.sqrt(np.mean(step**2))
    top = np.mean(base.argmax(1) == mine.argmax(1))
    out = {
        "PPL candidate": (ppl, ppl * e),
        "PPL reference": (ppl_base, ppl_base * e_base),
        "correlation of ln PPL": (covariance / (e * e_base), None),
        "ln PPL ratio": (nll.mean() - nll_base.mean(), log_error),
        "PPL ratio": (ppl / ppl_base, ppl / ppl_base * log_error),
        "PPL difference": (ppl - ppl_base, math.sqrt(spread)),
        "RMS Δp": (rms, error(step**2) / (2 * rms)),
        "same top token": (top, math.sqrt(top * (1 - top) / (n - 1))),
    }
    for name, x in (("KL(reference‖candidate)", kld), ("Δp", step)):
        out[f"mean {name}"] = x.mean(), error(x)
        out[f"maximum {name}"] = x.max(), None
        out[f"minimum {name}"] = x.min(), None
        x = np.sort(x)
        for q in (99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1):
            rank = q / 100 * (n - 1)
            i = int(rank)
            value = (1 - rank + i) * x[i] + (rank - i) * x[min(i + 1, n - 1)]
            out[f"{'median' if q == 50 else f'{q:g} %'} {name}"] = value, None
    return out


def agrees(summary, expected):
    """Every value and ± to 1e-6, of the wider of both."""
    rows = summary.frame.set_index("statistic")
    return all(
        rows.value[name] == pytest.approx(value, rel=1e-6, abs=1e-9)
        and (error is None or rows.iid_se[name] == pytest.approx(error, rel=1e-6))
        for name, (value, error) in expected.items()
    )


# ---- the statistics ----------------------------------------------------------------------------


def test_every_statistic_of_llama_perplexity(corpus, summary):
    expected = llama_perplexity(*corpus[:3])
    assert len(expected) == 36 and agrees(summary, expected)
    rows = summary.frame
    assert list(rows) == ["statistic", "value", "low", "high", "iid_se", "unit"]
    assert rows["statistic"].is_unique and rows["value"].notna().all()


def test_every_statistic_from_float32_logits(corpus):
    a, b, ids, documents = corpus
    a, b = a.astype(np.float32), b.astype(np.float32)
    value = distance_summary(frame_of(a, b, ids, documents)).value
    for name, (truth, _) in llama_perplexity(*(z.astype(float) for z in (a, b)), ids).items():
        assert value(name) == pytest.approx(truth, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "mutate",
    [
        lambda a, b, ids: (b, a, ids),  # direction swapped
        lambda a, b, ids: (a, b, np.roll(ids, 1)),  # the token before
        lambda a, b, ids: (a[1:], b[1:], ids[1:]),  # a token lost
        lambda a, b, ids: (a, b * 1.001, ids),  # a scale
    ],
)
def test_a_broken_comparison_does_not_agree(corpus, mutate):
    a, b, ids, documents = corpus
    a2, b2, ids2 = mutate(a, b, ids)
    found = distance_summary(frame_of(a2, b2, ids2, documents[: len(a2)]))
    assert not agrees(found, llama_perplexity(a, b, ids))


def test_intervals_are_those_of_statsmodels_by_document_and_not_iid(corpus, summary):
    _, _, _, documents = corpus
    frame = frame_of(*corpus)
    rows = summary.frame.set_index("statistic")
    groups = pd.factorize(documents)[0]

    def clustered(x):
        fit = sm.OLS(x, np.ones(len(x))).fit(
            cov_type="cluster", cov_kwds={"groups": groups}, use_t=True
        )
        return fit.conf_int()[0]

    for name, column in (
        ("mean KL(reference‖candidate)", "kl_reference_candidate_nats"),
        ("mean TV", "total_variation"),
        ("mean Hellinger", "hellinger"),
        ("entropy candidate", "candidate_entropy_nats"),
    ):
        x = frame[column].to_numpy()
        assert rows.loc[name, ["low", "high"]].tolist() == pytest.approx(clustered(x), rel=1e-9)
        assert rows.iid_se[name] == pytest.approx(scipy.stats.sem(x), rel=1e-12)
    ratio = (frame["reference_logprob"] - frame["candidate_logprob"]).to_numpy()
    limits = np.exp(clustered(ratio))
    assert rows.loc["PPL ratio", ["low", "high"]].tolist() == pytest.approx(limits, rel=1e-9)
    # the iid error called clustered would be less than half as wide here
    tv = rows.loc["mean TV"]
    assert tv.high - tv.low > 2 * 3.92 * tv.iid_se


def test_beyond_llama_perplexity(corpus, summary):
    a, b, ids, documents = corpus
    p, q = (scipy.special.softmax(x, axis=1) for x in (a, b))
    value = summary.frame.set_index("statistic").value
    tv = abs(p - q).sum(1) / 2
    hellinger = np.sqrt(((np.sqrt(p) - np.sqrt(q)) ** 2).sum(1) / 2)
    assert value["mean Hellinger"] == pytest.approx(hellinger.mean(), rel=1e-9)
    assert value["entropy reference"] == pytest.approx(scipy.stats.entropy(p, axis=1).mean())
    assert value["mean KL(candidate‖reference)"] == pytest.approx(
        scipy.stats.entropy(q, p, axis=1).mean(), rel=1e-9
    )
    top = [np.argsort(-x, axis=1)[:, :10] for x in (a, b)]
    shared = [len(set(x) & set(y)) / 10 for x, y in zip(*top, strict=True)]
    assert value["top-10 overlap"] == pytest.approx(np.mean(shared))
    assert value["flips of the top token"] == pytest.approx(1 - value["same top token"])
    was, now = (x[:, 0] == ids for x in top)
    assert value["right to wrong"] == np.mean(was & ~now) > 0
    assert value["wrong to right"] == np.mean(~was & now) > 0
    assert value["T × mean TV"] == min(1, len(a) / N_DOCUMENTS * tv.mean())
    by_document = pd.Series(tv).groupby(documents).mean().mean()
    assert value["mean TV by document, one-sided"] == pytest.approx(by_document)
    assert "KL(reference‖candidate)" in str(summary)
    told = re.search(r"T × mean TV = (\S+), a bound only", str(summary))
    sequence = len(a) / N_DOCUMENTS * tv.mean()  # a bound of 1 or more says nothing
    assert (told is None) == (sequence >= 1)
    if told:
        assert float(told[1]) == pytest.approx(sequence, rel=0.05)


def test_no_interval_for_an_extreme_or_where_few_documents_reach_beyond(corpus, summary):
    frame, rows = frame_of(*corpus), summary.frame.set_index("statistic")
    refused = rows.index.str.match(r"maximum|minimum|99\.9 %|0\.1 %|99 %|1 % ")
    assert rows.low[refused].isna().all() and rows.high[refused].isna().all()
    p, q = (np.exp(frame[f"{side}_logprob"]) for side in ("reference", "candidate"))
    given = set()
    for name, x in (("TV", frame["total_variation"]), ("Δp", q - p)):
        for q in ("95 %", "90 %", "75 %", "median", "25 %", "10 %", "5 %"):
            row = rows.loc[f"{q} {name}"]
            beyond = [frame.document[side].nunique() for side in (x > row.value, x < row.value)]
            assert math.isnan(row.low) == (min(beyond) < 30), row
            assert math.isnan(row.low) or row.low < row.value < row.high
            given.add(math.isnan(row.low))
    assert given == {True, False}


def test_no_interval_below_thirty_documents(corpus):
    a, b, ids, documents = corpus
    few = np.isin(documents, [f"d{i}" for i in range(29)])
    found = distance_summary(frame_of(a[few], b[few], ids[few], documents[few]))
    assert found.frame[["low", "high"]].isna().all(axis=None)
    assert found.frame["iid_se"].notna().any() and found.n_documents == 29
    assert "no intervals, which need 30 documents" in str(found)
    few = np.isin(documents, [f"d{i}" for i in range(30)])
    found = distance_summary(frame_of(a[few], b[few], ids[few], documents[few]))
    assert found.frame["low"].notna().any()


def test_a_model_against_itself_is_exactly_zero(corpus):
    a, _, ids, documents = corpus
    value = distance_summary(frame_of(a, a, ids, documents)).frame.set_index("statistic").value
    for name in ("KL(reference‖candidate)", "KL(candidate‖reference)", "JS", "TV", "Hellinger"):
        assert value[f"mean {name}"] == value[f"maximum {name}"] == 0
    assert value["RMS Δp"] == value["ln PPL ratio"] == value["PPL difference"] == 0
    assert value["PPL ratio"] == value["same top token"] == value["top-10 overlap"] == 1


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_nan_is_located_and_never_left_out(corpus, monkeypatch):
    a, b, ids, documents = corpus
    b = b.copy()
    b[7, 3] = math.nan

    def found():
        return distance_summary(frame_of(a, b, ids, documents))

    value = found().frame.set_index("statistic").value
    assert found().undefined == ((documents[7], 7, -1),)
    assert f"undefined at 1, first {str(documents[7])!r} position 7" in str(found())
    assert value.drop("correlation of ln PPL").isna().all()
    monkeypatch.setattr(estimates.np, "mean", np.nanmean)  # the mutant
    assert not found().frame.set_index("statistic").value.drop("correlation of ln PPL").isna().all()


def test_an_infinite_kl_stays_infinite_and_names_the_token(corpus):
    a, b, ids, documents = corpus
    a, b = a.copy(), b.copy()
    a[:, 1] = b[:, 1] = -INF  # on both sides: nothing
    ids = np.where(ids == 1, 2, ids)
    assert np.isfinite(distance_summary(frame_of(a, b, ids, documents)).frame["value"]).all()
    b[9, ids[9]] = -INF
    frame = frame_of(a, b, ids, documents).assign(unreachable_id=pd.NA)
    frame.loc[9, "unreachable_id"] = ids[9]
    found = distance_summary(frame)
    value = found.frame.set_index("statistic").value
    assert found.infinite == ((documents[9], 9, ids[9]),) and not found.undefined
    assert f"infinite at 1, first {str(documents[9])!r} position 9, token {ids[9]}" in str(found)
    for name in ("mean KL(reference‖candidate)", "PPL candidate", "PPL ratio", "ln PPL ratio"):
        assert value[name] == INF
    for name in ("median KL(reference‖candidate)", "mean TV", "mean Δp", "PPL reference"):
        assert math.isfinite(value[name])
    assert value["minimum Δp"] < 0 and value["maximum KL(reference‖candidate)"] == INF


def test_percentiles_next_to_infinity():
    x = np.array([1.0, 2.0, INF, INF, INF])
    assert [estimates._percentile(x, q) for q in (0, 12.5, 25, 30, 75, 100)] == [
        1,
        1.5,
        2,
        *[INF] * 3,
    ]


def test_an_empty_frame_is_refused(corpus):
    with pytest.raises(ValueError, match="at least one token"):
        distance_summary(frame_of(*corpus)[:0])


# ---- the new columns ---------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 0.3, 4.0])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_hellinger_entropy_and_logprobs_against_mpmath(dtype, tolerance, scale, rng):
    a = torch.tensor(rng.normal(0, 3, (4, 300)))
    b = a + scale * torch.tensor(rng.normal(0, 1, (4, 300)))
    a[0, 5] += 25  # peaked
    b[0, 5] += 25
    a[1, 7] = b[1, 7] = -INF
    b[2, 9] = -INF
    a, b = a.to(dtype), b.to(dtype)
    frame = divergences(a, b, correct_ids=[5, 3, 9, 0]).frame
    with mpmath.workdps(40):
        for i, token in enumerate((5, 3, 9, 0)):
            laws = []
            for row in (a[i], b[i]):
                w = [mpmath.exp(float(x)) if x > -INF else mpmath.mpf(0) for x in row]
                laws.append([x / mpmath.fsum(w) for x in w])
            square = mpmath.fsum(
                (mpmath.sqrt(x) - mpmath.sqrt(y)) ** 2 for x, y in zip(*laws, strict=True)
            )
            truth = float(mpmath.sqrt(square / 2))
            assert frame["hellinger"][i] == pytest.approx(truth, rel=tolerance)
            for law, side in zip(laws, ("reference", "candidate"), strict=True):
                entropy = -mpmath.fsum(x * mpmath.log(x) for x in law if x)
                found = frame[f"{side}_entropy_nats"][i]
                assert found == pytest.approx(float(entropy), rel=tolerance, abs=1e-6)
                logprob = float(mpmath.log(law[token])) if law[token] else -INF
                assert frame[f"{side}_logprob"][i] == pytest.approx(logprob, rel=1e-5, abs=1e-6)
            if all(law[token] for law in laws):  # the difference does not cancel
                step = float(mpmath.log(laws[1][token] / laws[0][token]))
                found = frame["candidate_logprob"][i] - frame["reference_logprob"][i]
                assert found == pytest.approx(step, rel=1e-3, abs=1e-9)


def test_correct_ids_are_checked():
    x = torch.zeros(2, 3)
    assert list(divergences(x, x, correct_ids=[0, 2]).frame["token_id"]) == [0, 2]
    with pytest.raises(ValueError, match=r"`correct_ids` must be below 3; got 3 at position 1"):
        divergences(x, x, correct_ids=[0, 3])
    with pytest.raises(ValueError, match="`correct_ids` must hold one id per position, 2; got 1"):
        divergences(x, x, correct_ids=[0])


# ---- what top-k lists prove --------------------------------------------------------------------


def top(logits, k, digits=None):
    logp = scipy.special.log_softmax(logits)
    ids = np.argsort(-logp)[:k]
    return [(int(i), float(logp[i] if digits is None else round(logp[i], digits))) for i in ids]


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.floats(1e-4, 5), st.booleans())
@settings(max_examples=150, deadline=None)
def test_top_k_bounds_the_kl_of_the_full_law_from_below(seed, k, scale, masked):
    rng = np.random.default_rng(seed)
    a = rng.normal(0, 3, 30)
    b = a + rng.normal(0, scale, 30)
    if masked:
        b[a < 0] = -INF
        k = min(k, int((a >= 0).sum()) or 1)
    truth = float(kl_divergence(from_logits(a), from_logits(b)))
    bound = kl_lower_bound(top(a, k), top(b, k))
    assert 0 <= bound.nats <= truth * (1 + 1e-9) + 1e-15
    assert 0 <= bound.covered_mass <= 1
    if k == 30:
        assert bound.nats == pytest.approx(truth, rel=1e-6, abs=1e-12)
        assert bound.covered_mass == pytest.approx(1)
    swapped = kl_lower_bound(top(b, k), top(a, k))
    back = float(kl_divergence(from_logits(b), from_logits(a)))
    assert 0 <= swapped.nats <= back * (1 + 1e-9) + 1e-15
    assert kl_lower_bound(top(a, k, digits=2), top(b, k, digits=2)).nats >= 0  # rounded by a server


def test_disjoint_and_split_lists():
    assert kl_lower_bound([(1, math.log(0.9))], [(2, math.log(0.9))])[:2] == (0, 0)
    # by id: three tokens whose text is the same replacement character stay three
    rows = [(228, -0.2), (229, -2.0), (230, -4.0)]
    assert kl_lower_bound(rows, rows).covered_mass == pytest.approx(
        math.fsum(math.exp(x) for _, x in rows)
    )
    # where only their bytes are known, and those are all of the replacement character
    alike = [(b"\xef\xbf\xbd", x) for _, x in rows]
    found = kl_lower_bound([*alike, (b"a", -4.0)], [*alike[:1], (b"a", -4.0)])
    assert found.nats == pytest.approx(0, abs=1e-12) and found.n_merged == 3
    assert found.merged_mass == pytest.approx(math.fsum(math.exp(x) for _, x in rows))
    assert found.covered_mass == pytest.approx(math.exp(-4))
    sharp, flat = [(0, -1e-9)], [(0, math.log(0.5)), (1, math.log(0.5))]
    assert kl_lower_bound(sharp, flat).nats == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize(
    "pair, message",
    [
        (([], [(0, -1.0)]), "`reference_top` must hold at least one token"),
        (([(0, -0.1), (1, -0.1)], [(0, -1.0)]), "probabilities sum to 1.80967"),
        (([(0, math.nan)], [(0, -1.0)]), "sum to nan"),
    ],
)
def test_lists_that_are_no_law_are_refused(pair, message):
    with pytest.raises(ValueError, match=message):
        kl_lower_bound(*pair)
