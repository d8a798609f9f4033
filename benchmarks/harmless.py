"""Harmless re-orderings against floors that none of them set: how many are flagged all the same."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
from scipy import stats
from torch import nn

from benchmarks import mutants
from benchmarks.mutants import DTYPES, SUBJECTS, Subject, subject
from lossless_lab import paths
from lossless_lab.engines.conditions import kernels
from lossless_lab.engines.padding import forward_logits
from lossless_lab.engines.protocol import Completion, score_batches
from lossless_lab.numerical.noise import centred_peak, centred_rms, noise_floor, ulp_of
from lossless_lab.numerical.parts import decoder_layers
from lossless_lab.numerical.twins import twin
from lossless_lab.pipeline.answers import multiples
from lossless_lab.stats.intervals import share_interval

TABLE = paths.DATA / "calibration" / "harmless.csv"


class Widened(nn.Module):
    """An MLP that keeps intermediates in the next wider format: casts fused, as compilers do."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp.double() if next(mlp.parameters()).dtype == torch.float32 else mlp.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One cast at the end."""
        return self.mlp(x.to(next(self.mlp.parameters()).dtype)).to(x.dtype)


def widened(network: nn.Module, layers: Iterable[int]) -> nn.Module:
    """A copy whose MLPs of these layers compute in the next wider format, cast once at the end."""
    network = copy.deepcopy(network)
    for layer in layers:
        block = decoder_layers(network)[layer]
        block.mlp = Widened(block.mlp)
    return network


def chunked(network: nn.Module, completions: Sequence[Completion], size: int) -> torch.Tensor:
    """Logits along the outputs, all tokens read in chunks of `size` with a growing cache."""
    found = []
    with torch.no_grad():
        for c in completions:
            ids, cache, rows = torch.tensor([[*c.prompt_ids, *c.output_ids[:-1]]]), {}, []
            for piece in ids.split(size, 1):
                out = network(piece, use_cache=True, **cache)
                rows, cache = [*rows, out.logits[0].float()], {"cache": out["cache"]}
            found.append(torch.cat(rows)[-len(c.output_ids) :])
    return torch.cat(found)


def harmless(on: Subject) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> logits of the same function computed otherwise; at least 50, each made when called.

    None is among the variants that `check` sets its floor by: other seeds, sizes and pads.
    """
    network, completions = on.network, on.completions
    prompts, outputs = ([getattr(c, n) for c in completions] for n in ("prompt_ids", "output_ids"))
    whole = [[*p, *o[:-1]] for p, o in zip(prompts, outputs, strict=True)]

    def scored(**fields):
        engine = replace(mutants.engine_of(network), **fields)
        return lambda: torch.cat(score_batches(engine, prompts, outputs))

    def one_pass(make, rows, extra, kernel=None, threads=1):
        def run():
            model = make()
            with kernels(model, threads=threads, attention=kernel):
                found = [
                    x
                    for start in range(0, len(whole), rows)
                    for x in forward_logits(model, whole[start : start + rows], extra=extra)
                ]
            return torch.cat([x[-len(o) :] for x, o in zip(found, outputs, strict=True)])

        return run

    found = {
        f"{size} rows, {extra} pads, {kernel}": one_pass(lambda: network, size, extra, kernel)
        for size in (3, 5, 8)
        for extra in (2, 7, 11)
        for kernel in ("sdpa", "eager")
    }
    found |= {
        f"2 threads, {extra} pads": one_pass(lambda: network, 8, extra, None, 2) for extra in (4, 6)
    }
    for kernel in ("sdpa", "eager"):
        for rows, extra in ((8, 6), (4, 9), (3, 2)):
            found[f"cached, {rows} rows, {extra} pads, {kernel}"] = scored(
                batch_size=rows, extra_padding=extra, attention=kernel
            )
    found |= {f"chunks of {n}": partial(chunked, network, completions, n) for n in (2, 3, 5, 8)}
    for seed in range(100, 120):
        make = partial(twin, network, seed=seed)
        found[f"twin {seed}"] = one_pass(make, 1 + seed % 8, seed % 3)
    n_layers = len(decoder_layers(network))
    for layer in (0, n_layers // 2, n_layers - 1):
        found[f"casts fused in {layer}"] = one_pass(partial(widened, network, [layer]), 8, 0)
    return found


def judged(on: Subject, *, against: Subject | None = None) -> pd.DataFrame:
    """One row per re-ordering: its multiples of the floor, and whether it repeats another's.

    Parameters
    ----------
    against : whose logits and floor are the measure; those of `on` itself by default.
    """
    rows, seen, own = [], set(), against or on
    for name, run in harmless(on).items():
        logits = run()
        rms, peak = own.multiples(logits).values()
        bits = centred_rms(own.logits, logits).tobytes()
        rows.append({"variant": name, "rms": rms, "peak": peak, "repeats": bits in seen})
        seen.add(bits)
    return pd.DataFrame(rows)


def flagged(found: pd.DataFrame, rate: float) -> dict[str, object]:
    """How many of the distinct ones pass the floor, what the stated rate allows, and the bound."""
    distinct = found[~found["repeats"]]
    n, passed = len(distinct), ~(distinct[["rms", "peak"]] <= 1)
    counts = {f"flagged_{name}": int(passed[name].sum()) for name in passed}
    return {
        "n_judged": len(found),
        "n_distinct": n,
        **counts,
        "allowed": int(stats.binom.ppf(0.99, n, rate)),
        "rate_at_most": share_interval(max(counts.values()), n, alternative="less").high,
        "which": "; ".join(distinct["variant"][passed.any(axis=1)]),
    }


def code() -> str:
    """Hash of what was judged and of how."""
    measures = (centred_rms, centred_peak, ulp_of, noise_floor, multiples, Subject, subject)
    parts = (*measures, harmless, chunked, widened, Widened, judged, flagged)
    return hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()[:12]


def calibrate(names: Sequence[str] = tuple(SUBJECTS)) -> pd.DataFrame:
    """One row per subject and dtype."""
    rows = []
    for name in names:
        for dtype in DTYPES:
            on = subject(name, dtype)
            about = {"subject": name, "dtype": dtype, "floor": on.floor.unit, "rate": on.floor.rate}
            rows.append(about | flagged(judged(on), on.floor.rate) | {"code": code()})
    table = pd.DataFrame(rows)
    table.to_csv(TABLE, index=False, float_format="%.4g")
    return table
