"""The layer views beside the plain forward passes they take, and the memory they hold."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import Measurement, interleaved
from lossless_lab import models, prompts
from lossless_lab.numerical.attribution import attribution, local_error
from lossless_lab.numerical.capture import capture, forward, model_inputs
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.numerical.parts import parts_of
from lossless_lab.numerical.ulps import ulp_histogram

MEMORY_LIMIT = 0.1  # of one full set of stored activations
RUNS = (
    ("plain", False),
    *((what, modules) for modules in (False, True) for what in ("lockstep", "stored")),
)
# Freed memory goes back to the system at once, so that the peak is of what is held.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MKL_DISABLE_FAST_MM": "1"}


def subjects(n_rows: int = 8, n_tokens: int = 128):
    """SmolLM2 (or the tiny pair without it) against itself with one layer damaged, and ids."""
    from lossless_lab.mutants import MUTANTS

    model = models.load("smollm2" if models.is_present("smollm2") else "tiny-target")
    broken = MUTANTS["damaged-weights"].apply(model, dose=1e-3)
    read = prompts.tokenize(prompts.read(), model, max_prompt_tokens=4000)
    long = [list(p.ids) for p in read if len(p.ids) >= n_tokens]
    ids = torch.tensor([long[i % len(long)][:n_tokens] for i in range(n_rows)])
    return model, broken, ids


def bench() -> list[Measurement]:
    """View (a) against two forwards; the others and the histogram, as multiples of the same."""
    model, broken, ids = subjects()
    inputs = model_inputs(ids, None)

    def plain():
        return forward(model.network, inputs), forward(broken, inputs)

    pair = [x.flatten(0, 1) for x in plain()]
    calls = {
        "lockstep view, 8 x 128": lambda: compare_layers(model, broken, ids),
        "lockstep view with modules": lambda: compare_layers(model, broken, ids, modules=True),
        "ULP histogram of the logits": lambda: ulp_histogram(*pair),
        "local error": lambda: local_error(model, broken, ids),
        "plain": plain,
    }
    took = interleaved(calls)
    took["attribution, 1 x 128"] = interleaved(
        {"it": lambda: attribution(model, broken, ids[:1])}, repeats=1, warm_up=0
    )["it"]
    limits = {"lockstep view, 8 x 128": 1.25}
    measured = [
        Measurement(
            name=name,
            seconds=seconds,
            alternative="two plain forwards, 8 x 128",
            alternative_seconds=took["plain"],
            limit=limits.get(name),
        )
        for name, seconds in took.items()
        if name != "plain"
    ]
    return [*measured, *memory()]


def memory() -> list[Measurement]:
    """Peak memory above that of two forwards, as a share of one full set of stored activations.

    Held by the computation; and, for the view alone, resident with what malloc and MKL keep of
    freed memory for a second thread: 10 to 30 MiB, in readings that scatter by 20.
    """
    held = {run: _peak(run, **GIVEN_BACK) for run in RUNS}
    readings = {run: [_peak(run) for _ in range(5)] for run in RUNS[:3]}
    resident = {run: statistics.median(found) for run, found in readings.items()}
    share = "extra peak memory {} / stored activations"
    return [
        Measurement(name=f"{name}, {share.format(how)}", seconds=_share(peaks, runs), limit=limit)
        for name, how, peaks, runs, limit in (
            ("lockstep view", "held", held, RUNS[1:3], MEMORY_LIMIT),
            ("lockstep view with modules", "held", held, RUNS[3:], MEMORY_LIMIT),
            ("lockstep view", "resident", resident, RUNS[1:3], None),
        )
    ]


def _share(peaks: dict[tuple, float], runs: Sequence[tuple]) -> float:
    ours, stored = (peaks[run] - peaks["plain", False] for run in runs)
    return max(0.0, ours / stored)


def _peak(run: tuple[str, bool], **settings: str) -> float:
    """Peak resident bytes, above the loaded models, of a fresh process that does one of them."""
    done = subprocess.run(
        [sys.executable, "-c", f"from benchmarks import numerical; numerical.alone(*{run!r})"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | settings,
    )
    return float(done.stdout.split()[-1])


def alone(what: str, modules: bool) -> None:
    """Run one of the three by itself and print the peak of this process, in bytes."""
    model, broken, ids = subjects()
    inputs, kept = model_inputs(ids, None), []
    parts = parts_of(model.network) if modules else None
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    loaded = _status("VmRSS")

    def keep(place, x):
        kept.append(x.clone())

    if what == "lockstep":
        compare_layers(model, broken, ids, modules=modules)
    elif what == "stored":
        with capture(model.network, keep, parts=parts):
            first = forward(model.network, inputs)
        second = forward(broken, inputs)
        del first, second
    else:
        _ = forward(model.network, inputs), forward(broken, inputs)
    print(_status("VmHWM") - loaded)  # not ru_maxrss, which a child takes over from its parent


def _status(field: str) -> int:
    """Bytes of a field of this process's status."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])
