"""What an optimisation gains: tokens per second of several subjects, measured in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from lossless_lab.engines.decoding import Decoding
from lossless_lab.pipeline.asked import prompts_for
from lossless_lab.pipeline.recognition import applied, as_subject
from lossless_lab.pipeline.subjects import Live, NotEvidence


def speed_up(
    reference: Any,
    candidates: Mapping[str, Any],
    prompts: Any,
    decoding: Decoding | None = None,
    *,
    repeats: int = 3,
) -> pd.DataFrame:
    """Tokens per second of each side over the same prompts, and its ratio to the reference's.

    Every side runs once as a warm-up, then all of them in turn, so that another load of the
    machine meets them alike. Ends are not obeyed: all sides write equally many tokens.

    Parameters
    ----------
    reference : whatever `check` takes that runs in this process.
    candidates : name -> the same, or a catalogue entry or its name.
    prompts, decoding : as in `check`; few tokens are enough.
    repeats : measured runs of each side.

    Returns
    -------
    DataFrame
        side, tokens_per_s (median), slowest_tokens_per_s, fastest_tokens_per_s, speed_up (median of
        the ratios of runs that followed each other); the reference first.
    """
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1; got {repeats}")
    reference = as_subject(reference)
    sides = {reference.name: reference}
    sides |= {n: as_subject(applied(c, reference)) for n, c in candidates.items()}
    if stored := [name for name, side in sides.items() if not isinstance(side, Live)]:
        raise NotEvidence(f"{stored[0]!r} is stored: only what runs in this process has a speed")
    asked = prompts_for(reference, prompts, None)
    given = replace(decoding or Decoding(), stop_token_ids=())
    rates = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, side in sides.items():
            began = time.perf_counter()
            n = sum(len(c.output_ids) for c in side.complete(asked, given))
            rates[name].append(n / (time.perf_counter() - began))
    kept = {name: np.array(r[1:]) for name, r in rates.items()}
    rows = [
        (name, np.median(r), r.min(), r.max(), np.median(r / kept[reference.name]))
        for name, r in kept.items()
    ]
    ends = ["slowest_tokens_per_s", "fastest_tokens_per_s", "speed_up"]
    return pd.DataFrame(rows, columns=["side", "tokens_per_s", *ends])
