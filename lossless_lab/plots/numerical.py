"""Charts of level 1 beyond drift: stages, the triangle with float64, ULP, local error, survival."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from .artists import band, bars, chart, fit_log_axis, line, logarithmic
from .theme import COLOURS

_RIGHT = {"loc": "lower right", "bbox_to_anchor": (1, 1)}


@chart("stage", "logit_rms", "eager_error", "compiled_error", anew="texts", **_RIGHT)
def drift_by_stage(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Error to float64 after each stage of compilation, beside that of eager code.

    Parameters
    ----------
    frame : as from `compile_drift`: stage, eager_error, compiled_error (RMS of logits), logit_rms.
    """
    places = np.arange(len(frame))[::-1]
    width = frame["compiled_error"].to_numpy(dtype=float)
    bars(ax, "stages", places, width, 0.0, height=0.6, color=COLOURS["candidate"])
    eager = float(frame["eager_error"].iloc[0])
    look = {"color": COLOURS["reference"], "linewidth": 1.4, "label": "eager"}
    line(ax, "eager", [eager, eager], [-0.6, len(frame) - 0.4], **look)
    ax.set_yticks(places, frame["stage"])
    ax.set(xlabel="RMS error to float64 (logits)", xlim=(0, 1.35 * max(eager, *width)))
    ax.tick_params(axis="y", length=0)
    for y, x, moved in zip(places, width, frame["logit_rms"], strict=True):
        said = " = eager, bit by bit" if moved == 0 else f" ≤ {moved:.2g} from eager"
        ax.text(max(x, eager), y, said, va="center", fontsize="x-small")


_SIDES = ("reference", "float64"), ("candidate", "float64"), ("reference", "candidate")


@chart("side", "rms", anew="texts")
def error_triangle(
    frame: pd.DataFrame,
    *,
    ax: Axes | None = None,
    names: tuple[str, str] = ("reference", "candidate"),
) -> Axes:
    """Reference, candidate and float64 as a triangle whose sides are RMS distances, to scale.

    The RMS over the same logits is a Euclidean distance, so three of them fit in a plane.

    Parameters
    ----------
    frame : rows "reference–float64", "candidate–float64", "reference–candidate" in `side`, with
        `rms` in logits.
    names : what the corners of reference and candidate are called.
    """
    sides = frame.set_index("side")["rms"].astype(float)
    a, b, c = (sides["–".join(ends)] for ends in _SIDES)
    along = (a * a - b * b + c * c) / (2 * c) if c else 0.0
    top = (along, np.sqrt(max(a * a - along * along, 0.0)))
    corners = {"reference": (0.0, 0.0), "candidate": (c, 0.0), "float64": top}
    x, y = zip(*corners.values(), strict=True)
    outline = {"color": COLOURS["guide"], "linewidth": 1.2, "zorder": 1}
    line(ax, "outline", [*x, x[0]], [*y, y[0]], **outline)
    look = {"ha": "center", "fontsize": "small"}
    for name, place, said in zip(corners, corners.values(), (*names, "float64"), strict=True):
        colour = COLOURS.get(name, "black")
        line(ax, name, place[:1], place[1:], marker="o", linestyle="", color=colour)
        shift = (0, 7 if name == "float64" else -12)
        ax.annotate(said, place, shift, textcoords="offset points", **look)
    look |= {"va": "center", "bbox": {"fc": "white", "ec": "none", "pad": 1}}
    for first, second in _SIDES:
        middle = np.mean([corners[first], corners[second]], axis=0)
        ax.text(*middle, f"{sides[f'{first}–{second}']:.3g}", **look)
    ax.set_title("RMS distances (logits)", fontsize="small")
    ax.set_aspect("equal", adjustable="datalim")
    ax.margins(0.25)
    ax.set_axis_off()


@chart("bin", "share", "near_zero", "count", anew="containers", above=False, loc="upper right")
def ulp_bars(frame: pd.DataFrame, *, ax: Axes | None = None, dtype: str = "") -> Axes:
    """Share of elements by their distance in rounding steps.

    Parameters
    ----------
    frame : as from `ulp_histogram`; of each bar the part near zero, where steps mean little, is
        drawn pale. The last 1 % of the elements share one bar.
    dtype : whose rounding steps; named on the axis.
    """
    total = frame["count"].sum()
    frame = _folded(frame)
    small = (frame["near_zero"] / total).to_numpy(dtype=float)
    large = frame["share"].to_numpy(dtype=float) - small
    places = np.arange(len(frame))
    ax.bar(places, large, color=COLOURS["candidate"], label="value")
    ax.bar(places, small, bottom=large, color=COLOURS["floor"], label="value near 0")
    ax.set_xticks(places, frame["bin"], rotation=35, ha="right", fontsize="x-small")
    ax.set(xlabel=f"distance, rounding steps of {dtype}" if dtype else "distance, rounding steps")
    ax.set_ylabel("share of elements")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.relim()
    ax.autoscale_view()


def _folded(frame: pd.DataFrame) -> pd.DataFrame:
    """The far tail as one bin, so that the axis belongs to what is common."""
    steps = frame[frame["bin"] != "NaN"]
    beyond = steps["share"].cumsum().shift(fill_value=0.0) >= 0.99
    tail = steps[beyond]
    if len(tail) < 2:
        return frame
    sums = tail[["count", "share", "near_zero"]].sum()
    last = {**tail.iloc[0].to_dict(), "bin": f"≥ {tail['ulp_min'].iloc[0]:.0f}", **sums}
    return pd.concat([steps[~beyond], pd.DataFrame([last]), frame[frame["bin"] == "NaN"]])


@chart("layer", "local_relative_rms", "accumulated_relative_rms")
def local_error(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Error that each layer makes itself beside the error accumulated up to it.

    Parameters
    ----------
    frame : as from `numerical.attribution.local_error`.
    """
    series = (
        ("local_relative_rms", "made in the layer", "candidate", "o"),
        ("accumulated_relative_rms", "accumulated", "reference", "s"),
    )
    for column, label, colour, marker in series:
        look = {"marker": marker, "label": label, "color": COLOURS[colour]}
        logarithmic(ax, label, frame["layer"], frame[column], **look)
    fit_log_axis(ax)
    ax.set(xlabel="layer", ylabel="relative RMS difference\n(ratio, log scale)")


@chart("n_tokens", "expected_share", "low", "high", above=False, loc="lower left")
def survival(
    frame: pd.DataFrame, *, ax: Axes | None = None, observed: pd.Series | None = None
) -> Axes:
    """Share of prompts still equal after each token: predicted with its band, and observed.

    Parameters
    ----------
    frame : as from `FlipRisk.survival`.
    observed : share of prompts still equal after each of `n_tokens`.
    """
    look = {"color": COLOURS["floor"], "alpha": 0.6, "linewidth": 0, "label": "95 % band"}
    band(ax, "band", frame["n_tokens"], frame["low"], frame["high"], step="post", **look)
    look = {"color": COLOURS["reference"], "label": "predicted from noise"}
    line(ax, "predicted", frame["n_tokens"], frame["expected_share"], **look)
    if observed is not None:
        look = {"color": COLOURS["candidate"], "label": "observed", "drawstyle": "steps-post"}
        line(ax, "observed", frame["n_tokens"], observed, **look)
    ax.set(xlabel="new tokens", ylabel="prompts still identical", ylim=(0, 1.02))
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


@chart("margin", "change", "flipped", above=False, loc="lower right", fontsize="x-small")
def flips(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Change of the top-2 difference against the margin: below the diagonal the token flips.

    Parameters
    ----------
    frame : one row per position: margin (top-2 logit difference of the reference), change (what
        the candidate adds to it), flipped.
    """
    for name, flag, look in (
        ("kept", False, {"color": COLOURS["reference"], "marker": ".", "alpha": 0.35}),
        ("flipped", True, {"color": COLOURS["candidate"], "marker": "x"}),
    ):
        rows = frame[frame["flipped"] == flag]
        label = f"{name} ({len(rows)})"
        line(ax, name, rows["margin"], rows["change"], linestyle="", **look).set_label(label)
    edge = 1.15 * max(float(frame["change"].abs().max()), 1e-12)
    look = {"color": COLOURS["guide"], "linewidth": 1, "label": "change = −margin"}
    line(ax, "diagonal", [0, edge], [0, -edge], **look)
    ax.set(xlim=(0, 2.5 * edge), ylim=(-edge, edge))
    ax.set(xlabel="margin of the top token (logits)", ylabel="change of that margin\n(logits)")
