"""All statistics of two models' laws beside the two forward passes that made the logits."""

from __future__ import annotations

import itertools
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch

from benchmarks import Measurement
from lossless_lab import models, prompts
from lossless_lab.optimizations.quantization import quantized
from lossless_lab.statistical import distances
from lossless_lab.statistical.divergences import divergences

ROWS, TOKENS, REPEATS = 8, 512, 5
MIB = 64  # limit on what is needed beyond the logits


def subjects():
    """SmolLM2 (the tiny pair's target without it) and its weights in int8; ids, a row at a time."""
    model = models.load("smollm2" if models.is_present("smollm2") else "tiny-target")
    texts = "\n\n".join(d.text for d in prompts.read_documents())
    ids = torch.tensor(model.tokenizer(texts, verbose=False)["input_ids"])
    ids = ids.repeat(-(-ROWS * TOKENS // len(ids)))[: ROWS * TOKENS].view(ROWS, 1, TOKENS)
    return model.network, quantized("int8-channel").apply(model).network, ids


def plain(a: torch.Tensor, b: torch.Tensor, correct: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same set from the definitions, in one precision: the usual way to write it."""
    ln_p, ln_q = a.log_softmax(-1), b.log_softmax(-1)
    p, q = ln_p.exp(), ln_q.exp()
    change = ln_q - ln_p
    ln_m = torch.logaddexp(ln_p, ln_q) - 0.6931471805599453
    centred = (b - a) - (b - a).mean(-1, keepdim=True)
    top, theirs = a.topk(10, -1), b.topk(10, -1).indices
    return {
        "forward": -(p * change).sum(-1),
        "backward": (q * change).sum(-1),
        "js": ((p * (ln_p - ln_m)).sum(-1) + (q * (ln_q - ln_m)).sum(-1)) / 2,
        "tv": (p - q).abs().sum(-1) / 2,
        "hellinger": (((p.sqrt() - q.sqrt()) ** 2).sum(-1) / 2).sqrt(),
        "entropies": torch.stack([-(p * ln_p).sum(-1), -(q * ln_q).sum(-1)]),
        "tops": torch.stack([a.argmax(-1), b.argmax(-1)]),
        "overlap": (top.indices[:, :, None] == theirs[:, None]).any(-1).sum(-1),
        "margin": top.values[:, 0] - top.values[:, 1],
        "correct": torch.stack([x.gather(-1, correct[:, None])[:, 0] for x in (ln_p, ln_q)]),
        "logits": torch.stack([centred.square().mean(-1).sqrt(), centred.abs().amax(-1)]),
    }


def in_chunks(a, b, correct, *, rows: int = 2, dtype: torch.dtype = torch.float32) -> None:
    """`plain` over a few rows at a time, so that it stays in the cache as well."""
    for i in range(0, len(a), rows):
        where = slice(i, i + rows)
        plain(a[where].to(dtype), b[where].to(dtype), correct[where])


def expm1(x: torch.Tensor, out: None = None) -> torch.Tensor:
    """e^x − 1 = 2t / (1 − t), t = tanh(x/2): compiled for a CPU, torch's own is exp(x) − 1."""
    t = torch.tanh(x / 2)
    return 2 * t / (1 - t)


def compiled():
    """`_in_float32` through torch.compile, without room, so that all of it may be fused."""
    fused = torch.compile(distances._in_float32, dynamic=False)
    return lambda a, b, top, tokens, room: fused(a, b, top, tokens, None, expm1)


def bench() -> list[Measurement]:
    """Median of interleaved rounds; in each both models read all rows, and all ways follow."""
    reference, candidate, ids = subjects()
    fused = mock.patch.object(distances, "_in_float32", compiled())
    ways = {
        "eager": lambda a, b, ids: divergences(a, b, correct_ids=ids.tolist()),
        "compiled": fused(lambda a, b, ids: divergences(a, b, correct_ids=ids.tolist())),
        "plain float32": lambda *x: in_chunks(*x, rows=TOKENS),
        "plain float32, 2 rows at a time": in_chunks,
        "plain float64, 2 rows at a time": lambda *x: in_chunks(*x, dtype=torch.float64),
    }
    rounds = [dict.fromkeys(["forwards", *ways], 0.0) for _ in range(1 + REPEATS)]
    with torch.inference_mode():
        for took, row in itertools.product(rounds, ids):
            start = time.perf_counter()
            pair = [network(row, use_cache=False).logits[0] for network in (reference, candidate)]
            took["forwards"] += time.perf_counter() - start
            for name, call in ways.items():
                start = time.perf_counter()
                call(*pair, row[0].roll(-1))
                took[name] += time.perf_counter() - start
    seconds = {name: statistics.median(r[name] for r in rounds[1:]) for name in rounds[0]}
    forwards, limits = seconds.pop("forwards"), {"eager": 0.15, "compiled": 0.1}
    against_forwards = [
        Measurement(
            name=f"all statistics of {ROWS} x {TOKENS} tokens, {name}",
            seconds=took,
            alternative="the two forwards",
            alternative_seconds=forwards,
            limit=limits.get(name),
        )
        for name, took in seconds.items()
    ]
    best = min((name for name in seconds if "float32" in name), key=seconds.get)
    return [
        *against_forwards,
        Measurement(
            name="all statistics, eager",
            seconds=seconds["eager"],
            alternative=best,
            alternative_seconds=seconds[best],
            limit=1.0,
        ),
        *(
            Measurement(name=f"MiB beyond the logits of {n} tokens", seconds=_mib(n), limit=MIB)
            for n in (512, 2048)
        ),
    ]


def _mib(n: int) -> float:
    """Peak of a fresh process above the logits that it was given, in MiB."""
    code = f"from benchmarks import divergences; divergences.alone({n})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def alone(n: int) -> None:
    """Compare n rows of SmolLM2's vocabulary; print the peak less what was there before, in MiB.

    Not by ru_maxrss, which a child takes over from its parent.
    """
    a, b = (torch.randn(n, 49_152, generator=torch.Generator().manual_seed(i)) for i in range(2))
    before = _status("VmRSS")
    divergences(a, b, correct_ids=[0] * n)
    print(_status("VmHWM") - before)


def _status(name: str) -> float:
    """A figure of this process in MiB."""
    kib = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]
    return int(kib) / 1024
