"""How each level is answered from its evidence: one pure function per level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from lossless_lab.numerical.noise import NoiseFloor
from lossless_lab.numerical.tokens import TokenComparison
from lossless_lab.pipeline.evidence import Evidence
from lossless_lab.statistical.goodness_of_fit import SamplerFit
from lossless_lab.stats.intervals import (
    BOUND_CLUSTERS,
    mean_limits,
    n_for_share,
    perfect_bound,
    share_interval,
)
from lossless_lab.verdict import Answer

HALF = ("bfloat16", "float16")
NO_LOGITS = "logits were not at hand"


def default_margins(dtypes: tuple[str, str]) -> dict[str, float]:
    """Share of prompts and mean total variation that count as the same.

    >>> default_margins(("float32", "bfloat16"))
    {'1b': 0.05, '2': 0.05}
    """
    return {"1b": 0.05, "2": 0.05 if set(dtypes) & set(HALF) else 0.01}


def answered(
    evidence: Evidence,
    sampled: SamplerFit | None,
    *,
    margins: Mapping[str, float],
    floor: NoiseFloor | None,
    no_floor: str = "",
) -> tuple[Answer, ...]:
    """One answer per level, in the order of LEVELS.

    Parameters
    ----------
    sampled : as in `distribution`.
    margins : by level, all of those in `default_margins`.
    floor, no_floor : as in `within_floor`; why there is no floor.
    """
    tokens, positions = evidence.tokens, evidence.positions
    proven = len(positions) > 0 and bool(positions["bitwise_equal"].all())
    same_ids = sampled is None or tokens.n_prompts_differing == 0
    return (
        bitwise(positions),
        token_ids(tokens, proven, margins["1b"]),
        within_floor(positions, proven, floor, no_floor),
        distribution(positions, proven and same_ids, margins["2"], sampled),
        task_quality(),
    )


def bitwise(positions: pd.DataFrame) -> Answer:
    """1a: are the logits bitwise equal at every position tried?

    Parameters
    ----------
    positions : one row per position with `bitwise_equal`; empty where a side gave no logits.
    """
    if not (n := len(positions)):
        return Answer(level="1a", word="NOT TESTED", not_shown=NO_LOGITS)
    differing = int((~positions["bitwise_equal"]).sum())
    return Answer(
        level="1a",
        word="DIFFERENT" if differing else "PROVEN",
        estimate=differing / n,
        n=n,
        not_shown="" if differing else f"inputs other than these {n} positions",
    )


def token_ids(tokens: TokenComparison, proven: bool, margin: float) -> Answer:
    """1b: does the share of prompts whose ids differ stay within `margin`?

    Of texts alone, different ones show that ids differ; equal ones show nothing about ids.

    Parameters
    ----------
    tokens : the comparison; prompts are the units.
    proven : whether bitwise equal logits already imply equal ids.
    margin : share of prompts.
    """
    n, differing = tokens.n_prompts, tokens.n_prompts_differing
    low, high = (share_interval(differing, n, alternative=side) for side in ("greater", "less"))
    numbers = {
        "estimate": differing / n,
        "confidence_interval": (low.low, high.high),
        "margin": margin,
        "n": n,
        "minimum_detectable_effect": share_interval(0, n, alternative="less").high,
    }
    word, hidden = "DIFFERENT", ""
    if tokens.of_texts:
        if high.high <= margin or not differing:
            said = "token ids were not at hand, and equal texts do not show equal ids"
            return Answer(level="1b", word="NOT TESTED", not_shown=said)
    elif (proven and differing == 0) or high.high <= margin:
        word = "PROVEN" if proven and differing == 0 else "EQUIVALENT"
        hidden = f"differences after token {int(tokens.frame['n_reference'].max())}"
    elif not differing:
        word = "INCONCLUSIVE"
        hidden = f"{n_for_share(margin)} identical prompts would be needed, {n} were tried"
    return Answer(level="1b", word=word, not_shown=hidden, **numbers)


def multiples(positions: pd.DataFrame, floor: NoiseFloor) -> dict[str, float]:
    """Largest centred logit difference in units of max(floor, 1 ULP), by how it is measured.

    Parameters
    ----------
    positions : one row per position with `logit_rms`, `logit_peak` and `ulp` (of the reference's
        top logit).

    Returns
    -------
    dict of "RMS" and, where the floor has one, "peak at one token"; NaN stays NaN.
    """
    levels = {"RMS": ("logit_rms", floor.level)}
    if floor.peak is not None:
        levels["peak at one token"] = ("logit_peak", floor.peak)
    ulp = positions["ulp"].to_numpy(float)
    return {
        name: float(np.max(positions[column].to_numpy(float) / np.maximum(ulp, level)))
        for name, (column, level) in levels.items()
    }


def within_floor(
    positions: pd.DataFrame, proven: bool, floor: NoiseFloor | None, not_shown: str = ""
) -> Answer:
    """1c: are RMS and peak of the centred logit difference at most the floor, or one rounding step?

    Parameters
    ----------
    positions : as in `multiples`.
    proven : bitwise equal logits.
    floor : the measured floor; None where none was measured, and then only 1a can answer.
    not_shown : why there is no floor.
    """
    n = len(positions)
    if floor is not None and floor.not_invariant:
        not_shown = f"the reference is not invariant to {', '.join(floor.not_invariant)}"
    if n and proven:
        return Answer(level="1c", word="PROVEN", estimate=0.0, margin=1.0, n=n)
    if not n or floor is None or floor.not_invariant:
        return Answer(level="1c", word="NOT TESTED", n=n, not_shown=not_shown if n else NO_LOGITS)
    each = multiples(positions, floor)
    largest = float(np.max([*each.values()]))  # NaN stays NaN, and is then not within anything
    alone = "" if len(each) > 1 else "a change of single tokens (the floor given has no peaks); "
    return Answer(
        level="1c",
        word="EQUIVALENT" if largest <= 1 else "DIFFERENT",
        estimate=largest,
        margin=1.0,
        n=n,
        not_shown=(
            f"{alone}a bias smaller than the floor; a harmless variant passes it at a rate of "
            f"{floor.rate:.2g}{' by each measure' if len(each) > 1 else ''} "
            f"({floor.n_distinct} distinct variants set it)"
        ),
    )


def distribution(
    positions: pd.DataFrame, proven: bool, margin: float, sampled: SamplerFit | None = None
) -> Answer:
    """2: does the mean total variation of the next-token laws stay within `margin`?

    The laws are exact at each position, so only prompts are sampled: they are the units, and
    `mean_limits` decides over their means. Below BOUND_CLUSTERS prompts its upper limit assumes
    nothing, and needs about 3/margin prompts to exclude a difference. Under
    sampling the laws of the logits are one half only: what the sampler makes of them is tried by a
    test, which can show a difference and never its absence.

    Parameters
    ----------
    positions : one row per position with `prompt_id` and `total_variation`.
    proven : bitwise equal logits, and equal ids where they were sampled.
    margin : mean total variation.
    sampled : the candidate's tokens against its own laws; None under greedy decoding.
    """
    if len(positions) == 0:
        return Answer(level="2", word="NOT TESTED", not_shown="the full laws were not at hand")
    distances = positions["total_variation"].to_numpy(float)
    by_prompt = positions.groupby("prompt_id", sort=False)["total_variation"].agg(
        lambda tv: float(np.mean(tv.to_numpy(float)))
    )
    n, mean = len(by_prompt), float(np.mean(by_prompt.to_numpy()))
    numbers: dict = {"level": "2", "estimate": mean, "margin": margin, "n": n}
    numbers["minimum_detectable_effect"] = perfect_bound(n)
    if proven:
        return Answer(word="PROVEN", not_shown="contexts not tried", **numbers)
    if not np.isfinite(mean):
        return Answer(word="DIFFERENT", **numbers)
    low, high = mean_limits(by_prompt.to_numpy())
    longest = int(positions["position"].max()) + 1
    worst, added = float(distances.max()), min(1.0, longest * mean)
    hidden = [
        f"what the mean hides (TV up to {worst:.2g} at one position, up to {added:.2g} over a "
        f"sequence of {longest} tokens)"
    ]
    if low > margin:
        word = "DIFFERENT"
    elif high <= margin:
        word = "EQUIVALENT"
        hidden.append(f"changes confined to fewer than {perfect_bound(n):.2g} of all prompts")
    else:
        word = "INCONCLUSIVE"
        more = f"; from {BOUND_CLUSTERS} on a narrower bound can" if n < BOUND_CLUSTERS else ""
        hidden.append(f"{n} prompts are too few to decide{more}")
    if sampled is not None and word != "DIFFERENT":
        agree = "laws of the logits agree; " if word == "EQUIVALENT" else ""
        hidden.append(f"{agree}the sampler was tried on {sampled}, which bounds nothing")
        word = "DIFFERENT" if sampled.rejected else "INCONCLUSIVE"
    hidden.append(f"contexts longer than {longest} new tokens")
    shown = hidden[:1] if word == "DIFFERENT" else hidden
    return Answer(word=word, confidence_interval=(low, high), not_shown="; ".join(shown), **numbers)


def task_quality() -> Answer:
    """3: needs task items, which a comparison of runs does not hold."""
    return Answer(level="3", word="NOT TESTED", not_shown="no task items were scored")


def without_rule(answers: tuple[Answer, ...], rule: str) -> tuple[Answer, ...]:
    """Level 2 where greedy decoding never ran what the claim about sampling rests on."""
    said = f"{rule} was not run (greedy decoding); "
    return tuple(
        replace(a, word="INCONCLUSIVE", not_shown=said + a.not_shown)
        if a.level == "2" and a.word in ("PROVEN", "EQUIVALENT", "INCONCLUSIVE")
        else a
        for a in answers
    )


def demoted(answers: tuple[Answer, ...], word: str, levels: tuple[str, ...]) -> tuple[Answer, ...]:
    """The same numbers under another word, where nothing could be judged after all."""
    return tuple(
        replace(a, word=word) if a.level in levels and a.word != "NOT TESTED" else a
        for a in answers
    )
