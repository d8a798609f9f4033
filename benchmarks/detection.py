"""Broken rules of speculative decoding: which are found from draws, by us and by others' rules."""

from __future__ import annotations

import hashlib
import inspect

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks.sampler_power import FLASHINFER_COSINE, POWER, cosine, vllm_passes
from benchmarks.samplers import ALPHA
from lossless_lab import paths
from lossless_lab.mutants import speculative as mutants
from lossless_lab.statistical import goodness_of_fit, sampler_verdict, token_shares

TABLE = paths.DATA / "calibration" / "detection.csv"
DRAWS = 10_000, 100_000
MARGIN = 0.01


def verdicts(law, target, n: int, repetitions: int, rng) -> pd.DataFrame:
    """Word and whether rejected, of samplers with that joint law of two tokens."""
    drawn = rng.multinomial(n, law.ravel(), repetitions)
    found = [sampler_verdict.judge_sampler(c, target.ravel(), margin=MARGIN) for c in drawn]
    return pd.DataFrame([{"word": v.word, "rejected": v.rejected} for v in found])


def detected(mutant, dose: float, repetitions: int, rng) -> dict:
    """Exact TV of two tokens by the rule, how often it is found, and what others would say."""
    positions = mutants.named(**mutant.settings)
    target, law = mutants.target_law(positions), mutant.joint_law(positions, dose=dose)
    law = np.maximum(law, 0) / law.sum()
    row = {"mutant": mutant.name, "kind": mutant.kind, "dose": dose, "unit": mutant.unit}
    row["tv"] = float(np.abs(law - target).sum() / 2)
    for n in DRAWS:
        found = verdicts(law, target, n, repetitions, rng)
        row[f"rejected_{n}"] = found.rejected.mean()
        row[f"word_{n}"] = found.word.mode()[0]
        row[f"wrongly_equivalent_{n}"] = np.mean(found.word == "EQUIVALENT") * (row["tv"] > MARGIN)
    row["vllm_passes"] = vllm_passes(target.ravel(), law.ravel(), repetitions, rng)
    row["flashinfer_passes"] = cosine(target.ravel(), law.ravel()) > FLASHINFER_COSINE
    return row


def claim(row: dict, repetitions: int) -> str:
    """A lossless rule is rejected in at most 5 %, a lossy one that sampling sees in 80 %."""
    if row["kind"] == "sampling":
        if row["dose"] != mutants.SPECULATIVE_MUTANTS[row["mutant"]].natural:
            return "-"
        return "found " + ("holds" if row[f"rejected_{DRAWS[1]}"] >= POWER else "FAILS")
    if row["kind"] == "exact law only":
        return "-"
    worst = round(max(row[f"rejected_{n}"] for n in DRAWS) * repetitions)
    low = stats.binomtest(worst, repetitions).proportion_ci(0.998, method="exact").low
    return "5% " + ("holds" if low <= ALPHA else "FAILS")


def code() -> str:
    """Hash of what was simulated and of how; of the broken rules, of their names and TV."""
    modules = goodness_of_fit, token_shares, sampler_verdict
    text = "".join(map(inspect.getsource, (*modules, verdicts, detected, claim)))
    for mutant in mutants.SPECULATIVE_MUTANTS.values():
        text += f"{mutant.name} {mutant.kind} {mutant.doses} {mutant.total_variation():.6f}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def calibrate(n_repetitions: int = 2000) -> pd.DataFrame:
    """One row per broken rule and dose; a tenth of the repetitions where only power is shown."""
    rows = []
    for mutant in mutants.SPECULATIVE_MUTANTS.values():
        lossless = mutant.kind == "lossless"
        for dose in mutant.doses[:1] if mutant.kind != "sampling" else mutant.doses:
            n = n_repetitions if lossless else n_repetitions // 10
            row = detected(mutant, dose, n, np.random.default_rng(len(rows)))
            rows.append(row | {"claim": claim(row, n), "n_repetitions": n})
    frame = pd.DataFrame(rows).assign(code=code())
    frame["tv"] = frame.tv.map("{:.4g}".format).astype(float)
    frame.to_csv(TABLE, index=False)
    return frame
