"""What is asked before anything is compared: same settings, did the change run, is all intact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import pandas as pd

from lossless_lab import runs
from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.protocol import Completion
from lossless_lab.models.places import choose
from lossless_lab.optimizations.entry import fingerprint
from lossless_lab.optimizations.witness import compiled_code, observe
from lossless_lab.pipeline.subjects import Stored, Subject
from lossless_lab.prompts import Prompt
from lossless_lab.verdict.verdict import NOT_WITNESSED

FIELDS = (*runs.Manifest.model_fields, *(f.name for f in fields(Decoding)))
MARGINS = ("1b", "2")


def one_and_the_same(reference: Subject, candidate: Subject, rows: pd.DataFrame) -> str:
    """Why there is nothing to compare: one object on both sides, run with the same settings."""
    if isinstance(reference, Stored) or isinstance(candidate, Stored):
        return ""
    same = reference.computes is candidate.computes or reference.computes == candidate.computes
    settings = (rows["kind"] != "subject") | rows["field"].isin(["engine", "attention"])
    if not same or settings.any():
        return ""
    what = "network" if reference.network is not None else "function"
    return f"both sides are one and the same {what}: was the change made in place?"


def witness(candidate: Subject, prompts: Sequence[Prompt], decoding: Decoding) -> str:
    """What shows that the candidate's change ran; "" where it was looked for and not found."""
    entry = candidate.optimization
    if isinstance(candidate, Stored):
        seen = candidate.metrics.get("witness")
        if isinstance(seen, str):
            return seen
        claimed = candidate.manifest.get("optimization", "none")
        why = "" if claimed == "none" else f": the manifest claims {claimed}, its run recorded none"
        return NOT_WITNESSED + why
    if not (entry or candidate.compiled):
        return NOT_WITNESSED
    engine = candidate.engine
    ids = [p.ids for p in prompts[: engine.batch_size]]
    short = replace(decoding, max_new_tokens=min(3, decoding.max_new_tokens), n_samples=1)
    seen = observe(candidate.network, lambda: engine.generate(ids, short, seed=0))
    return entry.witness(seen) if entry else compiled_code(seen)


def exercised(candidate: Subject, completions: Sequence[Completion]) -> tuple[int, int] | None:
    """(positions that could depend on the change, all positions), None where nothing tells."""
    if isinstance(candidate, Stored):
        told = [candidate.metrics.get(name) for name in ("exercised", "n_positions")]
        return tuple(told) if all(type(n) is int for n in told) else None
    if candidate.optimization is None:
        return None
    entry = candidate.optimization
    lengths = [len(c.output_ids) for c in completions]
    if entry.counted:
        return sum(int(c.timings.get(entry.counted, 0)) for c in completions), sum(lengths)
    rows = [int(c.timings.get("batch_rows", 1)) for c in completions]
    n_positions = sum(lengths)
    if entry.depends is not None:
        sizes = [(len(c.prompt_ids), len(c.output_ids)) for c in completions]
        lengths = [sum(entry.depends(n, i) for i in range(length)) for n, length in sizes]
    return entry.exercised(lengths, rows), n_positions


def idle(candidate: Subject, completions: Sequence[Completion]) -> str:
    """What happened where no position could depend on the change."""
    said = f"no judged position depended on {candidate.name}"
    drafted = sum(int(c.timings.get("drafted", 0)) for c in completions)
    judged = f"{drafted} drafted tokens were judged and not one was rejected"
    return f"{judged}, so {said}" if drafted else said


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


def refuse_options(
    margins: Mapping[str, float], under_test: Sequence[str] = (), n_variants: int = 0
) -> None:
    """Raise ValueError for a name or value that would silently do nothing, or anything."""
    for level, margin in margins.items():
        choose("margins", level, MARGINS)
        number = isinstance(margin, int | float) and not isinstance(margin, bool)
        if not (number and 0 < margin <= 1):
            rule = "a number above 0 and at most 1"
            raise ValueError(f"`margins[{level!r}]` must be {rule}; got {margin!r}")
    if isinstance(under_test, str):
        raise ValueError(f"`under_test` must be a list of field names; got {under_test!r}")
    for name in under_test:
        choose("under_test", name, FIELDS)
    if isinstance(n_variants, bool) or not isinstance(n_variants, int) or n_variants < 0:
        raise ValueError(f"`n_variants` must be a whole number of at least 0; got {n_variants!r}")


def state(subject: Subject) -> str:
    """Fingerprint of the subject's weights and logits; "" where it has no network."""
    network = subject.network
    return "" if network is None else fingerprint(network)
