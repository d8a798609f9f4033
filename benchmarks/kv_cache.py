"""The sweep of a million combinations, and a slider's move of notebook 02's panel."""

from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import Measurement, interleaved
from lossless_lab import kv_cache

MODELS = [n for n in kv_cache.models().model if not kv_cache.geometry(n).of_kind("cross")][:50]
LENGTHS, BATCHES = np.arange(1, 101) * 1024, np.arange(1, 41)
DTYPES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
PEAK_LIMIT = 200 * 2**20


def ours() -> pd.DataFrame:
    """The package's sweep: 50 models x 5 formats x 100 lengths x 40 batches."""
    options = {"seq_lens": LENGTHS, "batch_sizes": BATCHES, "dtypes": list(DTYPES)}
    return kv_cache.sweep(MODELS, **options)


def facts() -> pd.DataFrame:
    """What a user would tabulate by hand: elements of each kind of layer, and the window."""
    rows = []
    for name in MODELS:
        layers = kv_cache.geometry(name).layers
        full = sum(x.elements for x in layers if x.window is None)
        slid = sum(x.elements for x in layers if x.window is not None)
        window = max((x.window for x in layers if x.window is not None), default=0)
        states = [s for x in layers for s in x.states]
        conv = sum(s.elements(columns=s.shape[-1] - 1) for s in states if s.name == "conv")
        matrices = sum(s.elements() for s in states if s.name == "recurrent")
        rows.append((name, full, slid, window, conv, 4 * matrices))
    columns = ["model", "full", "sliding", "window", "conv", "matrix_bytes"]
    return pd.DataFrame(rows, columns=columns).astype({"model": "category"})


def theirs(table: pd.DataFrame) -> pd.DataFrame:
    """The same in vectorised pandas: cross joins, then one expression."""
    widths = pd.DataFrame({"dtype": pd.Categorical(DTYPES), "width": list(DTYPES.values())})
    frame = table.merge(widths, "cross")
    frame = frame.merge(pd.DataFrame({"seq_len": LENGTHS}), "cross")
    frame = frame.merge(pd.DataFrame({"batch_size": BATCHES}), "cross")
    kept = np.minimum(frame.seq_len, frame.window)
    state_width = frame.width.where(frame.width >= 2, 2.0)  # a convolution is kept in 16 bits
    one = (frame.full * frame.seq_len + frame.sliding * kept) * frame.width
    one += frame.conv * state_width + frame.matrix_bytes
    frame["cache_bytes"] = (frame.batch_size * one).astype("int64")
    return frame[["model", "dtype", "seq_len", "batch_size", "cache_bytes"]]


def peak_bytes(call) -> int:
    """Largest memory in use while `call` runs, above what was in use before."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def bench() -> list[Measurement]:
    """Seconds of the sweep against pandas, its peak in units of 200 MiB, and the panel's moves."""
    table = facts()
    assert np.array_equal(ours().cache_bytes, theirs(table).cache_bytes)  # 1e6 rows, to the byte
    seconds = interleaved({"ours": ours, "pandas": lambda: theirs(table)})
    absolute = Measurement(name="sweep of 1e6 combinations", seconds=seconds["ours"], limit=1.0)
    compared = Measurement(
        name="sweep against pandas",
        seconds=seconds["ours"],
        alternative="cross joins and one expression in pandas",
        alternative_seconds=seconds["pandas"],
        limit=1.0,
    )
    memory = Measurement(
        name="sweep, peak memory / 200 MiB", seconds=peak_bytes(ours) / PEAK_LIMIT, limit=1.0
    )
    return [absolute, compared, memory, *moves()]


def moves() -> list[Measurement]:
    """Median time from a key press to the picture of notebook 02's panel, in Chromium."""
    from benchmarks.panels import _moves
    from tests.browser.lab import CHROMIUM, Notebook, chromium, server, write_notebook

    if not CHROMIUM.exists():
        return []
    with tempfile.TemporaryDirectory() as name:
        write_notebook(Path(name) / "kv.ipynb", PANEL)
        with server(Path(name)) as address, chromium() as browser:
            notebook = Notebook(browser, address.format("kv.ipynb"))
            return [_moves(notebook, 0, 0, "kv_cache_sizing, two axes", 0.400)]


PANEL = """
from lossless_lab.panels.kv_cache import kv_cache_sizing
panel = kv_cache_sizing()
panel
"""
