"""Two stored runs as an internal report: three figures, the table of answers, what was set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from lossless_lab import figures, models, plots, runs
from lossless_lab.models import places
from lossless_lab.numerical.flips import top_two
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.optimizations.entry import fingerprint
from lossless_lab.pipeline.inspection import Inspection
from lossless_lab.pipeline.study import DIFFERENCE_COLUMNS
from lossless_lab.pipeline.subjects import NotEvidence, Stored, shared_positions
from lossless_lab.verdict import Verdict

Sides = tuple[Stored, Stored]
Drawn = tuple[Any, pd.DataFrame, str]  # axes, the data drawn, what has to be said beside it
_SHOWN = {"kl_reference_candidate_nats": "KL at a position (nats, log scale)",
          "total_variation": "total variation at a position (log scale)"}  # fmt: skip
_ROWS, _TOKENS = 8, 64  # of the pass in which layers are compared
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


def write_report(
    sides: Sides, verdict: Verdict, folder: Path, *, captured: Path | None = None
) -> dict[str, str]:
    """Write the report into `folder`: report.md and all that it shows.

    Each figure is .png, .svg, .csv and .json (`figures.save`); answers and settings are .md, .tex,
    .csv and .json. A figure that the runs do not bear out is left out, and what an earlier report
    left there under its name is removed.

    Parameters
    ----------
    sides : reference and candidate, whose `verdict` it is.
    captured : layers.csv of the candidate's run, the frame of a `LayerDrift`; without one, layers
        are compared where both manifests name models that are on this machine.

    Returns
    -------
    dict
        Figure -> why it was left out.
    """
    told = [[s.name, runs.configuration_hash(s.manifest)] for s in sides]
    origin = {"command": "lossless-lab report", "configurations": told}
    left: dict[str, str] = {}
    shown = []
    for name, (title, draw) in FIGURES.items():
        try:
            if not verdict.evidence:
                raise NotEvidence("the two runs could not be compared at all")
            given = _captured(captured) if name == "layers" and captured else draw(sides, verdict)
        except (ValueError, RuntimeError) as reason:
            left[name] = str(reason).splitlines()[0].partition("; pass `")[0]
            for suffix in ("png", "svg", "csv", "json"):
                (folder / f"{name}.{suffix}").unlink(missing_ok=True)
            shown.append(f"## {title}\n\nLeft out: {left[name]}.")
        else:
            axes, data, note = given
            figures.save(axes.figure, name, data, origin, preset="double", folder=folder)
            shown.append(f"## {title}\n\n![{title}]({name}.png)" + (f"\n\n{note}." if note else ""))
    settings = pd.DataFrame(verdict.differences, columns=DIFFERENCE_COLUMNS)
    settings = settings.map(lambda value: _HASH.sub(r"\1…", value))
    for name, table in (("answers", verdict.rounded()), ("settings", settings)):
        figures.save_table(table, name, origin, folder=folder)
    page = [
        f"# {verdict.candidate} against {verdict.reference}",
        "\n\n".join(filter(None, (verdict.sentence, verdict.supporting_line))),
        f"## Answers\n\n{figures.to_markdown(verdict.rounded())}",
        "## Settings that differ\n\n"
        + (figures.to_markdown(settings) if len(settings) else "None of those recorded."),
        *shown,
    ]
    (folder / "report.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    return left


def _captured(path: Path) -> Drawn:
    """Drift that someone captured beside the candidate's run."""
    frame = pd.read_csv(path, dtype={"layer": float, "relative_rms": float})
    axes = plots.layer_drift(frame, ax=plots.axes(preset="double"))
    return axes, frame, f"As captured in {path.name} of {path.parent.name}"


def _layers(sides: Sides, verdict: Verdict) -> Drawn:
    """Drift along the reference's texts, with the noise of equivalent twins."""
    networks = [_network(side) for side in sides]
    if len({*map(fingerprint, networks)}) == 1:
        raise NotEvidence("both runs are of one network; how else they differ shows in no layer")
    texts = [c.prompt_ids + c.output_ids for (_, i), c in sides[0].completions.items() if i == 0]
    texts = sorted(texts, key=len)[-_ROWS:]
    n_tokens = min(_TOKENS, len(texts[0]))
    rows = {str(i): text[:n_tokens] for i, text in enumerate(texts)}
    ids = torch.tensor(list(rows.values()), device=networks[0].device)
    note = f"First {n_tokens} tokens of the {len(rows)} longest texts of {sides[0].name}"
    kept = getattr(networks[1], "layer_map", None)  # blocks that were dropped
    frame = compare_layers(*networks, ids, layer_map=kept).frame
    try:
        floor = Inspection(networks[0], {}, rows).floor
        frame = frame.merge(floor, how="left", on=["layer", "module"])
        note += "; the noise floor is the drift of 4 equivalent twins of the reference"
    except ValueError as error:
        note += f"; no noise floor: {error}"
    label = f"{verdict.candidate}, {len(ids)} × {n_tokens} tokens"
    return plots.layer_drift(frame, ax=plots.axes(preset="double"), label=label), frame, note


def _network(side: Stored) -> nn.Module:
    """The network of a run made again, if it is of the weights that were recorded."""
    told, entry = side.manifest, side.optimization
    name, done = told.get("model_id", "unknown"), told.get("optimization", "none")
    if told.get("engine") != "transformers":
        engine = told.get("engine", "an unknown engine")
        raise NotEvidence(f"{side.name} was made by {engine}, which cannot be looked into")
    if not (places.is_named(name) and places.is_present(name)):
        raise NotEvidence(f"{side.name} names the model {name}, which is not known here by name")
    if done != "none" and entry is None:
        raise NotEvidence(f"{side.name} is of {done}, which is no catalogue entry")
    where = {"device": told["device"].get("kind", "cpu"), "attn_implementation": told["attention"]}
    try:
        model = models.load(name, dtype=told["dtype"], **where)
        if entry and "weights_sha256" in entry.changes:
            model = entry.apply(model).model
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, MemoryError) as error:
        said = str(error).splitlines()[0]
        raise NotEvidence(f"the network of {side.name} cannot be made again: {said}") from None
    if model.weights_sha256 != told["weights_sha256"]:
        raise NotEvidence(f"{name} made again for {side.name} has other weights than were recorded")
    return model.network


def _by_prompt(sides: Sides, verdict: Verdict) -> Drawn:
    """Mean and maximum of KL and TV by prompt above, the tails over all positions below."""
    positions = verdict.evidence["positions"]
    if not len(positions):
        raise NotEvidence(_no_logits(sides))
    axes = plots.axes(2, 2, preset="double", height=5.2)
    for (above, below), (quantity, label) in zip(axes.T, _SHOWN.items(), strict=True):
        plots.divergence_by_prompt(positions, ax=above, quantity=quantity)
        named = positions.assign(candidate=verdict.candidate)
        plots.kl_tail(named, ax=below, quantity=quantity, label=label)
        below.get_lines()[0].set_color(plots.COLOURS[quantity])
    return axes[0, 0], positions, ""


def _partings(sides: Sides, verdict: Verdict) -> Drawn:
    """Outputs still identical after t tokens, and the margins that flipped at the first change."""
    tokens = verdict.evidence["tokens"]
    if tokens["n_reference"].isna().any():
        raise NotEvidence("token ids were not at hand")
    has_laws = len(verdict.evidence["positions"]) > 0
    with_margins = has_laws and sides[0].decoding.greedy
    axes = np.atleast_1d(plots.axes(1, 1 + with_margins, preset="double"))
    plots.first_divergence(tokens, ax=axes[0], label=verdict.candidate)
    place = "lower left" if tokens["ids_equal"].mean() > 0.5 else "upper right"
    axes[0].get_legend().set_loc(place)
    if not with_margins:
        why = "tokens were drawn" if has_laws else _no_logits(sides)
        return axes[0], tokens, f"Margins are left out: {why}"
    points = _margins(sides)
    plots.flips(points, ax=axes[1])
    tokens = tokens.merge(points, how="left", on=["prompt_id", "sample_index"])
    note = "Right: every position up to the first divergence, where one flips"
    return axes[0], tokens, f"{note}; above the line, to a third token"


def _margins(sides: Sides) -> pd.DataFrame:
    """Margin of the reference's top token and its change, wherever both read one context."""
    found = []
    for key, a in sides[0].completions.items():
        b = sides[1].completions[key]
        n = shared_positions(a.output_ids, b.output_ids)
        best = top_two(a.logits[:n])
        parted = np.array(a.output_ids[:n]) != np.array(b.output_ids[:n])
        drawn = {"margin": best.margin, "change": best.change(b.logits[:n]), "flipped": parted}
        named = {"prompt_id": key[0], "sample_index": key[1], "position": np.arange(n)}
        found.append(pd.DataFrame(named | drawn))
    return pd.concat(found)


def _no_logits(sides: Sides) -> str:
    without = [s.name for s in sides if any(c.logits is None for c in s.completions.values())]
    return f"no logits were kept by {' and '.join(without)} (`run --save-logits` keeps them)"


FIGURES = {
    "layers": ("Layer drift", _layers),
    "divergences": ("KL and total variation by prompt, and their tails", _by_prompt),
    "first_divergences": ("First divergences and their margins", _partings),
}
