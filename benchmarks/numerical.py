"""The layer views beside the plain forward passes they take, and the memory they hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import Measurement, interleaved
from lossless_lab import models, prompts
from lossless_lab.numerical.attribution import attribution, local_error
from lossless_lab.numerical.capture import capture, forward, model_inputs
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.numerical.ulps import ulp_histogram

MEMORY_LIMIT = 0.1  # of one full set of stored activations


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
    """Peak memory above two forwards, as a share of one full set of stored activations."""
    peaks = {name: _peak(name) for name in ("plain", "lockstep", "stored")}
    stored = peaks["stored"] - peaks["plain"]
    return [
        Measurement(
            name="lockstep view, extra peak memory / stored activations",
            seconds=max(0.0, (peaks["lockstep"] - peaks["plain"]) / stored),
            limit=MEMORY_LIMIT,
        )
    ]


def _peak(what: str) -> float:
    """Peak resident bytes of a fresh process that does one of the three."""
    code = f"from benchmarks import numerical; numerical.alone({what!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def alone(what: str) -> None:
    """Run one of the three by itself and print the peak of this process, in bytes."""
    model, broken, ids = subjects()
    inputs, kept = model_inputs(ids, None), []

    def keep(place, x):
        kept.append(x.clone())

    if what == "lockstep":
        compare_layers(model, broken, ids)
    elif what == "stored":
        with capture(model.network, keep):
            first = forward(model.network, inputs)
        second = forward(broken, inputs)
        del first, second
    else:
        _ = forward(model.network, inputs), forward(broken, inputs)
    # not ru_maxrss, which a child takes over from its parent
    print(1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]))
