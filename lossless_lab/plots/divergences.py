"""Charts of laws: divergence along the text and by prompt, where outputs part, one position."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from .artists import chart, fit_log_axis, line, logarithmic
from .labels import token_label
from .theme import COLOURS

_SHORT = {
    "kl_reference_candidate_nats": "KL(ref‖cand)",
    "kl_candidate_reference_nats": "KL(cand‖ref)",
    "total_variation": "TV",
}
_LONG = {
    "kl_reference_candidate_nats": "KL(reference‖candidate) (nats",
    "kl_candidate_reference_nats": "KL(candidate‖reference) (nats",
    "total_variation": "total variation (probability",
}


@chart("position", "top1_agree", *_SHORT)
def divergence_by_position(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """KL in both directions (nats) and total variation (probability) at each position.

    Parameters
    ----------
    frame : columns `position`, `kl_reference_candidate_nats`, `kl_candidate_reference_nats`,
        `total_variation`, `top1_agree`; several prompts (`prompt_id`) are averaged, and one that
        is infinite or NaN makes its position so.
    ax : axes to draw on; a second call moves what was drawn before.

    Returns
    -------
    Axes with a log scale and a tick on the lower edge wherever the likeliest token differs.
    """
    by_position = frame[["position", *_SHORT]].fillna(np.inf).groupby("position").mean()
    for quantity, label in _SHORT.items():
        look = {"color": COLOURS[quantity], "label": label}
        look["linestyle"] = "--" if quantity.startswith("kl_candidate") else "-"
        logarithmic(ax, quantity, by_position.index, by_position[quantity], **look)
    flips = frame.loc[~frame["top1_agree"].astype(bool), "position"].unique()
    look = {"color": "black", "marker": "|", "markersize": 5, "linestyle": ""}
    at_edge = {"transform": ax.get_xaxis_transform()}
    ticks = line(ax, "flips", flips, np.full(len(flips), 0.03), **at_edge, **look)
    ticks.set_label("top token differs" if len(flips) else "_none")
    fit_log_axis(ax)
    n_prompts = frame["prompt_id"].nunique() if "prompt_id" in frame else 1
    averaged = f", mean of {n_prompts} prompts" if n_prompts > 1 else ""
    ax.set_xlabel(f"position (tokens){averaged}")
    ax.set_ylabel("KL (nats), TV (probability)\nlog scale")


@chart("prompt_id")
def divergence_by_prompt(
    frame: pd.DataFrame, *, ax: Axes | None = None, quantity: str = "total_variation"
) -> Axes:
    """Mean and maximum over positions of one divergence, a row a prompt, sorted by the mean.

    Parameters
    ----------
    frame : columns `prompt_id` and `quantity`, a row a position.
    ax : axes to draw on; a second call moves what was drawn before.
    quantity : "total_variation" (probability) or a KL (nats).

    Returns
    -------
    Axes with a log scale along x; zeros sit on its left edge, infinite and NaN on its right.
    """
    if quantity not in _LONG or quantity not in frame:
        raise ValueError(f"`quantity` must be a column among {', '.join(_LONG)}; got {quantity!r}")
    values = frame[quantity].fillna(np.inf).groupby(frame["prompt_id"])
    rows = values.agg(mean="mean", maximum="max").sort_values("mean", kind="stable")
    positive = (np.isfinite(rows) & (rows > 0)).to_numpy()
    left = np.min(rows.to_numpy(), initial=1.0, where=positive) / 2
    right = np.max(rows.to_numpy(), initial=left, where=positive) * 2
    shown = rows.fillna(np.inf).clip(left, right)
    y = np.arange(len(rows))
    for name, marker in (("mean", "o"), ("maximum", "|")):
        look = {"color": COLOURS[quantity], "marker": marker, "markersize": 4, "linestyle": ""}
        line(ax, name, shown[name], y, label=name, **look)
    edges = "; left edge: 0" if (rows <= 0).any(axis=None) else ""
    edges += "" if np.isfinite(rows).all(axis=None) else "; right edge: infinite or NaN"
    ax.set(xscale="log", xlim=(left / 1.2, right * 1.2), ylim=(-0.6, len(y) - 0.4))
    ax.set_xlabel(f"{_LONG[quantity]}, log scale{edges})")
    _row_labels(ax, y, rows.index)


def _row_labels(ax: Axes, y: np.ndarray, names) -> None:
    height = ax.figure.get_figheight() * 72 * ax.get_position().height
    if height / len(y) > 7:  # points: room for a line of text in each row
        ax.set_yticks(y, [token_label(str(name), width=18) for name in names])
    else:
        ax.set_yticks([])
        ax.set_ylabel(f"{len(y)} prompts, sorted by mean")


@chart("n_reference", "n_candidate", "ids_equal", "first_divergence", above=False, loc="lower left")
def first_divergence(
    frame: pd.DataFrame, *, ax: Axes | None = None, label: str = "candidate"
) -> Axes:
    """Share of outputs whose first t tokens are identical, against t.

    Parameters
    ----------
    frame : columns `n_reference`, `n_candidate` (tokens), `ids_equal`, `first_divergence` (index,
        NA where none); a column `candidate` gives a curve to each name.
    ax : axes to draw on; a second call with another `label` adds a curve.
    label : name of the series where the frame has no `candidate` column.

    Returns
    -------
    Axes; an output that ended identically counts as identical at every later t.
    """
    groups = frame.groupby("candidate", sort=False) if "candidate" in frame else [(label, frame)]
    for name, rows in groups:
        lengths = rows[["n_reference", "n_candidate"]].to_numpy()
        first = rows["first_divergence"].to_numpy(dtype=float, na_value=np.nan)
        first = np.where(np.isnan(first), lengths.min(axis=1), first)  # one is the other's start
        first = np.where(rows["ids_equal"].astype(bool), np.inf, first)
        t = np.arange(lengths.max() + 1)
        share = 100 * (first >= t[:, None]).mean(axis=1)
        look = {"color": COLOURS[name]} if name in COLOURS else {}
        curve = line(ax, str(name), t, share, drawstyle="steps-post", **look)
        kept = f"{np.isinf(first).sum()} of {len(rows)} identical"
        curve.set_label(f"{token_label(str(name), width=24)}: {kept}")
    ax.relim()
    ax.autoscale_view(scaley=False)
    ax.set(ylim=(0, 104), xlabel="t (output tokens)")
    ax.set_ylabel("outputs with the first\nt tokens identical (%)")


_LAW = ("token", "reference_logprob", "candidate_logprob")


@chart(*_LAW)
def distribution_dots(frame: pd.DataFrame, *, ax: Axes | None = None, n_tokens: int = 12) -> Axes:
    """Logprobs of the likeliest tokens: a dot for the reference inside a ring for the candidate.

    Parameters
    ----------
    frame : columns `token` (text), `reference_logprob`, `candidate_logprob` (nats).
    ax : axes to draw on; a second call moves the dots drawn before.
    n_tokens : number of tokens to show, those likeliest under either law.

    Returns
    -------
    Axes; a dot in the middle of its ring is an equal probability, a token that lacks one of them
    has probability 0 there.
    """
    likeliest = frame[list(_LAW[1:])].max(axis=1).sort_values(ascending=False, kind="stable")
    frame = frame.loc[likeliest.index[:n_tokens]]
    values = frame[list(_LAW[1:])].to_numpy(dtype=float)
    for row, side in np.argwhere(np.isnan(values)):
        token = frame["token"].iloc[row]
        raise ValueError(f"`{_LAW[1 + side]}` must be a number; it is NaN for token {token!r}")
    finite = np.isfinite(values)
    y = np.arange(len(frame))
    rings = {"markersize": 8, "markerfacecolor": "none", "markeredgewidth": 1.4}
    for side, (name, look) in enumerate({"reference": {}, "candidate": rings}.items()):
        x = np.where(finite[:, side], values[:, side], np.nan)
        line(ax, name, x, y, color=COLOURS[name], marker="o", linestyle="", label=name, **look)
    ax.set_yticks(y, [token_label(str(token)) for token in frame["token"]])
    ax.tick_params(axis="y", length=0)
    left = np.floor(np.min(values, initial=0.0, where=finite) * 1.05 - 0.2)
    right = max(np.ceil(np.max(values, initial=-np.inf)), left + 1)
    ax.set(xlim=(left, right + 0.03 * (right - left)), ylim=(len(frame) - 0.4, -0.6))
    ax.set_xlabel("log-probability (nats)")
