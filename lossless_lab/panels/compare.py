"""The panel of notebook 00: one candidate against one reference, three charts and the verdict."""

from collections.abc import Mapping
from typing import Any

import ipywidgets
import pandas as pd
from matplotlib.figure import Figure

from lossless_lab import plots
from lossless_lab.plots.artists import mark

from .base import Content, Panel, control, offer

Pair = tuple[str, str]  # (reference, candidate)


def compare(source: Any) -> Panel:
    """Panel that chooses reference, candidate, prompt, position and layer.

    The panel asks at every move and keeps nothing, so an answer that takes a model's run should
    be kept by the source; `distribution` and `verdict` are asked most often.

    Parameters
    ----------
    source : what has these methods, as `pipeline.Study` does:
        pairs() -> (reference, candidate) names that can be compared, the first one shown first;
        prompts(pair) -> ids of the prompts that both sides answered;
        frames(pair, prompt_id) -> "divergences" as from `divergences`, and "layers" as from
        `compare_layers` if known;
        distribution(pair, prompt_id, position) -> both laws there, as from `distribution`;
        verdict(pair) -> the verdict in one sentence.

    Raises
    ------
    ValueError where the source has no pairs.
    """
    pairs = list(source.pairs())
    if not pairs:
        raise ValueError("`source` must have at least one (reference, candidate) pair; it has none")
    references = list(dict.fromkeys(reference for reference, _ in pairs))
    menu, slider = ipywidgets.Dropdown, ipywidgets.IntSlider
    # A new position or prompt may run a model: the slider answers when it is let go.
    controls = {
        "reference": control(menu, "reference", options=references),
        "candidate": control(menu, "candidate"),
        "prompt": control(menu, "prompt"),
        "position": control(slider, "position", max=0, continuous_update=False),
        "layer": control(slider, "layer", max=0),
    }
    return Panel(
        controls=controls,
        compute=lambda **state: comparison(source, **state),
        draw=_draw,
        figure=Figure(figsize=(9.6, 4.8), dpi=100),
        adapt=lambda controls: _adapt(source, pairs, controls),
    )


def comparison(
    source: Any, *, reference: str, candidate: str, prompt: str, position: int, layer: int
) -> Content:
    """What the panel shows for one choice, without a panel: frames, verdict, values pointed at."""
    pair = (reference, candidate)
    frames = dict(source.frames(pair, prompt))
    frames["distribution"] = source.distribution(pair, prompt, position)
    return Content(
        text=source.verdict(pair),
        frames=frames,
        table=_values(frames, position=position, layer=layer),
    )


def _values(frames: Mapping[str, pd.DataFrame], *, position: int, layer: int) -> pd.DataFrame:
    at = frames["divergences"].set_index("position").loc[position]
    row = {
        "position": str(position),
        "KL(reference‖candidate), nats": f"{at['kl_reference_candidate_nats']:.3g}",
        "KL(candidate‖reference), nats": f"{at['kl_candidate_reference_nats']:.3g}",
        "total variation": f"{at['total_variation']:.3g}",
        "top token": "same" if at["top1_agree"] else "differs",
    }
    layers = frames.get("layers")
    if layers is not None and (layers["layer"] == layer).any():
        drift = layers.set_index("layer").loc[layer]
        last = drift["module"] == "logits"
        row["layer"] = "logits" if last else str(layer) if layer else "embedding"
        row["relative RMS difference"] = f"{drift['relative_rms']:.3g}"
    return pd.DataFrame([row])


def _adapt(source: Any, pairs: list[Pair], controls: Mapping) -> None:
    """Offer only what exists for the choices made above."""
    reference = controls["reference"].value
    offer(controls["candidate"], [c for r, c in pairs if r == reference])
    pair = (reference, controls["candidate"].value)
    offer(controls["prompt"], list(source.prompts(pair)))
    frames = source.frames(pair, controls["prompt"].value)
    controls["position"].max = int(frames["divergences"]["position"].max())
    layers = frames.get("layers")
    controls["layer"].max = 0 if layers is None else int(layers["layer"].max())
    controls["layer"].disabled = layers is None


def _draw(figure: Figure, content: Content, state: dict) -> None:
    if not figure.axes:
        grid = figure.add_gridspec(
            2, 2, left=0.085, right=0.985, top=0.9, bottom=0.11, hspace=0.62, wspace=0.28
        )
        for cell in (grid[0, 0], grid[1, 0], grid[:, 1]):
            figure.add_subplot(cell)
    drift, along, law = figure.axes
    layers = content.frames.get("layers")
    drift.set_visible(layers is not None)
    if layers is not None:
        plots.layer_drift(layers, ax=drift)
        mark(drift, state["layer"])
    plots.divergence_by_position(content.frames["divergences"], ax=along)
    mark(along, state["position"])
    for ax in (drift, along):
        ax.minorticks_off()  # most of the time to draw a log axis
    plots.distribution_dots(content.frames["distribution"], ax=law)
    law.set_xlabel(f"log-probability at position {state['position']} (nats)")
