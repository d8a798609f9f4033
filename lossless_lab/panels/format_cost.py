"""The panel of notebook 04: what a number format costs, in which layer, and at one position."""

import re
from collections.abc import Mapping
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from lossless_lab import plots

from .base import Content, Panel, control, offer

_GROUP = re.compile(r"-(channel|group\d+)")
_TOLD = ["module", "bits_per_weight", "relative_rms", "sqnr_db", "outlier_share"]


def format_cost(source: Any) -> Panel:
    """Panel that chooses format, group size, document, position and layer.

    Parameters
    ----------
    source : pipeline.FormatCosts, or what has the same `formats`, `documents`, `summary`, `ladder`,
        `weights`, `distribution` and `ids`, and keeps its answers.

    Raises
    ------
    ValueError
        Where the source has no formats.
    """
    if not source.formats:
        raise ValueError("`source` must have at least one format; it has none")
    menu, slider = ipywidgets.Dropdown, ipywidgets.IntSlider
    let_go = {"continuous_update": False}
    names = [document.id for document in source.documents]
    n_layers = int(source.weights(source.formats[0])["layer"].max())
    families = list(dict.fromkeys(family for family, _ in _choices(source)))
    groups = _groups(source, families[0])
    controls = {
        "format": control(menu, "format", options=families),
        "group": control(menu, "group size", options=groups),
        "document": control(menu, "document", options=names),
        "position": control(slider, "position", max=0, **let_go),
        "layer": control(slider, "layer", min=1, max=n_layers, **let_go),
    }
    return Panel(
        controls=controls,
        compute=lambda **state: cost(source, **state),
        draw=_draw,
        figure=Figure(figsize=(9.6, 4.2), dpi=100),
        adapt=lambda controls: _adapt(source, controls),
    )


def cost(
    source: Any, *, format: str, group: str, document: str, position: int, layer: int
) -> Content:
    """What the panel shows for one choice, without a panel.

    `format` and `group` are the parts of a format's name: "int4" and "group32"; what has no group
    to choose has "its own".
    """
    format = _choices(source)[format, group]
    weights = source.weights(format)
    here = weights[(weights["layer"] == layer) & (weights["relative_rms"] > 0)]
    worst = here.sort_values("sqnr_db")
    told = "no matrix of it changed"
    if len(worst):
        told = "worst matrix by its weights {module}, SQNR {sqnr_db:.1f} dB; it need not cost most"
        told = told.format(**worst.iloc[0])
    ladder = source.ladder()
    chosen = ladder["format"] == format
    row = ladder[chosen].iloc[0]
    warned = ""
    if row["on_grid_before"]:
        warned = (
            f"\nWARNING: {row['on_grid_before']} matrices lay on this very grid before; what the "
            "format costs is not to be seen on them."
        )
    return Content(
        text=f"{format}, {row['bits_per_weight']:.3g} bits per weight: {source.summary(format)}\n"
        f"Layer {layer}: {told}.{warned}",
        frames={
            "ladder": ladder.assign(chosen=chosen),
            "distribution": source.distribution(format, document, position),
        },
        table=here[_TOLD] if len(here) else None,
    )


def _choices(source: Any) -> dict[tuple[str, str], str]:
    """(format, group) -> name: "int4-group32-asym" is format int4-asym in groups of 32."""
    parts = [(name, _GROUP.search(name)) for name in source.formats]
    return {
        (name.replace(f"-{found[1]}", ""), found[1]) if found else (name, "its own"): name
        for name, found in parts
    }


def _groups(source: Any, family: str) -> list[str]:
    return [group for format, group in _choices(source) if format == family]


def _adapt(source: Any, controls: Mapping) -> None:
    offer(controls["group"], _groups(source, controls["format"].value))
    controls["position"].max = len(source.ids(controls["document"].value)) - 1


def _draw(figure: Figure, content: Content, state: dict) -> None:
    if not figure.axes:
        figure.subplots(1, 2)
        figure.subplots_adjust(left=0.2, right=0.985, bottom=0.14, top=0.9, wspace=0.35)
    ladder, law = figure.axes
    plots.format_ladder(content.frames["ladder"], ax=ladder)
    plots.distribution_dots(content.frames["distribution"], ax=law, n_tokens=10)
