"""Charts of number formats: cost against bits, sensitive matrices, and the tail of a cost."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from .artists import chart, line
from .theme import COLOURS


@chart("format", "bits_per_weight", "mean_kl_nats", anew="collections")
def format_ladder(
    frame: pd.DataFrame, *, ax: Axes | None = None, floors: Mapping[str, float] | None = None
) -> Axes:
    """Mean KL to the reference of each format, a row each, most bits first, then least cost.

    Parameters
    ----------
    frame : format, bits_per_weight, mean_kl_nats; low and high, where present, as whiskers; a
        column chosen (bool) marks one format.
    floors : name -> mean KL of what is harmless, a line each; a "<" at the edge if far below.
    """
    frame = frame.round({"bits_per_weight": 2})  # as is written
    frame = frame.sort_values(["bits_per_weight", "mean_kl_nats"], ascending=[False, True])
    x, y = frame["mean_kl_nats"].to_numpy(dtype=float), np.arange(len(frame))
    ax.set_xscale("log")
    if {"low", "high"} <= set(frame):
        ax.hlines(y, frame["low"], frame["high"], color=COLOURS["guide"], linewidth=2)
    left, right = 0.3 * np.min(x[x > 0], initial=1.0), 3 * max(x.max(), 1e-9)
    left = min([left, *(v / 2 for v in (floors or {}).values() if v > left / 30)])
    for i, (name, value) in enumerate((floors or {}).items()):
        off = value <= left
        label = f"{name} {value:.1g}" + (" (off scale)" if off else "")
        look = {"color": COLOURS["guide"], "label": label, "clip_on": value > left}
        look |= {"linestyle": "" if off else ("-", "--", ":")[i % 3], "marker": "<" if off else ""}
        ends = [len(y) - 0.7 - 0.3 * i] if off else [-0.6, len(y) - 0.4]
        line(ax, name, [left if off else value] * len(ends), ends, **look)
    look = {"linestyle": "", "color": COLOURS["candidate"], "clip_on": False}
    line(ax, "formats", x[x > 0], y[x > 0], marker="o", label="_formats", **look)
    zero = np.full(sum(x == 0), left)
    line(ax, "zeros", zero, y[x == 0], marker="<", label="0" if len(zero) else "_0", **look)
    x = np.maximum(x, left)
    if "chosen" in frame:
        ring = frame["chosen"].to_numpy()
        look = {"marker": "o", "linestyle": "", "markersize": 11, "markerfacecolor": "none"}
        line(ax, "chosen", x[ring], y[ring], color="black", label="_chosen", **look)
    rows = zip(frame["format"], frame["bits_per_weight"], strict=True)
    ax.set_yticks(
        y, [name if np.isnan(bits) else f"{name}, {bits:.3g} bits" for name, bits in rows]
    )
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(left, right), ylim=(len(y) - 0.4, -0.6))
    ax.set_xlabel("mean KL(reference‖candidate) (nats, log scale)")


@chart("layer", "module", "mean_kl_nats")
def sensitivity_map(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Mean KL when one matrix alone is quantised: a row for each module, a column for each layer.

    Parameters
    ----------
    frame : layer, module, mean_kl_nats.
    """
    table = frame.pivot(index="module", columns="layer", values="mean_kl_nats")
    table = table.loc[list(dict.fromkeys(frame["module"]))]
    values = np.log10(table.to_numpy(dtype=float))
    ax.clear()
    picture = ax.imshow(values, cmap="cividis", aspect="auto")
    ax.set_xticks(range(table.shape[1]), table.columns)
    ax.set_yticks(range(len(table)), table.index)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.set(xlabel="layer")
    bar = ax.figure.colorbar(picture, ax=ax)
    bar.set_label("log10 of mean KL (nats)")


@chart("candidate", "kl_reference_candidate_nats", ncols=1, fontsize="x-small")
def kl_tail(
    frame: pd.DataFrame,
    *,
    ax: Axes | None = None,
    quantity: str = "kl_reference_candidate_nats",
    label: str = "KL at a position (nats, log scale)",
    smallest: float = 1e-12,
) -> Axes:
    """Share of positions whose KL is at least so large, a curve for each candidate, both log.

    Parameters
    ----------
    frame : one row per position: candidate, kl_reference_candidate_nats.
    quantity, label : another column in its place, and its axis.
    smallest : what is less, or negative, is drawn here; the mean in the legend is of all as it is.
    """
    for name, rows in frame.groupby("candidate", sort=False):
        kl = np.sort(rows[quantity].to_numpy(dtype=float))[::-1]
        share = np.arange(1, len(kl) + 1) / len(kl)
        curve = line(ax, str(name), np.maximum(kl, smallest), share, drawstyle="steps-post")
        curve.set_label(f"{name} (mean {kl.mean():.2g})")
    ax.set(xscale="log", yscale="log", ylim=(0.5 / len(kl), 1.3))
    ax.relim()
    ax.autoscale_view(scaley=False)
    ax.set(xlabel=label)
    ax.set_ylabel("share of positions with\nat least that (log scale)")


@chart("kind", "kl_reference_candidate_nats", "flip", ncols=3)
def flips_against_kl(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Share of flipped top tokens against mean KL, a dot for each document, a colour for each kind.

    Parameters
    ----------
    frame : one row per document: kind, kl_reference_candidate_nats and flip, both means.
    """
    for name, rows in frame.groupby("kind", sort=False):
        x, y = rows["kl_reference_candidate_nats"], 100 * rows["flip"]
        line(ax, str(name), x, y, marker="o", markersize=3, linestyle="", label=str(name))
    ax.set(xscale="log", xlabel="mean KL of a document (nats, log scale)")
    ax.set_ylabel("top token differs\n(% of its tokens)")


def cost_curves(
    frame: pd.DataFrame, *, x: str, y: str, labels: tuple[str, str], ax: Axes | None = None
) -> Axes:
    """A curve for each candidate of a column `y` over a column `x`; log where it spans decades.

    Parameters
    ----------
    frame : candidate, and the columns named by `x` and `y`.
    labels : of both axes, with their units.
    """

    @chart("candidate", x, y)
    def draw(frame: pd.DataFrame, *, ax: Axes) -> None:
        for name, rows in frame.groupby("candidate", sort=False):
            line(ax, str(name), rows[x], rows[y], marker="o", markersize=4, label=str(name))
        ticks = sorted(set(frame[x]))
        for axis, values, label in zip("xy", (frame[x], frame[y]), labels, strict=True):
            wide = bool(0 < 5 * values.min() <= values.max())
            ax.set(**{f"{axis}scale": "log" if wide else "linear"})
            ax.set(**{f"{axis}label": label + ", log scale" * wide})
        ax.set_ylim(bottom=None if wide else 0)  # of y, which came last
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.xaxis.set_minor_locator(NullLocator())

    return draw(frame, ax=ax)
