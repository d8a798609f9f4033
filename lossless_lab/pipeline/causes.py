"""Why outputs differ: settings, NaN, rounding or something else, each decided by a control run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.numerical.noise import NoiseFloor
from lossless_lab.optimizations.entry import patched
from lossless_lab.pipeline.answers import HALF, multiples
from lossless_lab.pipeline.controls import in_float32
from lossless_lab.pipeline.evidence import Evidence
from lossless_lab.pipeline.subjects import Live, Subject
from lossless_lab.prompts import Prompt
from lossless_lab.statistical.goodness_of_fit import SamplerFit
from lossless_lab.verdict import Answer


def cause(
    reference: Subject,
    candidate: Subject,
    evidence: Evidence,
    answers: Sequence[Answer],
    *,
    floor: NoiseFloor | None,
    sampled: SamplerFit | None,
    progress: Callable[[str], Any],
) -> str:
    """The cause in one phrase; "" where nothing differs, or nothing can be said.

    In half precision both sides are run again in float32 on the prompts that differ, and only if
    they then agree is rounding the cause. Without that control a near tie is named only where
    greedy decoding parts by margins that the noise floor itself can bridge.
    """
    tokens = evidence.tokens
    for side in ("reference", "candidate"):
        if lawless := no_law(evidence, side):
            return lawless
    if sampled is not None and sampled.rejected:
        return f"emitted tokens do not follow the law of the candidate's own logits: {sampled}"
    kinds = set(tokens.frame["kind"]) - {"equal"}
    said = {
        "stop_set": str(tokens).split("; ")[-1],
        "whitespace": "outputs differ in white space only",
        "length": "one side stops earlier; outputs agree up to there",
        "text_only": "texts differ, so ids do",
    }
    if len(kinds) == 1 and (only := said.get(*kinds)):
        return only
    word = {a.level: a.word for a in answers}
    beside = ""
    if floor is not None and word["1c"] in ("EQUIVALENT", "DIFFERENT"):
        within = "within" if word["1c"] == "EQUIVALENT" else "beyond"
        each = (f"{name} {x:.3g}" for name, x in multiples(evidence.positions, floor).items())
        beside = f"logit differences {within} the noise floor ({', '.join(each)} times it)"
    if tokens.n_prompts_differing == 0:
        return f"{beside}, ids the same" if beside else ""
    greedy = evidence.decoding.greedy
    margin = _margins(tokens.frame) if greedy else ""
    if control := _control(reference, candidate, evidence, progress):
        found = control
    elif floor is None:
        return f"outputs part{margin}" if margin else ""
    elif greedy and _bridged(tokens.frame["reference_margin"].dropna(), floor):
        found = "near tie: the noise floor can bridge every margin at a first divergence"
    else:
        found = f"{'' if greedy else 'sampled ids part: '}not explained by the noise floor"
    return f"{found}{margin}" + (f"; {beside}" if beside else "")


def _bridged(margins: Any, floor: NoiseFloor) -> bool:
    """Whether two logits that each move by the floor's peak can change places at every margin."""
    reach = 2 * max(floor.peak or floor.level, floor.ulp)
    return len(margins) > 0 and bool((margins <= reach).all())


def _control(
    reference: Subject, candidate: Subject, evidence: Evidence, progress: Callable[[str], Any]
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
        tie = "near tie, " if evidence.decoding.greedy else ""
        return f"{tie}rounding in {half[-1]} (control: {where})"
    if dtypes[0] != dtypes[1]:
        return f"weights and activations rounded to {half[-1]} (control: {where})"
    return f"not rounding in {half[-1]} alone (control: {where})"


def _same_ids(sides: Sequence[Live], prompts: Sequence[Prompt], decoding: Decoding) -> list[bool]:
    outputs = [[c.output_ids for c in side.complete(prompts, decoding)] for side in sides]
    n = decoding.n_samples
    equal = [a == b for a, b in zip(*outputs, strict=True)]
    return [all(equal[i : i + n]) for i in range(0, len(equal), n)]


def _margins(frame: Any) -> str:
    steps, absolute = (frame[name].dropna() for name in ("margin_steps", "reference_margin"))
    if steps.empty:
        return ""
    return (
        f"; at the first divergence the top-2 margin is {np.median(absolute):.3g} in the median, "
        f"{np.median(steps):.2g} rounding steps, at most {steps.max():.2g}"
    )


def no_law(evidence: Evidence, side: str) -> str:
    """How often and where first one side's logits are NaN or infinite; "" for never."""
    places = {(p, at): why for p, at, of, why in evidence.undefined if of == side}
    if not places:
        return ""
    (prompt_id, position), reason = next(iter(places.items()))
    return (
        f"logits of the {side} are no law at {len(places)} positions, first at prompt "
        f"{prompt_id!r}, position {position}: {reason}"
    )
