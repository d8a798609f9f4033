"""Why outputs differ: settings, NaN, rounding or something else, each decided by a control run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.numerical.flips import FlipRisk
from lossless_lab.numerical.noise import NoiseFloor
from lossless_lab.numerical.tokens import TokenComparison
from lossless_lab.optimizations.entry import patched
from lossless_lab.pipeline.answers import HALF, multiples
from lossless_lab.pipeline.controls import in_float32
from lossless_lab.pipeline.evidence import Evidence
from lossless_lab.pipeline.partings import against_own_logits, in_common
from lossless_lab.pipeline.recognition import applied
from lossless_lab.pipeline.subjects import Live, Subject
from lossless_lab.prompts import Prompt
from lossless_lab.statistical.goodness_of_fit import SamplerFit
from lossless_lab.verdict import Answer

_N_TOLD = 3  # first divergences that a cause describes


def cause(
    reference: Subject,
    candidate: Subject,
    evidence: Evidence,
    answers: Sequence[Answer],
    *,
    floor: NoiseFloor | None,
    risk: FlipRisk | None,
    sampled: SamplerFit | None,
    progress: Callable[[str], Any],
) -> tuple[str, pd.DataFrame]:
    """The cause in one phrase, and what was found at each first divergence of greedy decoding.

    In half precision both sides are run again in float32 on the prompts that differ, and only where
    they then agree is rounding the cause. What rounding can do is told by `risk`, the flips that
    the noise of harmless variants makes; without it, by the margins that the floor itself bridges.

    Returns
    -------
    str
        "" where nothing differs, or nothing can be said.
    DataFrame
        The columns of `FlipRisk.frame`, margin_steps and word, one row per first divergence; empty
        where there is no `risk`.
    """
    tokens, none = evidence.tokens, pd.DataFrame()
    for side in ("reference", "candidate"):
        if lawless := no_law(evidence, side):
            return lawless, none
    if sampled is not None and sampled.rejected:
        said = f"emitted tokens do not follow the law of the candidate's own logits: {sampled}"
        return said, none
    kinds = set(tokens.frame["kind"]) - {"equal"}
    if kinds == {"whitespace"}:
        return "outputs differ in white space only", none
    if kinds and (told := in_common(evidence) or against_own_logits(evidence)):
        return told, none
    if kinds == {"text_only"}:
        return "texts differ, so ids do", none
    beside = _beside(evidence, answers, floor)
    if tokens.n_prompts_differing == 0:
        return (f"{beside}, ids the same" if beside else ""), none
    control, same = _control(reference, candidate, evidence, progress)
    greedy = evidence.decoding.greedy
    if greedy and risk is not None:
        partings = _partings(risk, tokens.frame, same)
        found = control or _by_noise(partings, sides=(reference, candidate))
        told = [found, _expected(risk, tokens), *_told(partings), beside]
        return "; ".join(filter(None, told)), partings
    margin = _margins(tokens.frame) if greedy else ""
    law = next(a.word for a in answers if a.level == "1c")
    if control:
        found = control
    elif not greedy and law in ("PROVEN", "EQUIVALENT"):
        found = "sampled ids part by other random numbers: a seed, a batch, a number of draws"
    elif floor is None:
        return (f"outputs part{margin}" if margin else ""), none
    elif greedy and _bridged(tokens.frame["reference_margin"].dropna(), floor):
        found = "near tie: the noise floor can bridge every margin at a first divergence"
    else:
        found = f"{'' if greedy else 'sampled ids part: '}not explained by the noise floor"
    return f"{found}{margin}" + (f"; {beside}" if beside else ""), none


def _beside(evidence: Evidence, answers: Sequence[Answer], floor: NoiseFloor | None) -> str:
    word = next(a.word for a in answers if a.level == "1c")
    if floor is None or word not in ("EQUIVALENT", "DIFFERENT"):
        return ""
    within = "within" if word == "EQUIVALENT" else "beyond"
    each = (f"{name} {x:.3g}" for name, x in multiples(evidence.positions, floor).items())
    return f"logit differences {within} the noise floor ({', '.join(each)} times it)"


def _partings(risk: FlipRisk, tokens: pd.DataFrame, same: Mapping[str, bool]) -> pd.DataFrame:
    """First divergences with their noise; a margin of two steps is one step of each logit."""
    told = tokens.dropna(subset=["first_divergence", "margin_steps"])
    places = told[["prompt_id", "sample_index", "margin_steps"]]
    found = risk.at(places.assign(position=told["first_divergence"].astype(int)))
    bridged = (found["flip_probability"] > 0) | (found["margin_steps"] <= 2)
    word = np.where(bridged, "near tie", "beyond the noise")
    parted = [not same.get(name, True) for name in found["prompt_id"]]
    return found.assign(word=np.where(parted, "not rounding", word))


def _by_noise(partings: pd.DataFrame, sides: Sequence[Subject]) -> str:
    """What the noise alone tells, where no control was run."""
    if (partings["word"] != "near tie").any() or partings.empty:
        return "not explained by the noise floor"
    half = [d for s in sides if (d := str(getattr(s.network, "dtype", ""))[6:]) in HALF]
    unconfirmed = " (no control in float32 could be run)" if half else ""
    return f"near tie by the noise floor{unconfirmed}"


def _expected(risk: FlipRisk, tokens: TokenComparison) -> str:
    mean, low, high = risk.prompts_differing()
    seen = tokens.n_prompts_differing
    more = ", more than noise explains" if seen > high else ""
    return (
        f"noise alone makes {mean:.2g} of {tokens.n_prompts} prompts differ (95 % band {low:.0f} "
        f"to {high:.0f}), {seen} do{more}"
    )


def _told(partings: pd.DataFrame) -> list[str]:
    """The first of the first divergences, in words."""
    first = [
        f"prompt {p.prompt_id!r}, token {p.position}: "
        + (f"margin {p.margin:.3g}" if p.margin else "an exact tie")
        + f", noise {p.noise:.2g}, flip probability {p.flip_probability:.2g}, {p.word}"
        for p in partings.sort_values("position").head(_N_TOLD).itertuples()
    ]
    more = len(partings) - len(first)
    return [*first, f"{more} more such places" if more else ""]


def _bridged(margins: Any, floor: NoiseFloor) -> bool:
    """Whether two logits that each move by the floor's peak can change places at every margin."""
    reach = 2 * max(floor.peak or floor.level, floor.ulp)
    return len(margins) > 0 and bool((margins <= reach).all())


def _control(
    reference: Subject, candidate: Subject, evidence: Evidence, progress: Callable[[str], Any]
) -> tuple[str, dict[str, bool]]:
    """What both sides in float32 do, in words and by prompt; nothing where they cannot be run."""
    sides = (reference, candidate)
    if not all(isinstance(s, Live) and isinstance(s.engine, TransformersEngine) for s in sides):
        return "", {}
    dtypes = [str(s.network.dtype).removeprefix("torch.") for s in sides]
    half = [name for name in dtypes if name in HALF]
    if not half or any(s.compiled or patched(s.network) for s in sides):
        return "", {}
    progress("control in float32")
    differing = set(evidence.tokens.divergences["prompt_id"])
    prompts = [p for p in evidence.prompts if p.id in differing]
    wide, entry = [in_float32(s) for s in sides], candidate.optimization
    anew = entry is not None and dtypes[0] == dtypes[1]  # weights changed in half stay rounded
    if anew:
        wide[1] = applied(entry, wide[0])
    same = _same_ids(wide, prompts, evidence.decoding)
    found = dict(zip((p.id for p in prompts), same, strict=True))
    where = f"{sum(same)} of {len(same)} differing prompts identical in float32"
    if all(same):
        tie = "near tie, " if evidence.decoding.greedy else ""
        of = " of the changed weights" if anew and "weights_sha256" in entry.changes else ""
        return f"{tie}rounding{of} in {half[-1]} (control: {where})", found
    if dtypes[0] != dtypes[1]:
        return f"weights and activations rounded to {half[-1]} (control: {where})", found
    return f"not rounding in {half[-1]} alone (control: {where})", found


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
