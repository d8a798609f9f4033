"""Comparing two runs of 1,000 outputs of 256 tokens each."""

import numpy as np

from benchmarks import Measurement, interleaved
from lossless_lab import compare_tokens
from lossless_lab.runs import Record


def records(ids: np.ndarray) -> list[Record]:
    """One record per row of token ids."""
    return [
        Record(
            prompt_id=f"p{i}",
            sample_index=0,
            prompt_ids=(1, 2, 3),
            output_ids=tuple(row),
            text=" ".join(map(str, row)),
            finish_reason="length",
        )
        for i, row in enumerate(ids.tolist())
    ]


def bench() -> list[Measurement]:
    """Half of the candidate's outputs leave the reference's at a random token."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50_000, (1000, 256))
    changed = ids.copy()
    for i, start in enumerate(rng.integers(0, 256, 500)):
        changed[i, start:] = rng.integers(0, 50_000, 256 - start)
    reference, candidate = records(ids), records(changed)
    took = interleaved({"compare": lambda: compare_tokens(reference, candidate)})
    return [
        Measurement(name="compare_tokens, 1,000 x 256", seconds=took["compare"], limit=1.0),
    ]
