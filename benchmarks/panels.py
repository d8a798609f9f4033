"""How soon a slider's move shows its picture in JupyterLab in headless Chromium."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import Measurement
from tests.browser.cells import COMPARE, RAISING, TWO_AXES, WHICH_LEVEL_BREAKS
from tests.browser.lab import Notebook, chromium, server, write_notebook

# cell, slider, what it is, limit in seconds of one move
MOVES = (
    (2, 0, "one axes", 0.250),
    (0, 2, "which_level_breaks, one axes", 0.250),
    (3, 0, "two axes", 0.400),
    (1, 1, "compare, three axes", None),
)
BURSTS = ((2, 0, "one axes", 1.0), (3, 0, "two axes", 1.0), (1, 1, "compare, three axes", 1.0))
REPEATS = 15


def bench() -> list[Measurement]:
    """Median time from a key press to the decoded picture, and of a burst of 30 to its last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_notebook(folder / "panels.ipynb", WHICH_LEVEL_BREAKS, COMPARE, RAISING, TWO_AXES)
        with server(folder) as address, chromium() as browser:
            notebook = Notebook(browser, address.format("panels.ipynb"))
            moves = [_moves(notebook, *move) for move in MOVES]
            return moves + [_burst(notebook, *burst) for burst in BURSTS]


def _moves(notebook: Notebook, cell: int, place: int, name: str, limit: float | None):
    slider = _ready(notebook, cell, place)
    notebook.watch(cell)
    for i in range(REPEATS):
        slider.press("ArrowLeft" if i % 2 else "ArrowRight")
        time.sleep(1)
    keys, pictures = notebook.times()
    waits = [min((p for p in pictures if p > key), default=1e6) - key for key in keys]
    return _measured(f"a move shows its picture: {name}", statistics.median(waits), limit)


def _burst(notebook: Notebook, cell: int, place: int, name: str, limit: float):
    seconds = []
    for _ in range(5):
        slider = _ready(notebook, cell, place)
        notebook.watch(cell)
        for _ in range(30):  # as fast as the keys come
            slider.press("ArrowRight")
        time.sleep(3)
        keys, pictures = notebook.times()
        seconds.append(pictures[-1] - keys[-1])
    return _measured(f"30 quick moves settle: {name}", statistics.median(seconds), limit)


def _ready(notebook: Notebook, cell: int, place: int):
    notebook.image(cell).scroll_into_view_if_needed()
    slider = notebook.slider(cell, place)
    slider.focus()
    slider.press("Home")
    for _ in range(5 * (cell == 2)):  # away from the value at which this panel raises
        slider.press("ArrowRight")
    time.sleep(2)
    return slider


def _measured(name: str, milliseconds: float, limit: float | None) -> Measurement:
    return Measurement(name=name, seconds=milliseconds / 1000, limit=limit)
