"""What came out of a run, as numbers: latency, throughput, memory, and what looks wrong."""

import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

from lossless_lab.engines.protocol import batches

from .folder import Record, logits_name


def measured(records: Sequence[Record], batch_size: int) -> dict[str, Any]:
    """What came out, from the records alone; throughput leaves out the first batch (warm-up).

    Returns
    -------
    dict
        n_outputs, n_tokens, latency_ms_p50, latency_ms_p95, first_token_ms_p50, tokens_per_s,
        finish_reasons, empty_outputs, constant_outputs (names of outputs of eight or more times
        the same id, as a division by zero gives), nonfinite_logprobs (written as null), and
        witness and exercised, to be filled in by whoever knows the optimisation.
    """
    latencies = [r.timings["latency_ms"] for r in records if "latency_ms" in r.timings]
    firsts = [r.timings["first_token_ms"] for r in records if "first_token_ms" in r.timings]
    lengths = [len(r.output_ids or ()) for r in records]
    groups = batches(len(records), batch_size)
    warm = groups[1:] or groups
    spent = sum(records[g.start].timings.get("batch_ms", math.nan) for g in warm) / 1e3
    tokens = sum(lengths[i] for group in warm for i in group)
    reasons = [r.finish_reason or "unknown" for r in records]
    return {
        "n_outputs": len(records),
        "n_tokens": sum(lengths),
        "latency_ms_p50": statistics.median(latencies) if latencies else None,
        "latency_ms_p95": (
            float(np.quantile(latencies, 0.95, method="inverted_cdf")) if latencies else None
        ),
        "first_token_ms_p50": statistics.median(firsts) if firsts else None,
        "tokens_per_s": tokens / spent if spent > 0 else None,
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "empty_outputs": sum(not r.text for r in records),
        "constant_outputs": [
            logits_name(r.prompt_id, r.sample_index)
            for r, length in zip(records, lengths, strict=True)
            if length >= 8 and len(set(r.output_ids)) == 1
        ],
        "nonfinite_logprobs": sum(map(_nonfinite, records)),
        "witness": None,
        "exercised": None,
    }


def _nonfinite(record: Record) -> int:
    top = [value for pairs in record.top_logprobs or () for _, value in pairs]
    return sum(value is None for value in [*(record.logprobs or ()), *top])


class PeakMemory:
    """Peak memory of this process, looked at after every batch (exact on a GPU)."""

    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        self.process, self.rss = psutil.Process(), 0
        self.cuda = torch.cuda if torch is not None and torch.cuda.is_initialized() else None
        if self.cuda:
            self.cuda.reset_peak_memory_stats()

    def look(self) -> None:
        """Note the memory in use now."""
        self.rss = max(self.rss, self.process.memory_info().rss)

    def to_dict(self) -> dict[str, int | None]:
        """peak_rss_bytes and peak_cuda_bytes of the process that ended the run."""
        gpu = self.cuda.max_memory_allocated() if self.cuda else None
        return {"peak_rss_bytes": self.rss or None, "peak_cuda_bytes": gpu}
