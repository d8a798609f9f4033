"""Charts of task quality: what n items can show, and what a candidate changed by category."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from .artists import chart, line
from .theme import COLOURS


@chart("rule", "n_items", "margin_points", above=False)
def margin_by_items(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """The smallest loss that n items can rule out, a curve for each rule, both log.

    Parameters
    ----------
    frame : rule, n_items, margin_points.
    """
    for i, (name, rows) in enumerate(frame.groupby("rule", sort=False)):
        look = {"label": name, "linestyle": ("-", "--", "-.", ":")[i % 4]}
        line(ax, name, rows["n_items"], rows["margin_points"], **look)
    ax.set(xscale="log", yscale="log", xlabel="items (log scale)")
    ax.set_ylabel("loss ruled out (points, log scale)")


@chart("candidate", "category", "estimate", "low", "high", anew="collections", ncols=3)
def task_changes(
    frame: pd.DataFrame,
    *,
    ax: Axes | None = None,
    unit: str = "points",
    margin: float | None = None,
) -> Axes:
    """What each candidate changed in each category, with limits; a row per category.

    Parameters
    ----------
    frame : candidate, category, estimate, low, high; limits of NaN are left out.
    unit : of the three.
    margin : a line at −margin, what may be lost.
    """
    categories = list(dict.fromkeys(frame["category"]))
    names = list(dict.fromkeys(frame["candidate"]))
    for i, name in enumerate(names):
        rows = frame[frame["candidate"] == name]
        y = rows["category"].map(categories.index) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
        look = {"marker": "os^Dv"[i % 5], "linestyle": "", "label": name}
        drawn = line(ax, name, rows["estimate"], y, **look)
        ax.hlines(y, rows["low"], rows["high"], color=drawn.get_color(), linewidth=1.5)
    guides = {"no change": 0.0} | ({} if margin is None else {f"−{margin:g} {unit}": -margin})
    for label, x in guides.items():
        look = {"color": COLOURS["guide"], "linestyle": "-" if x == 0 else ":", "label": label}
        line(ax, label, [x, x], [-0.6, len(categories) - 0.4], **look)
    ax.set_yticks(np.arange(len(categories)), categories)
    ax.tick_params(axis="y", length=0)
    ax.set(ylim=(len(categories) - 0.4, -0.6), xlabel=f"candidate − reference ({unit})")
