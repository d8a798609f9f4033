"""How each level is answered from its evidence: one pure function per level."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from lossless_lab.numerical.noise import NoiseFloor
from lossless_lab.numerical.tokens import TokenComparison
from lossless_lab.stats.intervals import (
    MIN_CLUSTERS,
    bounded_mean_interval,
    cluster_mean_interval,
    n_for_share,
    perfect_bound,
    share_interval,
)
from lossless_lab.verdict import Answer

HALF = ("bfloat16", "float16")


def default_margins(dtypes: tuple[str, str]) -> dict[str, float]:
    """Share of prompts, mean total variation and task points that count as the same.

    >>> default_margins(("float32", "bfloat16"))
    {'1b': 0.05, '2': 0.05, '3': 2.0}
    """
    return {"1b": 0.05, "2": 0.05 if set(dtypes) & set(HALF) else 0.01, "3": 2.0}


def bitwise(positions: pd.DataFrame) -> Answer:
    """1a: are the logits bitwise equal at every position tried?

    Parameters
    ----------
    positions : one row per position with `bitwise_equal`; empty where a side gave no logits.
    """
    n = len(positions)
    if n == 0:
        return Answer(level="1a", word="NOT TESTED", not_shown="logits were not at hand")
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

    Parameters
    ----------
    tokens : the comparison; prompts are the units.
    proven : whether bitwise equal logits already imply equal ids.
    margin : share of prompts.
    """
    if tokens.frame["n_reference"].isna().all():
        return Answer(level="1b", word="NOT TESTED", not_shown="token ids were not at hand")
    n, differing = tokens.n_prompts, tokens.n_prompts_differing
    high = share_interval(differing, n, alternative="less").high
    word, hidden = "INCONCLUSIVE", ""
    if proven and differing == 0:
        word = "PROVEN"
    elif high <= margin:
        word = "EQUIVALENT"
    elif differing:
        word = "DIFFERENT"
    if word == "INCONCLUSIVE":
        hidden = f"{n_for_share(margin)} identical prompts would be needed, {n} were tried"
    elif word in ("PROVEN", "EQUIVALENT"):
        longest = int(tokens.frame["n_reference"].max())
        hidden = f"differences after token {longest}"
    return Answer(
        level="1b",
        word=word,
        estimate=differing / n,
        confidence_interval=(share_interval(differing, n, alternative="greater").low, high),
        margin=margin,
        n=n,
        minimum_detectable_effect=share_interval(0, n, alternative="less").high,
        not_shown=hidden,
    )


def within_floor(
    positions: pd.DataFrame, proven: bool, floor: NoiseFloor | None, not_shown: str = ""
) -> Answer:
    """1c: is the largest centred logit difference at most the floor, or one rounding step?

    Parameters
    ----------
    positions : one row per position with `logit_rms` and `ulp` (of the reference's top logit).
    proven : bitwise equal logits.
    floor : the measured floor; None where none was measured, and then only 1a can answer.
    not_shown : why there is no floor.
    """
    if len(positions) == 0:
        return Answer(level="1c", word="NOT TESTED", not_shown="logits were not at hand")
    if proven:
        return Answer(level="1c", word="PROVEN", estimate=0.0, margin=1.0, n=len(positions))
    if floor is None:
        return Answer(level="1c", word="NOT TESTED", n=len(positions), not_shown=not_shown)
    unit = np.maximum(positions["ulp"].to_numpy(float), floor.level)
    multiples = positions["logit_rms"].to_numpy(float) / unit
    largest = float(np.max(multiples))  # NaN stays NaN, and is then not within anything
    return Answer(
        level="1c",
        word="EQUIVALENT" if largest <= 1 else "DIFFERENT",
        estimate=largest,
        margin=1.0,
        n=len(positions),
        not_shown=(
            f"a bias smaller than the floor; a harmless variant passes it at a rate of "
            f"{floor.rate:.2g} ({floor.n_distinct} distinct variants set it)"
        ),
    )


def distribution(positions: pd.DataFrame, proven: bool, margin: float) -> Answer:
    """2: does the mean total variation of the next-token laws stay within `margin`?

    The laws are exact at each position, so only prompts are sampled: they are the units. From
    MIN_CLUSTERS prompts on a t interval over prompt means decides; below, a bound that assumes
    nothing, which can show a difference but needs about 3/margin prompts to exclude one.

    Parameters
    ----------
    positions : one row per position with `prompt_id` and `total_variation`.
    proven : bitwise equal logits.
    margin : mean total variation.
    """
    if len(positions) == 0:
        return Answer(level="2", word="NOT TESTED", not_shown="the full laws were not at hand")
    by_prompt = positions.groupby("prompt_id", sort=False)["total_variation"].agg(
        lambda tv: float(np.mean(tv.to_numpy(float)))
    )
    n, mean = len(by_prompt), float(np.mean(by_prompt.to_numpy()))
    numbers: dict = {"estimate": mean, "margin": margin, "n": n}
    numbers["minimum_detectable_effect"] = perfect_bound(n)
    if proven:
        return Answer(level="2", word="PROVEN", not_shown="contexts not tried", **numbers)
    if not np.isfinite(mean):
        return Answer(level="2", word="DIFFERENT", not_shown="", **numbers)
    few = n < MIN_CLUSTERS
    interval = bounded_mean_interval(by_prompt) if few else _one_sided_pair(by_prompt)
    word = "INCONCLUSIVE"
    if interval[0] > margin:
        word = "DIFFERENT"
    elif interval[1] <= margin:
        word = "EQUIVALENT"
    hidden = {
        "INCONCLUSIVE": f"{n} prompts are too few to decide"
        + (f"; from {MIN_CLUSTERS} on an interval over prompts can" if few else ""),
        "EQUIVALENT": f"changes confined to fewer than {perfect_bound(n):.2g} of all prompts",
    }
    longest = int(positions["position"].max()) + 1
    hidden.setdefault(word, "")
    shown = "; ".join(filter(None, [hidden[word], f"contexts longer than {longest} new tokens"]))
    return Answer(
        level="2",
        word=word,
        confidence_interval=tuple(interval),
        not_shown="" if word == "DIFFERENT" else shown,
        **numbers,
    )


def _one_sided_pair(by_prompt: pd.Series) -> tuple[float, float]:
    """Lower and upper limits, each one-sided at 95 %: a 90 % two-sided interval."""
    low, high = cluster_mean_interval(by_prompt, confidence=0.90)
    return max(low, 0.0), min(high, 1.0)


def task_quality() -> Answer:
    """3: needs task items, which a comparison of runs does not hold."""
    return Answer(level="3", word="NOT TESTED", not_shown="no task items were scored")


def demoted(answers: tuple[Answer, ...], word: str, levels: tuple[str, ...]) -> tuple[Answer, ...]:
    """The same numbers under another word, where nothing could be judged after all."""
    return tuple(
        replace(a, word=word) if a.level in levels and a.word != "NOT TESTED" else a
        for a in answers
    )
