"""Charts of level 1 by layer: how far the residual stream has drifted."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from .artists import band, chart, fit_log_axis, logarithmic
from .theme import COLOURS


@chart("layer", "module", "relative_rms")
def layer_drift(
    frame: pd.DataFrame,
    *,
    ax: Axes | None = None,
    label: str = "candidate",
    linestyle: str = "-",
) -> Axes:
    """Relative RMS difference of the residual stream after each block, and of the logits.

    Parameters
    ----------
    frame : columns `layer` (0 is the embedding), `module` ("residual" or "logits"),
        `relative_rms` (ratio); `floor_relative_rms`, where present, is shaded as the noise floor.
    ax : axes to draw on; a second call with the same `label` moves the line it drew before.
    label : name of the series in the legend.
    linestyle : of its line; dashes let a line be seen that lies on another.

    Returns
    -------
    Axes with a log scale; zeros are marked on its lower edge, NaN and inf on its upper.
    """
    residual = frame[frame["module"] == "residual"].sort_values("layer")
    logits = frame[frame["module"] == "logits"]
    look = {"color": COLOURS[label]} if label in COLOURS else {}
    x, y = residual["layer"], residual["relative_rms"]
    drawn = logarithmic(ax, label, x, y, marker="o", linestyle=linestyle, label=label, **look)
    look = {"color": drawn.get_color(), "marker": "s", "markersize": 4.5, "linestyle": ""}
    x, y = logits["layer"], logits["relative_rms"]
    logarithmic(ax, f"{label} logits", x, y, label="_logits", **look)
    fit_log_axis(ax)
    if "floor_relative_rms" in frame:
        _floor(ax, frame.sort_values("layer"))
    _layer_ticks(ax, residual["layer"].to_numpy(), logits["layer"].to_numpy())
    ax.set(xlabel="layer (residual stream after the block)")
    ax.set_ylabel("relative RMS difference\n(ratio, log scale)")


def _floor(ax: Axes, frame: pd.DataFrame) -> None:
    floor = frame["floor_relative_rms"].to_numpy(dtype=float)
    lowest = np.min(floor, initial=np.inf, where=floor > 0)
    if lowest < 3 * ax.get_ylim()[0]:
        ax.set_ylim(bottom=10 ** np.floor(np.log10(lowest / 3)))
    look = {"color": COLOURS["floor"], "alpha": 0.45, "linewidth": 0, "zorder": 0.5}
    band(ax, "floor", frame["layer"], ax.get_ylim()[0], floor, label="noise floor", **look)


def _layer_ticks(ax: Axes, layers: np.ndarray, logits: np.ndarray) -> None:
    step = max(1, int(np.ceil(len(layers) / 7)))
    ticks = [t for t in layers[::step] if step == 1 or (logits - t > 0.6 * step).all()]
    names = ["emb." if t == 0 else str(t) for t in ticks]
    ax.set_xticks([*ticks, *logits], [*names, *["logits"] * len(logits)])
