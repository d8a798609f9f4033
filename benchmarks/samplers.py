"""Simulated lossless samplers: false alarms of every test, coverage and width of the TV bounds."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pandas as pd
import torch
from scipy import optimize, special, stats

from benchmarks import Measurement, interleaved
from lossless_lab import paths
from lossless_lab.statistical import (
    equivalence,
    goodness_of_fit,
    sampler_verdict,
    token_shares,
    two_sample,
)
from lossless_lab.stats import multiplicity, sequential, tv_limits

TABLE = paths.DATA / "calibration" / "samplers.csv"
ALPHA = 0.05
N_POSITIONS = 40
NAIVE = "naive chi-square"
MET_PYTHON = "MODEL_EQUALITY_TESTING_PYTHON"  # of a venv that holds model-equality-testing 0.0.2


def law(name: str, n_tokens: int) -> np.ndarray:
    """Uniform, Zipf's, one token of .95, or one of .05 and the others equal."""
    if name == "zipf":
        weights = 1 / np.arange(1, n_tokens + 1)
        return weights / weights.sum()
    first = {"uniform": 1 / n_tokens, "dominant": 0.95, "one of .05": 0.05}[name]
    return np.append(first, np.full(n_tokens - 1, (1 - first) / (n_tokens - 1)))


def biased(probs: np.ndarray, tv: float, shape: str) -> np.ndarray:
    """A law at exactly that TV: every second token gains, the first one does, or a temperature.

    What the others lose is in proportion to their share; so is what every second token gains.
    """
    if tv == 0:
        return probs
    if shape == "temperature":
        x = np.log(probs) if np.ptp(probs) > 1e-12 else np.linspace(-1, 1, len(probs))
        ratio = optimize.brentq(
            lambda r: np.abs(special.softmax(np.log(probs) + r * x) - probs).sum() / 2 - tv, 0, 9
        )
        return special.softmax(np.log(probs) + ratio * x)
    tokens = np.arange(len(probs))
    gains = tokens % 2 == 0 if shape == "spread" else tokens == 0
    share = probs[gains].sum()
    return probs * np.where(gains, 1 + tv / share, 1 - tv / (1 - share))


def _pit(counts: np.ndarray, probs: np.ndarray, rng: np.random.Generator) -> float:
    ids = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    logits = torch.from_numpy(np.log(probs)).expand(len(ids), -1)
    return goodness_of_fit.sampler_fit([(logits, ids)], rng=rng).pvalue


def _two(test):
    return lambda counts, probs, rng: test(counts, rng.multinomial(counts.sum(), probs)).pvalue


def _mmd(counts: np.ndarray, probs: np.ndarray, rng: np.random.Generator) -> float:
    x, y = rng.choice(len(probs), (2, 50, 5), p=probs)
    return two_sample.mmd_test(x, y, n_resamples=99, rng=rng).pvalue


# test -> (p-value of (counts, probs, rng), draws, laws)
_LAWS = [("uniform", 16), ("zipf", 512), ("dominant", 512), ("zipf", 4096)]
TESTS = {
    "chi-square": (lambda c, q, r: goodness_of_fit.chi_square_fit(c, q).pvalue, 1000, _LAWS),
    "G": (lambda c, q, r: goodness_of_fit.g_fit(c, q).pvalue, 1000, _LAWS),
    "multinomial": (
        lambda c, q, r: goodness_of_fit.multinomial_fit(c, q, n_resamples=99, rng=r).pvalue,
        1000,
        _LAWS[:3],
    ),
    "token shares": (lambda c, q, r: token_shares.token_share_tests(c, q).pvalue, 1000, _LAWS),
    "judge_sampler": (
        lambda c, q, r: sampler_verdict.judge_sampler(c, q, margin=0.01).pvalue,
        1000,
        _LAWS,
    ),
    "integral transform": (_pit, 50, _LAWS[:3]),
    "two samples, chi-square": (_two(two_sample.chi_square_two_samples), 1000, _LAWS),
    "two samples, token shares": (_two(token_shares.share_difference_tests), 200, _LAWS[:3]),
    "two samples, MMD": (_mmd, 250, _LAWS[:3]),
}
_FAMILIES = [("zipf", 512), ("dominant", 512)]
_PEEKED = [("uniform", 16), ("zipf", 16), ("dominant", 16)]
_BOUND_LAWS = [
    (name, n_tokens) for n_tokens in (16, 512, 4096) for name in ("uniform", "zipf", "dominant")
]
# margin -> draws
_MARGINS = {0.05: 10_000, 0.01: 100_000}
# share of the margin, and where the bias lies
_SHAPES = "spread", "one token", "temperature"
_BIASES = [(0, "none"), *((share, shape) for share in (0.5, 1) for shape in _SHAPES)]
# Wide laws, hardly a token of which is drawn twice: law, draws, TV, where the bias lies
_WIDE = [
    (("uniform", 20_000), 700, 0, "none"),
    (("uniform", 20_000), 700, 0.2, "spread"),
    (("uniform", 20_000), 700, 0.4, "spread"),
    (("uniform", 20_000), 700, 0.45, "spread"),
    (("uniform", 20_000), 700, 0.45, "temperature"),
    (("uniform", 20_000), 700, 0.9, "one token"),
    (("uniform", 20_000), 2000, 0.45, "spread"),
    (("one of .05", 20_000), 700, 0.45, "spread"),
    (("zipf", 20_000), 700, 0.45, "spread"),
    (("uniform", 4096), 300, 0.45, "spread"),
    (("uniform", 1000), 300, 0.45, "spread"),
]


def _naive(counts: np.ndarray, probs: np.ndarray) -> np.ndarray:
    """Pearson's chi-square without pooling, however rare the tokens."""
    expected = counts.sum(-1, keepdims=True) * probs
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(-1), len(probs) - 1)


def false_alarms(test: str, name: str, n_tokens: int, n_repetitions: int, rng) -> list[dict]:
    """How often one test rejects the sampler of that very law at 5 %."""
    pvalue, n, _ = TESTS[test]
    probs = law(name, n_tokens)
    samplers = rng.multinomial(n, probs, n_repetitions)
    return [_alarms(test, n, [pvalue(counts, probs, rng) < ALPHA for counts in samplers])]


def family(test: str, name: str, n_tokens: int, n_repetitions: int, rng) -> list[dict]:
    """How often any of 40 positions is called wrong, Holm over them."""
    n, probs, alarms = 1000, law(name, n_tokens), []
    for _ in range(n_repetitions):
        counts = rng.multinomial(n, probs, N_POSITIONS)
        if test == NAIVE:
            pvalues = _naive(counts, probs)
        else:
            pvalues = [TESTS[test][0](c, probs, rng) for c in counts]
        alarms.append(multiplicity.holm(pvalues).min() < ALPHA)
    return [_alarms(f"{N_POSITIONS} positions, {test}", n, alarms)]


def peeking(test: str, name: str, n_tokens: int, n_repetitions: int, rng) -> list[dict]:
    """How often a law is ever rejected by someone who looks after each draw, 1,000 of them."""
    probs, n = law(name, n_tokens), 1000
    counts = np.zeros((n_repetitions, n_tokens))
    ever = np.zeros(n_repetitions, dtype=bool)
    for i in range(n):
        counts[np.arange(n_repetitions), rng.choice(n_tokens, n_repetitions, p=probs)] += 1
        if test == "sequential":
            ever |= sequential.log_evalue(counts, probs) >= -math.log(ALPHA)
        elif (i + 1) * probs.min() >= 5:
            ever |= _naive(counts, probs) < ALPHA
    return [_alarms(f"{test}, looked at after every draw", n, ever)]


def coverage(at: tuple[str, int], n: int, tv: float, shape: str, n_repetitions: int, rng):
    """How often each limit of n draws holds the true TV; and its mean.

    `width` is the mean of the upper limit over that of TV̂ + √(ln 20 / 2n), `widest` the largest
    such ratio met.
    """
    probs = law(*at)
    drawn = biased(probs, tv, shape)
    bounds = [
        equivalence.tv_upper_bound(rng.multinomial(n, drawn), probs) for _ in range(n_repetitions)
    ]
    ratio = np.array([b.high / (b.estimate + math.sqrt(math.log(20) / (2 * n))) for b in bounds])
    upper, lower = _limits("limit of TV", bounds, n, tv, shape)
    upper |= {"width": ratio.mean(), "widest": ratio.max(), "perfect_high": bounds[0].perfect_high}
    return [upper, lower]


def two_sample_coverage(name: str, n_tokens: int, tv: float, n_repetitions: int, rng):
    """As `coverage`, for the limits from two samples of 10,000 draws."""
    probs, n = law(name, n_tokens), 10_000
    x, y = (rng.multinomial(n, p, n_repetitions) for p in (biased(probs, tv, "spread"), probs))
    bounds = [equivalence.tv_upper_bound_two_samples(*both) for both in zip(x, y, strict=True)]
    return _limits("limit of TV, two samples", bounds, n, tv, "spread" if tv else "none")


def _alarms(case: str, n: int, alarms) -> dict:
    found = int(np.sum(alarms))
    claim = "-" if NAIVE in case else _claim(found, len(alarms))
    return {"case": case, "n": n, "rate": found / len(alarms), "claim": claim}


def _limits(case: str, bounds: list, n: int, tv: float, shape: str) -> list[dict]:
    rows = []
    for side, sign in (("high", 1), ("low", -1)):
        limits = np.array([getattr(b, side) for b in bounds])
        found = int((sign * (limits - tv) >= 0).sum())
        row = {
            "case": f"{'upper' if sign > 0 else 'lower'} {case}",
            "n": n,
            "tv": tv,
            "bias": shape,
        }
        row |= {"rate": found / len(bounds), "claim": _covers(found, len(bounds))}
        rows.append(row | {"mean_limit": limits.mean()})
    return rows


def _claim(found: int, n: int) -> str:
    """5 % fails when the 99.9 % lower limit of the simulated rate passes it."""
    low = stats.binomtest(found, n).proportion_ci(0.998, method="exact").low
    return "5% " + ("holds" if low <= ALPHA else "FAILS")


def _covers(found: int, n: int) -> str:
    """95 % fails when the 99 % upper limit of the simulated coverage is below it."""
    high = stats.binomtest(found, n).proportion_ci(0.98, method="exact").high
    return "95% " + ("holds" if high >= 1 - ALPHA else "FAILS")


def code() -> str:
    """Hash of what was simulated and of how."""
    modules = goodness_of_fit, token_shares, two_sample, equivalence, sampler_verdict
    parts = *modules, multiplicity, sequential, tv_limits, law, biased, false_alarms, family
    text = "".join(map(inspect.getsource, (*parts, peeking, coverage, two_sample_coverage)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def jobs() -> list[tuple]:
    """(what to simulate, its arguments, law, size of the law) of every row."""
    found = [(false_alarms, (test, *at), at) for test in TESTS for at in TESTS[test][2]]
    found += [(family, (t, *at), at) for t in (NAIVE, "chi-square") for at in _FAMILIES]
    found += [(peeking, ("sequential", *at), at) for at in _PEEKED]
    found += [(peeking, (NAIVE, *_PEEKED[0]), _PEEKED[0])]
    for at in _BOUND_LAWS:
        for margin, n in _MARGINS.items():
            for share, shape in _BIASES:
                if share * margin < 0.999 * (1 - law(*at)[0]):
                    found.append((coverage, (at, n, margin * share, shape), at))
    found += [(coverage, case, case[0]) for case in _WIDE]
    two = [(tv, at) for tv in (0, 0.025, 0.05) for at in _PEEKED[:1] + _LAWS[1:2]]
    return found + [(two_sample_coverage, (*at, tv), at) for tv, at in two]


def row(i: int, n_repetitions: int) -> list[dict]:
    """What one job finds; its number is the seed."""
    simulate, case, (name, n_tokens) = jobs()[i]
    place = {"what": simulate.__name__.replace("_", " "), "law": name, "n_tokens": n_tokens}
    return [place | x for x in simulate(*case, n_repetitions, np.random.default_rng(i))]


def calibrate(n_repetitions: int = 2000, *, n_processes: int | None = None) -> pd.DataFrame:
    """One row per test or limit and law."""
    n = len(jobs())
    with ProcessPoolExecutor(n_processes) as pool:
        rows = [x for found in pool.map(row, range(n), [n_repetitions] * n) for x in found]
    frame = pd.DataFrame(rows).assign(n_repetitions=n_repetitions, code=code())
    frame = frame.round({"width": 3, "widest": 3, "mean_limit": 5, "perfect_high": 5})
    frame.to_csv(TABLE, index=False)
    return frame


_PUBLIC = """
import sys, time, types, numpy as np
sys.modules["model_equality_testing.dataset"] = types.ModuleType("dataset")  # its downloads
from model_equality_testing.algorithm import run_two_sample_test
from model_equality_testing.distribution import CompletionSample
x, y = (CompletionSample(prompts=np.zeros(len(a), int), completions=a, m=1)
        for a in np.load(sys.argv[1]))
start = time.perf_counter()
p, statistic = run_two_sample_test(x, y, stat_type="mmd_hamming", b=int(sys.argv[2]))
print(time.perf_counter() - start, statistic)
"""


def bench() -> list[Measurement]:
    """The MMD test, beside the public package where a Python that has it is named."""
    rng = np.random.default_rng(0)
    x, y = rng.choice(512, (2, 1000, 20), p=law("zipf", 512))

    def ours() -> float:
        return two_sample.mmd_test(x, y, n_resamples=1000, rng=rng).statistic

    seconds = interleaved({"ours": ours})["ours"]
    measured = {"name": "MMD permutation test, 2 x 1,000 x 20 tokens, 1,000 permutations"}
    if python := os.environ.get(MET_PYTHON):
        theirs, statistic = public_package(python, x, y, n_resamples=20)
        assert abs(statistic - ours()) < 1e-12, f"{statistic} is not {ours()}"
        return [
            Measurement(
                **measured,
                seconds=seconds,
                alternative="model-equality-testing 0.0.2 (50 times its 20 permutations)",
                alternative_seconds=theirs * 50,
                limit=1 / 300,
            )
        ]
    return [Measurement(**measured, seconds=seconds, limit=240 / 300)]


def public_package(python: str, x, y, *, n_resamples: int) -> tuple[float, float]:
    """Seconds and statistic of model-equality-testing, run by that Python."""
    file = paths.DATA / "cache" / "mmd.npy"
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file, np.stack([x, y]))
    out = subprocess.run(
        [python, "-c", _PUBLIC, str(file), str(n_resamples)],
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(map(float, out.stdout.split()))
