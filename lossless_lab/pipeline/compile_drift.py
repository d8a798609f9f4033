"""Which stage of torch.compile moves the logits, and whether towards the truth or away from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd
import torch

from lossless_lab.numerical.capture import forward, model_inputs
from lossless_lab.numerical.noise import centred_rms
from lossless_lab.numerical.nonfinite import same_bits
from lossless_lab.numerical.referee import against_referee, referee
from lossless_lab.optimizations import Optimization, compilation
from lossless_lab.optimizations.entry import copied
from lossless_lab.results import Result

MAIN_STAGES = tuple(compilation.STAGES)[:5]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompileDrift(Result):
    """Each stage of compilation against eager, and both against a true float64 run.

    Parameters
    ----------
    frame : DataFrame
        One row per stage: stage, logit_rms (largest over positions, centred, against eager),
        bitwise_equal, eager_error and compiled_error (RMS to float64), word (against_referee),
        graphs, graph_breaks, recompilations (after a call with another length), compile_s, run_s
        and eager_s (medians of five calls, in turns).
    region : "whole" or what else was compiled, a different program from the whole.
    """

    frame: pd.DataFrame
    region: str

    @property
    def first_drifting(self) -> str | None:
        """The first stage whose logits are not bitwise the eager ones; None where all are."""
        moved = self.frame.loc[~self.frame["bitwise_equal"], "stage"]
        return None if moved.empty else str(moved.iloc[0])

    def to_frame(self) -> pd.DataFrame:
        """One row per stage."""
        return self.frame

    def __str__(self) -> str:
        if self.first_drifting is None:
            return f"{self.region}: every stage bitwise equal to eager"
        row = self.frame.set_index("stage").loc[self.first_drifting]
        return (
            f"{self.region}: drift begins at {self.first_drifting!r} (logit RMS up to "
            f"{row['logit_rms']:.3g}); against float64 the compiled code is {row['word']}"
        )


def compile_drift(
    model: Any,
    input_ids: torch.Tensor,
    *,
    stages: Sequence[str] = MAIN_STAGES,
    region: Callable[..., Optimization] = compilation.whole,
    progress: Callable[[str], Any] = lambda what: None,
) -> CompileDrift:
    """Compile `region` of the model as far as each stage goes, and compare the logits.

    Parameters
    ----------
    model : network or result of `load`, in eval mode.
    input_ids : [batch_size, seq_len] token ids, at least 3 long.
    stages : names of `optimizations.compilation.STAGES`.
    region : `compilation.whole` or `compilation.mlps`.
    progress : told what is being run.

    Raises
    ------
    KeyError
        For an unknown stage.
    ValueError
        For a network that is patched or compiled already, shorter rows, and no stages.
    """
    network = getattr(model, "network", model)
    inputs = model_inputs(input_ids, None)
    if inputs["input_ids"].shape[1] < 3:
        raise ValueError("`input_ids` must be at least 3 long, for a call with another length")
    if isinstance(stages, str) or not stages:
        raise ValueError(f"`stages` must be a list of one name or more; got {stages!r}")
    eager = forward(network, inputs)
    truth, rows = referee(network), []
    for name in stages:
        progress(f"compile: {name}")
        candidate, work = _compiled(network, compilation.stage(name, region=region), inputs)
        judged = against_referee(network, candidate, input_ids, truth=truth)
        logits = forward(candidate, inputs)
        moved = centred_rms(eager.flatten(0, -2), logits.flatten(0, -2))
        rows.append(
            {
                "stage": name,
                "logit_rms": float(moved.max()),
                "bitwise_equal": same_bits(eager, logits),
                **_errors(judged.frame),
                "word": judged.word,
                **work,
            }
        )
    torch._dynamo.reset()
    return CompileDrift(frame=pd.DataFrame(rows), region=region().name)


def _errors(frame: pd.DataFrame) -> dict[str, float]:
    """RMS error to float64 over all positions, by side."""
    mean = frame[["reference_rms", "candidate_rms"]].pow(2).mean().pow(0.5)
    return {"eager_error": mean["reference_rms"], "compiled_error": mean["candidate_rms"]}


def _compiled(network: Any, entry: Optimization, inputs: dict) -> tuple[Any, dict[str, Any]]:
    """The compiled copy, and what compiling it took."""
    candidate, _ = entry.transform(copied(network))
    shorter = {name: x[:, :-1] for name, x in inputs.items()}
    with compilation.counted() as counters:
        compile_s = _seconds(candidate, inputs)
        first = counters()
        calls = [[_seconds(side, inputs) for side in (candidate, network)] for _ in range(5)]
        run_s, eager_s = map(median, zip(*calls, strict=True))
        forward(candidate, shorter)
        later = counters()
    return candidate, {
        "graphs": first.graphs,
        "graph_breaks": len(first.graph_breaks),
        "recompilations": later.graphs - first.graphs,
        "compile_s": compile_s - run_s,
        "run_s": run_s,
        "eager_s": eager_s,
    }


def _seconds(network: Any, inputs: dict) -> float:
    began = time.perf_counter()
    forward(network, inputs)
    return time.perf_counter() - began
