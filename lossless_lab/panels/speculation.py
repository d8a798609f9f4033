"""The panel of notebook 05: a draft proposes, the target accepts; what comes out, and how fast.

Every law is exact: nothing is sampled and no model runs.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import ipywidgets
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from lossless_lab import plots
from lossless_lab.statistical.speculative import (
    RULES,
    Rule,
    emitted,
    expected_tokens,
    joint_tv_limits,
    processed,
)

from .base import Content, Panel, control

TOP_K = (1, 2, 3, 5, 10, 20, 50, "all")
_ROUNDING = 1e-11  # TV of a round that is none


def speculation(
    target_logits: np.ndarray,
    draft_logits: np.ndarray,
    *,
    rules: Mapping[str, Rule] = RULES,
    decode: Callable[[list[int]], str] = str,
    position: int = 0,
) -> Panel:
    """Panel with the sampler's settings, the draft's quality, γ and the rule; see `step`.

    Parameters
    ----------
    target_logits, draft_logits : [n, vocab_size] after each token of a text.
    rules : by name; the first is chosen at the start.
    decode : ids to text, for the labels of tokens.
    position : the place that is shown first.
    """
    share = {"min": 0.0, "max": 1.0, "step": 0.1, "readout_format": ".1f"}
    warmth = {"value": 1.0, "min": 0.1, "max": 2.0, "step": 0.1}
    slider, whole, menu = ipywidgets.FloatSlider, ipywidgets.IntSlider, ipywidgets.Dropdown
    chosen, made = ipywidgets.SelectionSlider, functools.partial(control, width=(110, 420))
    controls = {
        "position": made(whole, "position", value=position, max=len(target_logits) - 1),
        "temperature": made(slider, "temperature", **warmth),
        "top_k": made(chosen, "top-k", options=TOP_K, value="all"),
        "top_p": made(slider, "top-p", value=1.0, **share | {"min": 0.1}),
        "quality": made(slider, "draft quality", value=0.5, **share),
        "gamma": made(whole, "γ", value=4, min=1, max=8),
        "rule": made(menu, "rule", options=list(rules)),
    }
    return Panel(
        controls=controls,
        compute=functools.partial(step, target_logits, draft_logits, rules=rules, decode=decode),
        draw=_draw,
        figure=Figure(figsize=(9.6, 3.9), dpi=100),
    )


def step(
    target_logits: np.ndarray,
    draft_logits: np.ndarray,
    *,
    position: int,
    temperature: float = 1.0,
    top_k: int | str = "all",
    top_p: float = 1.0,
    quality: float = 0.5,
    gamma: int = 4,
    rule: str = "standard",
    rules: Mapping[str, Rule] = RULES,
    decode: Callable[[list[int]], str] = str,
) -> Content:
    """What a rule emits at one position and jointly from there on, and how many tokens a step.

    Parameters
    ----------
    position : row of the logits; the γ rows after it are the laws of the later tokens, as if these
        did not depend on what is drawn. Where the text ends, the last ones come again.
    quality : of the draft's law: 0 is all tokens alike, 0.5 the draft's own, 1 the target's.
    """
    settings = {"temperature": temperature, "top_p": top_p}
    settings["top_k"] = 0 if top_k == "all" else top_k
    rows = np.resize(np.arange(len(target_logits))[position : position + gamma + 1], gamma + 1)
    before = target_logits[[max(position - 1, 0)]]
    draft = _mixed(target_logits[rows], draft_logits[rows], quality)
    at = processed(target_logits[rows], draft, **settings)
    earlier = processed(before, before, **settings).target_probs, at.target_probs[:-1]
    at, chosen = replace(at, previous_probs=np.concatenate(earlier)), rules[rule]
    kept, replaced = parts = emitted(at, chosen)
    p, q, output = at.target_probs[0], at.draft_probs[0], kept[0] + replaced[0]
    alphas, has_bonus = kept[:-1].sum(-1), chosen.roles(at).bonus is not None
    tokens = expected_tokens(alphas if has_bonus else alphas[:-1])
    tv, jointly = np.abs(output - p).sum() / 2, joint_tv_limits(at, chosen, parts)
    with np.errstate(divide="ignore"):
        logs = {"reference_logprob": np.log(p), "candidate_logprob": np.log(output.clip(0))}
    token = [decode([i]) for i in range(len(p))]
    return Content(
        text=f"Accepted: {alphas[0]:.1%} of proposals here; "
        f"{tokens:.2f} tokens per step of the target (at most {gamma + has_bonus}).\n"
        f"Output: {_judged(tv)}; next {gamma + 1} tokens jointly: {_judged(*jointly)}.",
        frames={
            "laws": pd.DataFrame({"token": token, "target_prob": p, "draft_prob": q, **logs}),
        },
    )


def _mixed(target_logits: np.ndarray, draft_logits: np.ndarray, quality: float) -> torch.Tensor:
    """The draft's law on the way from no knowledge (0) over its own (0.5) to the target's (1)."""
    target, draft = (torch.as_tensor(x).double().softmax(-1) for x in (target_logits, draft_logits))
    alike = torch.full_like(draft, 1 / draft.shape[-1])
    other, share = (target, 2 * quality - 1) if quality > 0.5 else (alike, 1 - 2 * quality)
    return ((1 - share) * draft + share * other).log()


def _judged(least: float, most: float | None = None) -> str:
    """What one TV says, or two limits of one."""
    if (most or least) <= _ROUNDING:
        return "exactly the target's law, TV 0"
    limits = dict.fromkeys(f"{tv:.3g}" for tv in (least, most) if tv is not None)
    return f"NOT the target's law, TV {' to '.join(limits)}"


def _draw(figure: Figure, content: Content, state: dict) -> None:
    if not figure.axes:
        figure.subplots(1, 2)
        figure.subplots_adjust(left=0.11, right=0.985, bottom=0.13, top=0.82, wspace=0.3)
    picture, output = figure.axes
    plots.acceptance_picture(content.frames["laws"], ax=picture)
    plots.distribution_dots(content.frames["laws"], ax=output, n_tokens=10)
    output.set_xlabel("log-probability (nats): target = reference, output = candidate")
