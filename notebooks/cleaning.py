"""Takes out of an executed notebook what only the machine that ran it knows; measures its shape."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from pathlib import Path

import nbformat

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# What a path of one machine looks like, wherever a notebook was run.
MACHINE_PATH = re.compile(
    r"(?<![\w/:.])(?:/(?:root|home|Users|tmp|work|opt|mnt|var)/|[A-Z]:\\Users)"
)


def clean(notebook: nbformat.NotebookNode, *, root: Path) -> None:
    """Drop what only this run knows: widget state, progress bars, times, paths of this machine.

    The checkout's own path becomes "."; any other path of a machine is an error.
    """
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        kept = []
        for output in cell.outputs:
            data = output.get("data", {})
            if data.pop(WIDGET_VIEW, None) is not None and set(data) <= {"text/plain"}:
                continue  # a widget without a picture shows nothing once its kernel is gone
            if "text" in output:
                lines = [line.split("\r")[-1] for line in output.text.splitlines(keepends=True)]
                output.text = "".join(line for line in lines if "%|" not in line)
                if not output.text.strip():
                    continue
                output.text = output.text.replace(str(root), ".")
            for kind, value in data.items():
                if kind.startswith("text/") and isinstance(value, str):
                    data[kind] = value.replace(str(root), ".")
            kept.append(output)
        cell.outputs = kept
    for where, text in texts(notebook):
        found = MACHINE_PATH.search(text)
        if found:
            around = text[max(0, found.start() - 30) : found.end() + 30]
            raise ValueError(f"{where} holds a path of this machine: …{around!r}…")


def texts(notebook: nbformat.NotebookNode) -> Iterable[tuple[str, str]]:
    """(place, text) of every source and every readable output."""
    for i, cell in enumerate(notebook.cells):
        yield f"cell {i}", cell.source
        for output in cell.get("outputs", []):
            yield f"output of cell {i}", str(output.get("text", ""))
            for kind, value in output.get("data", {}).items():
                if not kind.startswith("image/"):
                    yield f"output of cell {i}", str(value)


def shape(notebook: nbformat.NotebookNode) -> dict[str, float]:
    """How a notebook reads: median and longest code cell in lines, share of prose cells."""
    lengths = [
        len([line for line in c.source.splitlines() if line.strip()])
        for c in notebook.cells
        if c.cell_type == "code"
    ]
    prose = sum(c.cell_type == "markdown" for c in notebook.cells)
    return {
        "median_lines": statistics.median(lengths),
        "max_lines": max(lengths),
        "prose_share": prose / len(notebook.cells),
    }
