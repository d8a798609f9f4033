"""The panel of notebook 01: three sliders, and answers at three levels that change one by one.

The reference is a model's logits; the candidate is those logits scaled, disturbed, and sampled
through a draft rule. Everything is enumerated: nothing is sampled and no model runs.
"""

import functools
from collections.abc import Callable

import ipywidgets
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from lossless_lab import plots
from lossless_lab.statistical.divergences import distribution, from_probs, total_variation
from lossless_lab.stats.intervals import mean_limits, n_for_share, share_interval

from .base import Content, Panel, control

RULES = ("no draft", "correct residual", "resample from target", "greedy, judged soft")
NOISE = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0)
MARGINS = {"1b": 0.05, "2": 0.01, "3": 0.02}  # share of prompts, total variation, share of items


def which_level_breaks(
    logits: np.ndarray,
    draft_logits: np.ndarray,
    option_ids: np.ndarray,
    *,
    decode: Callable[[list[int]], str] | None = None,
) -> Panel:
    """Panel with a scale on the logits, noise on the logits, and the draft rule; see `levels`."""
    slider, made = ipywidgets.SelectionSlider, functools.partial(control, width=(150, 520))
    scale = {"value": 1.0, "min": 0.5, "max": 1.5, "step": 0.1}
    controls = {
        "scale": made(ipywidgets.FloatSlider, "logits times", **scale),
        "noise": made(slider, "noise on logits", options=NOISE),
        "rule": made(slider, "draft rule", options=RULES),
    }
    arrays = (np.asarray(a) for a in (logits, draft_logits, option_ids))
    return Panel(
        controls=controls,
        compute=functools.partial(levels, *arrays, decode=decode),
        draw=_draw,
        figure=Figure(figsize=(7.6, 3.6), dpi=100),
        actions={"Reset": _reset},
    )


def levels(
    logits: np.ndarray,
    draft_logits: np.ndarray,
    option_ids: np.ndarray,
    *,
    scale: float = 1.0,
    noise: float = 0.0,
    rule: str = "no draft",
    decode: Callable[[list[int]], str] | None = None,
) -> Content:
    """Answers at levels 1a, 1b, 2 and 3 for one setting of the sliders.

    Parameters
    ----------
    logits, draft_logits : [n, vocab_size] float32; a row is the next token after one prompt.
    option_ids : [n, m] token ids; a row is a question, answered by the option with the largest
        logit, and its first option is the right one.
    scale, noise : the candidate's logits are logits · scale + noise · standard normal.
    rule : one of RULES. It acts when sampling; greedy ids and choices are those of the logits.
    decode : ids to text, for the labels of tokens.

    Raises
    ------
    ValueError where shapes disagree or a logit is NaN or infinite.
    """
    _check(logits, draft_logits, option_ids)
    candidate = disturb(logits, scale=scale, noise=noise, seed=0)
    law = _softmax(logits)
    output = output_law(_softmax(candidate), _softmax(draft_logits), rule=rule)
    tv = total_variation(from_probs(law), from_probs(output))
    same = logits.tobytes() == candidate.tobytes()
    greedy = (x.argmax(axis=1) for x in (logits, candidate))
    right = [np.take_along_axis(x, option_ids, 1).argmax(1) == 0 for x in (logits, candidate)]
    changed, flipped = int(np.not_equal(*greedy).sum()), int(np.not_equal(*right).sum())
    differ = (logits.view(np.int32) != candidate.view(np.int32)).mean()
    n = len(logits)
    rows = [
        ("1a", "logits bitwise equal", "PROVEN" if same else "DIFFERENT", f"{differ:.1%} differ"),
        ("1b", "same greedy token ids", *_share(changed, n, MARGINS["1b"], same=same)),
        ("2", "same sampling distribution", *_law(tv, law, output)),
        ("3", "same answers to right-or-wrong items", *_share(flipped, n, MARGINS["3"], same=same)),
    ]
    table = pd.DataFrame(rows, columns=["level", "claim", "answer", "what was seen"])
    table.loc[3, "what was seen"] += f"; right: {right[0].sum()} → {right[1].sum()}"
    row = int(np.argmax(tv))
    with np.errstate(divide="ignore"):
        pair = [torch.from_numpy(np.log(probs[row])) for probs in (law, output)]
    frame = distribution(*pair, tokenizer_decode=decode, k=10).assign(row=row)
    return Content(text=_told(table), table=table, frames={"distribution": frame})


def disturb(logits: np.ndarray, *, scale: float, noise: float, seed: int) -> np.ndarray:
    """`logits` · `scale` + `noise` · standard normal, in the logits' own dtype.

    >>> disturb(np.float32([1, 2]), scale=1.0, noise=0.0, seed=0).tolist()
    [1.0, 2.0]
    """
    scaled = logits * logits.dtype.type(scale)
    if noise == 0:
        return scaled  # adding 0 would turn -0 into 0, which are different bits
    normal = np.random.default_rng(seed).standard_normal(logits.shape)
    return (scaled + noise * normal).astype(logits.dtype)


def output_law(target_probs: np.ndarray, draft_probs: np.ndarray, *, rule: str) -> np.ndarray:
    """Law of the token that a draft rule emits: accepted mass + rejected share · law after it.

    Parameters
    ----------
    target_probs, draft_probs : [n, vocab_size], rows sum to 1.
    rule : one of RULES.

    Returns
    -------
    [n, vocab_size] probabilities, enumerated over every draft token.

    Source: Leviathan et al. 2023 (the correct rule); huggingface/transformers issue 32867 (the
    greedy draft judged by its softmax).

    >>> target, draft = np.array([[0.7, 0.2, 0.1]]), np.array([[0.2, 0.5, 0.3]])
    >>> output_law(target, draft, rule="correct residual").round(9).tolist()
    [[0.7, 0.2, 0.1]]
    >>> output_law(target, draft, rule="greedy, judged soft").round(9).tolist()
    [[0.6, 0.4, 0.0]]
    """
    if rule not in RULES:
        raise ValueError(f"`rule` must be one of {', '.join(RULES)}; got {rule!r}")
    if rule == "no draft":
        return target_probs
    kept = np.minimum(target_probs, draft_probs)  # what a sampled draft's acceptance lets through
    if rule == "greedy, judged soft":
        favourite = draft_probs == draft_probs.max(axis=1, keepdims=True)
        favourite &= favourite.cumsum(axis=1) == 1  # argmax: the first of equals
        kept = np.where(favourite, np.minimum(1.0, target_probs / draft_probs.max(1)[:, None]), 0.0)
    positive = np.maximum(target_probs - draft_probs, 0.0)
    mass = positive.sum(axis=1, keepdims=True)
    after = np.where(mass > 0, positive / np.where(mass > 0, mass, 1), target_probs)
    if rule == "resample from target":
        after = target_probs
    return kept + (1.0 - kept.sum(axis=1, keepdims=True)) * after


def _softmax(logits: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(logits).double(), -1).numpy()


def _law(tv: np.ndarray, law: np.ndarray, output: np.ndarray) -> tuple[str, str]:
    """The word of `check`: by the mean TV over prompts and its limits, the worst beside it."""
    worst, margin = float(tv.max()), MARGINS["2"]
    low, high = mean_limits(tv)
    word = "EQUIVALENT" if high <= margin else "DIFFERENT" if low > margin else "INCONCLUSIVE"
    word = "PROVEN" if worst <= 1e-9 else word
    unreachable = int(((output <= 0) & (law > 0)).any(axis=1).sum())
    lost = f"; after {unreachable} prompts some token never comes" if unreachable else ""
    return word, f"exact TV: mean {tv.mean():.2g}, worst {worst:.2g} (margin .01){lost}"


def _share(changed: int, n: int, margin: float, *, same: bool) -> tuple[str, str]:
    """Word and reason: is the share that changed within the margin, at one-sided 95 %?"""
    low, high = (share_interval(changed, n, alternative=side) for side in ("greater", "less"))
    low, high = low.low, high.high
    seen = f"{changed} of {n} change (share at most {high:.1%}, margin {margin:.0%})"
    if same:
        return "PROVEN", f"{changed} of {n} change: the logits are equal"
    if high <= margin or low > margin:
        return "EQUIVALENT" if high <= margin else "DIFFERENT", seen
    share, needed = changed / n, n_for_share(margin)  # if nothing ever changes
    if changed and share != margin:
        needed = max(needed, 2.71 * share * (1 - share) / (share - margin) ** 2)
    return "INCONCLUSIVE", f"{seen}; about {np.ceil(needed):,.0f} items needed"


def _told(table: pd.DataFrame) -> str:
    """Which claims are kept, broken and open, in one line."""
    word = table["answer"].map({"PROVEN": "kept", "EQUIVALENT": "kept", "DIFFERENT": "broken"})
    told = {
        state: "; ".join(table["level"][mask] + " " + table["claim"][mask])
        for state in ("kept", "broken", "open")
        if (mask := word.fillna("open") == state).any()
    }
    return ". ".join(f"{state.capitalize()}: {claims}" for state, claims in told.items()) + "."


def _check(logits: np.ndarray, draft_logits: np.ndarray, option_ids: np.ndarray) -> None:
    for name, array in (("logits", logits), ("draft_logits", draft_logits)):
        if array.dtype != np.float32 or array.shape != logits.shape or array.ndim != 2:
            rule = f"float32 [n, vocab_size], as `logits` {logits.shape}"
            raise ValueError(f"`{name}` must be {rule}; got {array.dtype} {array.shape}")
        for place in np.argwhere(~np.isfinite(array)).tolist():
            raise ValueError(f"`{name}` must be finite; it is {array[tuple(place)]} at {place}")
    if option_ids.ndim != 2 or len(option_ids) != len(logits):
        raise ValueError(f"`option_ids` must be [{len(logits)}, m]; got {option_ids.shape}")


def _draw(figure: Figure, content: Content, state: dict) -> None:
    if not figure.axes:
        figure.add_axes((0.17, 0.13, 0.8, 0.72))
    frame = content.frames["distribution"]
    plots.distribution_dots(frame, ax=figure.axes[0], n_tokens=10)
    how = "are equal" if content.table["answer"].iloc[2] == "PROVEN" else "differ most"
    place = f"after prompt {frame['row'].iloc[0]}, where the two laws {how}"
    figure.axes[0].set_xlabel(f"log-probability (nats) {place}")
    words = " · ".join(content.table["level"] + " " + content.table["answer"])
    figure.suptitle(words, fontsize=9, y=0.985)


def _reset(panel: Panel) -> None:
    for name, value in (("scale", 1.0), ("noise", 0.0), ("rule", RULES[0])):
        panel.controls[name].value = value
