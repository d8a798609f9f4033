"""Charts of speculative decoding: what is accepted, how draws near their law, who sees a fault."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from .artists import band, bars, chart, line
from .labels import token_label
from .theme import COLOURS


@chart("token", "target_prob", "draft_prob", ncols=1, fontsize="small")
def acceptance_picture(frame: pd.DataFrame, *, ax: Axes | None = None, n_tokens: int = 10) -> Axes:
    """The smaller of two laws, and on which side each token has more: residual, or rejected.

    Parameters
    ----------
    frame : columns `token` (text), `target_prob`, `draft_prob`; those likeliest under either are
        drawn.
    """
    laws = frame[["target_prob", "draft_prob"]]
    likeliest = laws.max(axis=1).sort_values(ascending=False, kind="stable").index[:n_tokens]
    p, q = laws.loc[likeliest].to_numpy(dtype=float).T
    y = np.arange(len(p))
    parts = {
        "residual: the target's excess, drawn after a rejection": (p, "reference"),
        "rejected: the draft's excess": (np.where(q > p, q, 0), "candidate"),
        "accepted: the smaller of the two": (np.minimum(p, q), "total_variation"),
    }
    for label, (width, colour) in parts.items():
        bars(ax, label, y, width, 0.0, label=label, color=COLOURS[colour], height=0.75)
    ax.set_yticks(y, [token_label(str(token)) for token in frame.loc[likeliest, "token"]])
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, 1.05 * max(p.max(), q.max())), ylim=(len(p) - 0.4, -0.6))
    ax.set_xlabel("probability")


@chart("sampler", "n", "total_variation", above=False, loc="lower left", fontsize="x-small")
def convergence(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Empirical TV against the number of draws, both log, a line for each sampler.

    Parameters
    ----------
    frame : sampler, n, total_variation; null_low and null_high, where present, are the band that
        draws from the law itself keep to; exact, where present, is where a line must end.
    """
    if {"null_low", "null_high"} <= set(frame):
        null = frame.drop_duplicates("n").sort_values("n")
        look = {"color": COLOURS["floor"], "alpha": 0.6, "linewidth": 0}
        band(ax, "null", null["n"], null["null_low"], null["null_high"], **look)
        ax.fill_between([], [], label="draws from the law itself, 95 %", **look)
    for name, rows in frame.groupby("sampler", sort=False):
        drawn = line(ax, str(name), rows["n"], rows["total_variation"], marker=".", label=str(name))
        exact = rows["exact"].iloc[0] if "exact" in rows else 0
        if exact > 0:
            look = {"color": drawn.get_color(), "linestyle": ":", "label": f"exact TV: {name}"}
            line(ax, f"{name}: exact", [rows["n"].min(), rows["n"].max()], [exact] * 2, **look)
    ax.set(xscale="log", yscale="log", xlabel="draws (log scale)")
    ax.set_ylabel("empirical total variation\nto the target (log scale)")


@chart("instrument", "total_variation", "power", ncols=1, fontsize="x-small")
def power_curves(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Share of broken samplers that each instrument finds, against their exact TV (log scale).

    Parameters
    ----------
    frame : instrument, total_variation, power.
    """
    for name, rows in frame.groupby("instrument", sort=False):
        rows = rows.sort_values("total_variation")
        line(ax, str(name), rows["total_variation"], rows["power"], marker=".", label=str(name))
    look = {"color": COLOURS["guide"], "linewidth": 0.8, "linestyle": ":", "label": "_80"}
    line(ax, "80 %", [0, 1], [0.8, 0.8], transform=ax.transAxes, **look)
    ax.set(xscale="log", ylim=(0, 1), xlabel="exact total variation (log scale)")
    ax.set_ylabel("share found")
