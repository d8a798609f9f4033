"""Why outputs differ: settings, NaN, rounding or something else, each decided by a control run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.numerical.noise import NoiseFloor
from lossless_lab.optimizations.entry import patched
from lossless_lab.pipeline.answers import HALF
from lossless_lab.pipeline.controls import in_float32
from lossless_lab.pipeline.subjects import Live, Subject
from lossless_lab.prompts import Prompt
from lossless_lab.verdict import Answer


def cause(
    reference: Subject,
    candidate: Subject,
    evidence: Any,
    answers: Sequence[Answer],
    *,
    floor: NoiseFloor | None,
    progress: Callable[[str], Any],
) -> str:
    """The cause in one phrase; "" where nothing differs, or nothing can be said.

    A near tie is never named by a threshold on the margin: in half precision both sides are run
    again in float32 on the prompts that differ, and only if they then agree is rounding the cause.
    """
    tokens = evidence.tokens
    if new := _new_nonfinite(evidence.undefined):
        return new
    kinds = set(tokens.frame["kind"]) - {"equal"}
    if kinds == {"stop_set"} or kinds == {"whitespace"} or kinds == {"length"}:
        return {
            "stop_set": str(tokens).split("; ")[-1],
            "whitespace": "outputs differ in white space only",
            "length": "one side stops earlier; outputs agree up to there",
        }[kinds.pop()]
    word = {a.level: a.word for a in answers}
    if word["1a"] in ("PROVEN", "NOT TESTED") and tokens.n_prompts_differing == 0:
        return ""
    if tokens.n_prompts_differing == 0:
        within = "within" if word["1c"] == "EQUIVALENT" else "beyond"
        return "" if floor is None else f"logit differences {within} the noise floor, ids the same"
    margin = _margins(tokens.frame)
    if control := _control(reference, candidate, evidence, progress):
        return f"{control}{margin}"
    if floor is not None:
        within = word["1c"] == "EQUIVALENT"
        kind = (
            "near tie: differences within" if within else "not rounding alone: differences beyond"
        )
        return f"{kind} the noise floor{margin}"
    return f"outputs part{margin}" if margin else ""


def _control(
    reference: Subject, candidate: Subject, evidence: Any, progress: Callable[[str], Any]
) -> str:
    sides = (reference, candidate)
    if not all(isinstance(s, Live) and isinstance(s.engine, TransformersEngine) for s in sides):
        return ""
    dtypes = [str(s.network.dtype).removeprefix("torch.") for s in sides]
    half = [name for name in dtypes if name in HALF]
    if not half or any(s.compiled or patched(s.network) for s in sides):
        return ""
    progress("control in float32")
    differing = set(evidence.tokens.divergences["prompt_id"])
    prompts = [p for p in evidence.prompts if p.id in differing]
    same = _same_ids([in_float32(s) for s in sides], prompts, evidence.decoding)
    where = f"{sum(same)} of {len(same)} differing prompts identical in float32"
    if all(same):
        return f"near tie, rounding in {half[-1]} (control: {where})"
    if dtypes[0] != dtypes[1]:
        return f"weights and activations rounded to {half[-1]} (control: {where})"
    return f"not rounding in {half[-1]} alone (control: {where})"


def _same_ids(sides: Sequence[Live], prompts: Sequence[Prompt], decoding: Decoding) -> list[bool]:
    outputs = [[c.output_ids for c in side.complete(prompts, decoding)] for side in sides]
    n = decoding.n_samples
    equal = [a == b for a, b in zip(*outputs, strict=True)]
    return [all(equal[i : i + n]) for i in range(0, len(equal), n)]


def _margins(frame: Any) -> str:
    steps = frame["margin_steps"].dropna()
    if steps.empty:
        return ""
    absolute = frame["reference_margin"].dropna()
    return (
        f"; at the first divergence the top-2 margin is {np.median(absolute):.3g} in the median, "
        f"{np.median(steps):.2g} rounding steps, at most {steps.max():.2g}"
    )


def _new_nonfinite(undefined: Sequence[tuple[str, int, str, str]]) -> str:
    ours = {(p, at) for p, at, side, _ in undefined if side == "reference"}
    new = [row for row in undefined if row[2] == "candidate" and row[:2] not in ours]
    if not new:
        return ""
    prompt_id, position, _, reason = new[0]
    return (
        f"logits of the candidate are no law at {len(new)} positions, first at prompt "
        f"{prompt_id!r}, position {position}: {reason}"
    )
