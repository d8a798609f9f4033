"""The panel of notebook 03: one module of one layer, its error in steps, and who is nearer."""

from collections.abc import Mapping
from typing import Any

import ipywidgets
import pandas as pd
from matplotlib.figure import Figure

from lossless_lab import plots
from lossless_lab.numerical.tensors import tensor_difference
from lossless_lab.numerical.ulps import ulp_histogram
from lossless_lab.plots.artists import legend, logarithmic, mark

from .base import Content, Panel, control, offer


def layer_difference(source: Any) -> Panel:
    """Panel that chooses candidate (dtype or compilation), prompt, layer and module.

    It opens where the drift of the first candidate leaves the noise, if it does.

    Parameters
    ----------
    source : pipeline.Inspection, or what has the same `candidates`, `rows`, `drift`, `tensors`,
        `first_above` and `refereed`, and keeps its answers.

    Raises
    ------
    ValueError
        Where the source has no candidates.
    """
    if not source.candidates:
        raise ValueError("`source` must have at least one candidate; it has none")
    places = next(iter(source.candidates)), next(iter(source.rows))
    layer, module = source.first_above(*places) or (0, "residual")
    menu, slider = ipywidgets.Dropdown, ipywidgets.IntSlider
    at = {"value": layer, "max": layer, "continuous_update": False}
    controls = {
        "candidate": control(menu, "candidate", options=list(source.candidates)),
        "prompt": control(menu, "prompt", options=list(source.rows)),
        "layer": control(slider, "layer", **at),
        "module": control(menu, "module", options=[module]),
    }
    return Panel(
        controls=controls,
        compute=lambda **state: difference(source, **state),
        draw=_draw,
        figure=Figure(figsize=(9.6, 3.9), dpi=100),
        adapt=lambda controls: _adapt(source, controls),
    )


def difference(source: Any, *, candidate: str, prompt: str, layer: int, module: str) -> Content:
    """What the panel shows for one choice, without a panel."""
    drift = source.drift(candidate, prompt)
    pair = source.tensors(candidate, prompt, layer, module)
    found = tensor_difference(*pair)
    first = source.first_above(candidate, prompt)
    starts = "stays within" if first is None else f"at layer {first[0]} ({first[1]}) leaves"
    same = "equal, bit by bit" if found.answer == "equal" else ""
    size = f"relative RMS difference {found.sums.relative_rms:.3g}, {found.answer}"
    return Content(
        text=f"Layer {layer}, {module}: {same or size}.\n"
        f"The drift {starts} the noise band of eager code. Against float64 the candidate is "
        f"{source.refereed(candidate)}.",
        frames={"drift": drift, "ulps": ulp_histogram(*pair)},
        table=_values(found.to_frame()),
    )


def _values(frame: pd.DataFrame) -> pd.DataFrame:
    """The row's main figures under readable names."""
    titles = {"relative_rms": "relative RMS", "sqnr_db": "SQNR, dB", "ulp_q50": "median steps",
              "ulp_q99": "99 % steps", "mean_error": "mean error",
              "mean_error_pvalue": "p (mean error)", "scale_error_pvalue": "p (scale error)",
              "cosine": "cosine",
              "answer": "noise or bias"}  # fmt: skip
    cosine = frame["cosine"].map("{:.6g}".format)
    return frame.assign(cosine=cosine)[list(titles)].rename(columns=titles)


def _adapt(source: Any, controls: Mapping) -> None:
    """Offer the modules that the chosen layer has."""
    drift = source.drift(controls["candidate"].value, controls["prompt"].value)
    controls["layer"].max = int(drift["layer"].max())
    here = list(drift.loc[drift["layer"] == controls["layer"].value, "module"])
    offer(controls["module"], here, default=-1)


def _draw(figure: Figure, content: Content, state: dict) -> None:
    if not figure.axes:
        figure.subplots(1, 2, gridspec_kw={"width_ratios": (3, 2)})
        figure.subplots_adjust(left=0.09, right=0.985, bottom=0.19, top=0.86, wspace=0.28)
    left, right = figure.axes
    drift = content.frames["drift"]
    plots.layer_drift(drift[drift["module"].isin(["residual", "logits"])], ax=left)
    mark(left, state["layer"])
    here = drift[(drift["layer"] == state["layer"]) & (drift["module"] == state["module"])]
    look = {"marker": "D", "linestyle": "", "markerfacecolor": "none", "label": "chosen module"}
    logarithmic(left, "chosen", here["layer"], here["relative_rms"], color="black", **look)
    legend(left, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    plots.ulp_bars(content.frames["ulps"], ax=right)
