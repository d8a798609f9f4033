"""What is asked before anything is compared: same settings, did the change run, is all intact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.protocol import Completion
from lossless_lab.optimizations.entry import fingerprint
from lossless_lab.optimizations.witness import compiled_code, observe
from lossless_lab.pipeline.subjects import Stored, Subject
from lossless_lab.prompts import Prompt


def witness(candidate: Subject, prompts: Sequence[Prompt], decoding: Decoding) -> str:
    """What shows that the candidate's change ran; "" where it was looked for and not found."""
    entry = candidate.optimization
    if isinstance(candidate, Stored):
        seen = candidate.metrics.get("witness")
        return "not witnessed" if seen is None else seen
    if not (entry or candidate.compiled):
        return "not witnessed"
    engine = candidate.engine
    ids = [p.ids for p in prompts[: engine.batch_size]]
    short = replace(decoding, max_new_tokens=min(3, decoding.max_new_tokens), n_samples=1)
    seen = observe(candidate.network, lambda: engine.generate(ids, short, seed=0))
    return entry.witness(seen) if entry else compiled_code(seen)


def exercised(candidate: Subject, completions: Sequence[Completion]) -> tuple[int, int] | None:
    """(positions that could depend on the change, all positions), None where nothing tells."""
    if isinstance(candidate, Stored):
        told = [candidate.metrics.get(name) for name in ("exercised", "n_positions")]
        return None if None in told else tuple(told)
    if candidate.optimization is None:
        return None
    lengths = [len(c.output_ids) for c in completions]
    rows = [int(c.timings.get("batch_rows", 1)) for c in completions]
    return candidate.optimization.exercised(lengths, rows), sum(lengths)


def not_comparable(rows: pd.DataFrame, allowed: Sequence[str]) -> str:
    """The differences that make a comparison meaningless, in words; "" where there are none."""
    differing = set(rows["field"])
    kinds = {"sampling", "seed", "prompts"}
    if "engine" not in differing:  # two engines schedule each in their own way
        kinds.add("scheduling")
    own = {"max_seq_len"} if "weights_sha256" in differing else set()
    blocking = rows[
        rows["kind"].isin(kinds)
        & (rows["effect"] == "possible")
        & ~rows["field"].isin({*allowed, *own})
    ]
    named = [f"{r.field} is {r.reference} and {r.candidate}" for r in blocking.itertuples()]
    return "the two sides were not asked the same: " + "; ".join(named) if named else ""


def vocabularies_differ(rows: pd.DataFrame) -> str:
    """Why token ids do not mean the same on both sides; "" where they do."""
    for field in ("vocab_size", "tokenizer_sha256"):
        row = rows[(rows["field"] == field) & (rows["effect"] == "possible")]
        if len(row):
            a, b = row.iloc[0]["reference"], row.iloc[0]["candidate"]
            if not {a, b} & {None, "none"}:  # a side that has none, or does not tell
                return f"the two sides have different vocabularies: {field} is {a} and {b}"
    return ""


def state(subject: Subject) -> str:
    """Fingerprint of the subject's weights and logits; "" where it has no network."""
    network = subject.network
    return "" if network is None else fingerprint(network)
