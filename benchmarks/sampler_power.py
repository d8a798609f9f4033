"""The smallest TV that tests of a sampler find, beside the limit of any test and others' rules."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import optimize, special

from benchmarks.samplers import ALPHA, biased, law
from lossless_lab import paths
from lossless_lab.statistical import goodness_of_fit, sampler_verdict, token_shares
from lossless_lab.stats import power, sequential

TABLE = paths.DATA / "calibration" / "power.csv"
POWER = 0.8
# What is published: test, law of 16 tokens, bias, draws, largest TV allowed.
CLAIMS = [
    ("chi-square", "uniform", "spread", 10_000, 0.024),
    ("chi-square", "uniform", "spread", 100_000, 0.0075),
    ("token shares", "one of .05", "one token", 10_000, 0.009),
    ("token shares", "one of .05", "one token", 100_000, 0.003),
    ("judge_sampler", "uniform", "spread", 10_000, math.nan),
    ("judge_sampler", "one of .05", "one token", 10_000, math.nan),
    ("judge_sampler", "zipf", "temperature", 10_000, math.nan),
]
TESTS: dict[str, Callable] = {
    "chi-square": lambda c, q: goodness_of_fit.chi_square_fit(c, q).pvalue,
    "token shares": lambda c, q: token_shares.token_share_tests(c, q).pvalue,
    "judge_sampler": lambda c, q: sampler_verdict.judge_sampler(c, q, margin=0.01).pvalue,
}
VLLM_TOKENS, VLLM_DRAWS, VLLM_LAWS, VLLM_FACTOR = 10, (10, 100_000), 100, 20
FLASHINFER_COSINE = 0.99


def found(test: str, probs: np.ndarray, candidate: np.ndarray, n: int, repetitions: int, rng):
    """Share of samplers with the candidate's law that the test rejects at 5 %."""
    counts = rng.multinomial(n, candidate, repetitions)
    return np.mean([TESTS[test](c, probs) < ALPHA for c in counts])


def predicted(test: str, probs: np.ndarray, shape: str, n: int) -> float:
    """By the formulas of `stats.power`; for the judgement none is stated."""
    if test == "chi-square":
        return power.smallest_tv_detectable(n, n_tokens=len(probs))
    if test == "token shares":
        return power.smallest_share_change(n, probs[0], n_tests=len(probs))
    return math.nan


def limit(probs: np.ndarray, tv: float, shape: str, n: int) -> float:
    """Smallest TV that the most powerful test finds, from the bias's χ² distance per TV²."""
    per_tv = np.sum((biased(probs, tv, shape) - probs) ** 2 / probs) / tv**2
    return power.neyman_pearson_limit(n) * 2 / math.sqrt(per_tv)


def smallest_tv(test: str, name: str, shape: str, n: int, repetitions: int, rng) -> dict:
    """Smallest TV on a grid of 2 % steps that is found with 80 % power; by bisection."""
    probs = law(name, 16)
    low, high = 0, 100
    grid = 1 / math.sqrt(n) * 1.02 ** np.arange(high + 1) * 0.6
    measured = {}
    while high - low > 1:
        middle = (low + high) // 2
        candidate = biased(probs, grid[middle], shape)
        measured[middle] = found(test, probs, candidate, n, repetitions, rng)
        low, high = (low, middle) if measured[middle] >= POWER else (middle, high)
    tv = grid[high]
    return {"tv": tv, "power": measured[high], "predicted": predicted(test, probs, shape, n)} | {
        "neyman_pearson": limit(probs, tv, shape, n)
    }


def sequential_draws(tv: float, repetitions: int, rng) -> dict:
    """Draws after which the anytime-valid test has stopped in 80 % of samplers at that TV."""
    probs = law("uniform", 16)
    candidate, step = biased(probs, tv, "spread"), 500
    stopped = []
    for _ in range(repetitions):
        batches = (rng.multinomial(step, candidate) for _ in range(400))
        fit = sequential.sequential_fit(batches, probs)
        stopped.append(fit.n if fit.stopped else np.inf)
    n = float(np.quantile(stopped, POWER))
    return {"n": n, "power": POWER, "predicted": power.n_for_tv(tv, n_tokens=16)}


def vllm_passes(probs: np.ndarray, candidate: np.ndarray, repetitions: int, rng) -> float:
    """Share of samplers that vLLM's rule passes.

    From 10 to 100,000 draws the L2 distance to the law must shrink more than 20 times as much as
    that to 100 random laws (softmax of uniform numbers).
    """
    few, many = (rng.multinomial(n, candidate, repetitions)[:, None] / n for n in VLLM_DRAWS)
    others = special.softmax(rng.random((VLLM_LAWS, len(probs))), -1)

    def shrunk(laws: np.ndarray) -> np.ndarray:
        before, after = (np.linalg.norm(x - laws, axis=(-2, -1)) for x in (few, many))
        return before / after

    return float(np.mean(shrunk(probs) > VLLM_FACTOR * shrunk(others)))


def cosine(p: np.ndarray, q: np.ndarray) -> float:
    """What FlashInfer's rule wants above .99, of 5M draws: as good as the law itself."""
    return float(p @ q / np.linalg.norm(p) / np.linalg.norm(q))


def vllm_table(tv: float, repetitions: int, rng) -> dict:
    """How many samplers at that TV vLLM's rule passes, and chi-square at 100,000 draws does not."""
    passes, seen = [], []
    for _ in range(20):
        probs = special.softmax(rng.random(VLLM_TOKENS))
        candidate = biased(probs, tv, "spread")
        passes.append(vllm_passes(probs, candidate, repetitions // 20, rng))
        seen.append(found("chi-square", probs, candidate, VLLM_DRAWS[1], repetitions // 20, rng))
    return {"tv": tv, "n": VLLM_DRAWS[1], "passed_by_rule": np.mean(passes), "power": np.mean(seen)}


def flashinfer_table(rng) -> dict:
    """The largest TV by temperature that FlashInfer's rule passes: median of 20 laws of 128."""
    tvs, temperatures = [], []
    for _ in range(20):
        logits = rng.standard_normal(128)
        probs = special.softmax(logits)

        def excess(r: float, x=logits, p=probs) -> float:
            return cosine(special.softmax(r * x), p) - FLASHINFER_COSINE

        ratio = optimize.brentq(excess, 1, 4)
        temperatures.append(1 - 1 / ratio)
        tvs.append(np.abs(special.softmax(ratio * logits) - probs).sum() / 2)
    return {"tv": np.median(tvs), "n": 5_000_000, "temperature_off_by": np.median(temperatures)}


def code() -> str:
    """Hash of what was simulated and of how."""
    modules = goodness_of_fit, token_shares, sampler_verdict, power, sequential
    parts = *modules, law, biased, smallest_tv, limit, sequential_draws, vllm_passes, vllm_table
    text = "".join(map(inspect.getsource, (*parts, flashinfer_table)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def calibrate(n_repetitions: int = 2000) -> pd.DataFrame:
    """One row per test, law and number of draws; then others' rules."""
    rows = []

    def rng() -> np.random.Generator:
        return np.random.default_rng(len(rows))

    for test, name, shape, n, allowed in CLAIMS:
        row = smallest_tv(test, name, shape, n, n_repetitions, rng())
        said = {"what": "smallest TV found", "case": test, "law": name, "bias": shape, "n": n}
        held = (
            "-"
            if math.isnan(allowed)
            else f"≤ {allowed:g} {'holds' if row['tv'] <= allowed else 'FAILS'}"
        )
        rows.append(said | row | {"claim": held})
    for tv in (0.02, 0.05):
        said = {"what": "draws until stopped", "case": "sequential", "law": "uniform"}
        rows.append(said | {"bias": "spread", "tv": tv} | sequential_draws(tv, 200, rng()))
    for tv in (0.001, 0.003, 0.005, 0.008, 0.015, 0.03):
        said = {
            "what": "passed by others",
            "case": "vLLM's rule",
            "law": "random",
            "bias": "spread",
        }
        rows.append(said | vllm_table(tv, n_repetitions, rng()))
    said = {"what": "passed by others", "case": "FlashInfer's rule", "law": "random"}
    rows.append(said | {"bias": "temperature"} | flashinfer_table(rng()))
    frame = pd.DataFrame(rows).assign(n_repetitions=n_repetitions, code=code())
    frame = frame.round({"tv": 5, "predicted": 5, "neyman_pearson": 5, "temperature_off_by": 3})
    frame.to_csv(TABLE, index=False)
    return frame
