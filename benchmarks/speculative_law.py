"""The exact law of speculative decoding at a real vocabulary, and simulated rounds."""

from __future__ import annotations

import numpy as np

from benchmarks import Measurement, interleaved
from lossless_lab.statistical.speculative import expected_tokens, output_law, speculate

VOCAB, GAMMA, STEPS = 49_152, 5, 1_000_000


def bench() -> list[Measurement]:
    """Law of one position, of all γ + 1 of a round, and 1e6 acceptance steps; dense laws."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, GAMMA + 1, VOCAB)) * 4
    target, draft = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    alpha = np.minimum(target, draft).sum(-1)[:GAMMA]
    n_rounds = int(STEPS / (expected_tokens(alpha) - np.prod(alpha)))  # bonuses are not judged
    limits = {
        f"exact law of one position, vocabulary {VOCAB:,}": 0.020,
        f"exact laws of the {GAMMA + 1} positions of a round": 0.020,
        f"{STEPS:,} acceptance steps simulated": 1.0,
    }
    calls = (
        lambda: output_law(target[0], draft[0]),
        lambda: [output_law(p, q) for p, q in zip(target, draft, strict=True)],
        lambda: speculate(target, draft, n_rounds, rng=rng),
    )
    took = interleaved(dict(zip(limits, calls, strict=True)))
    return [Measurement(name=n, seconds=s, limit=limits[n]) for n, s in took.items()]
