"""Does an engine agree with itself at other lengths, and with another engine: ids only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from .decoding import Decoding
from .protocol import complete

COLUMNS = ("prompt", "check", "reference", "candidate", "n_compared", "first_divergence")


def prefix_consistency(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding | None = None,
    *,
    lengths: Sequence[int] = (10, 20, 30),
) -> pd.DataFrame:
    """Whether each shorter greedy run is a prefix of the longest one.

    A cache that lets unfilled slots be attended gives other tokens when more are asked for.

    Parameters
    ----------
    engine : Engine
    prompts : sequences of token ids
    decoding : Decoding, greedy by default; its max_new_tokens is replaced by each of `lengths`
    lengths : at least two

    Returns
    -------
    DataFrame
        prompt, check ("prefix"), reference, candidate (what was run), n_compared,
        first_divergence (NA where the shorter is a prefix).
    """
    if len(set(lengths)) < 2:
        raise ValueError(f"`lengths` must hold at least two different ones, got {list(lengths)}")
    decoding = decoding or Decoding()
    if not decoding.greedy:
        raise ValueError(f"`temperature` must be 0 to compare lengths, got {decoding.temperature}")
    runs = {n: _outputs(engine, prompts, replace(decoding, max_new_tokens=n)) for n in lengths}
    longest = max(lengths)
    pairs = [(f"{longest} tokens", f"{n} tokens", runs[n]) for n in sorted(lengths) if n < longest]
    return _frame("prefix", pairs, runs[longest])


def engines_agree(
    reference: Any,
    candidate: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding | None = None,
) -> pd.DataFrame:
    """Whether two engines, say with dynamic and with static cache, give the same ids.

    Returns
    -------
    DataFrame
        As `prefix_consistency`, with check "equal".
    """
    decoding = decoding or Decoding()
    outputs = [_outputs(engine, prompts, decoding) for engine in (reference, candidate)]
    names = [
        str(getattr(engine, "cache", type(engine).__name__)) for engine in (reference, candidate)
    ]
    return _frame("equal", [(*names, outputs[1])], outputs[0])


def _outputs(engine: Any, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[tuple]:
    return [c.output_ids for _, rows in complete(engine, prompts, decoding) for c in rows]


def _frame(check: str, pairs: list[tuple], references: list[tuple]) -> pd.DataFrame:
    rows = []
    for reference_name, candidate_name, candidates in pairs:
        for i, (ours, theirs) in enumerate(zip(references, candidates, strict=True)):
            shorter = min(len(ours), len(theirs))
            at = next((k for k in range(shorter) if ours[k] != theirs[k]), pd.NA)
            if at is pd.NA and check == "equal" and len(ours) != len(theirs):
                at = shorter
            rows.append((i, check, reference_name, candidate_name, shorter, at))
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return frame.astype({"first_divergence": "Int64"})
