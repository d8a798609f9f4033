"""Runs beside the two that are compared: the reference's noise floor, and both sides in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from lossless_lab.engines.conditions import kernels
from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.padding import forward_logits
from lossless_lab.engines.protocol import Completion, batches, score_batches
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.engines.variants import harmless_variants
from lossless_lab.numerical.flips import FlipRisk, flip_risk, top_two
from lossless_lab.numerical.noise import NO_LAW, NoiseFloor, centred_peak, centred_rms, noise_floor
from lossless_lab.numerical.parts import compiled_parts
from lossless_lab.numerical.tokens import first_divergence
from lossless_lab.numerical.twins import distance_in_float64, twin
from lossless_lab.optimizations.entry import copied, patched
from lossless_lab.pipeline.subjects import Live, Subject
from lossless_lab.prompts import Prompt

Rows = Sequence[Sequence[int]]
Scorer = Callable[[Rows, Rows], list[torch.Tensor]]
_N_TWINS = 40
# manifest field under test -> engine fields whose variants then may not set the floor
_UNDER_TEST = {
    "batch_size": {"batch_size", "companions"},
    "cache": {"cache"},
    "threads": {"threads"},
    "attention": {"attention"},
}


def measured_floor(
    reference: Live,
    completions: Sequence[Completion],
    *,
    under_test: Sequence[str] = (),
    n_variants: int = 19,
    measured: dict[str, dict[str, np.ndarray]] | None = None,
    progress: Callable[[str], Any] = lambda what: None,
) -> NoiseFloor | None:
    """Noise floor of the reference along its own outputs, over its first harmless variants.

    Parameters
    ----------
    completions : the reference's, with logits.
    under_test : manifest fields that the candidate changes; a variant that alters one of them sets
        no floor, so that what is judged never sets the measure.
    n_variants : 19 or more for a rule of 5 %; m of them pass the level by chance at 1/(m+1).
    measured : variants run before, by name; those run now are added, so that floors share them.
    progress : told what is being run.

    Returns
    -------
    NoiseFloor, or None where the engine knows no harmless variants.
    """
    if not isinstance(reference.engine, TransformersEngine):
        return None
    measured = {} if measured is None else measured
    chosen = dict(islice(_admissible(reference.engine, under_test), n_variants))
    for name, scored in ({"unchanged": _by_engine(reference.engine)} | chosen).items():
        if name not in measured:
            progress(f"noise floor: {name}")
            measured[name] = _moved(completions, scored)
    if not chosen:
        return None
    floor = noise_floor(
        {name: measured[name]["rms"] for name in chosen},
        top_logits=np.concatenate([c.logits.max(-1).values.numpy() for c in completions]),
        dtype=reference.network.dtype,
        self_rms=measured["unchanged"]["rms"],
    )
    return replace(floor, peaks={n: float(measured[n]["peak"].max()) for n in chosen})


def measured_risk(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    floor: NoiseFloor | None,
    measured: Mapping[str, Mapping[str, np.ndarray]],
) -> FlipRisk | None:
    """How likely each token flips by the noise of the variants that set `floor`.

    None where they were not run here (a floor that was given), or are no measure of noise.
    """
    if floor is None or floor.not_invariant or not {*floor.variants} <= {*measured}:
        return None
    ends = np.cumsum([len(c.output_ids) for c in completions])[:-1]
    names = [p.id for p in prompts for _ in range(len(completions) // len(prompts))]
    tops = {name: top_two(c.logits) for name, c in zip(names, completions, strict=True)}
    split = [np.split(measured[name]["margin"], ends) for name in floor.variants]
    return flip_risk(tops, [dict(zip(names, parts, strict=True)) for parts in split])


def _moved(completions: Sequence[Completion], scored: Scorer) -> dict[str, np.ndarray]:
    """How far the logits of each position, and its top-2 difference, lie from the completions'."""
    pairs = ([c.prompt_ids for c in completions], [c.output_ids for c in completions])
    found = [(c.logits, x) for c, x in zip(completions, scored(*pairs), strict=True)]
    measures = {"rms": centred_rms, "peak": centred_peak}
    measures["margin"] = lambda own, other: top_two(own).change(other)
    return {
        name: np.nan_to_num(np.concatenate([measure(*pair) for pair in found]), **NO_LAW)
        for name, measure in measures.items()
    }


def _admissible(
    engine: TransformersEngine, under_test: Sequence[str]
) -> Iterator[tuple[str, Scorer]]:
    """Variants that leave everything under test alone: two through generate, then the cheap ones.

    The cheap ones read prompt and output in one pass without a cache, which is the same function
    and costs a small part of decoding it token by token: first through both attention kernels,
    then equivalent twins, whose noise is drawn anew each time, then other shapes of batches, many
    of which turn out bitwise the same.
    """
    tested = set().union(*(_UNDER_TEST.get(name, set()) for name in under_test))
    slow = []
    for name, make in harmless_variants(engine).items():
        variant = make()
        if all(getattr(variant, field) == getattr(engine, field) for field in tested):
            slow.append((name, _by_engine(variant)))
    yield from slow[:2]
    one_pass = [] if "cache" in tested else list(_one_pass_variants(engine, tested))
    yield from one_pass[:2]
    yield from _twin_variants(engine, through_cache="cache" in tested)
    yield from (*one_pass[2:], *slow[2:])


def _twin_variants(
    engine: TransformersEngine, *, through_cache: bool
) -> Iterator[tuple[str, Scorer]]:
    """Twins made one at a time, where the architecture has any and memory for a copy is at hand."""
    network = engine.network
    size = sum(p.nbytes for p in network.parameters())
    if patched(network) or compiled_parts(network) or 6 * size > psutil.virtual_memory().available:
        return
    row = torch.arange(1, 9, device=network.device)[None] % network.config.vocab_size
    try:  # a wrong twin would make a floor that anything passes
        if not distance_in_float64(network, twin(network, seed=0), row) <= 1e-9:
            return
    except ValueError:  # no twin of this architecture
        return

    def scored(seed: int, prompts: Rows, outputs: Rows) -> list[torch.Tensor]:
        member = replace(engine, model=twin(network, seed=seed))
        if through_cache:
            return score_batches(member, prompts, outputs)
        return _one_pass(member, engine.batch_size, 0, None, prompts, outputs)

    for seed in range(_N_TWINS):
        yield f"equivalent twin {seed}", partial(scored, seed)


def _by_engine(engine: TransformersEngine) -> Scorer:
    return lambda prompts, outputs: score_batches(engine, prompts, outputs)


def _one_pass_variants(
    engine: TransformersEngine, tested: set[str]
) -> Iterator[tuple[str, Scorer]]:
    sizes = (engine.batch_size,) if "batch_size" in tested else (1, 2, 3, 4)
    kernels_ = (None,) if "attention" in tested else ("sdpa", "eager")
    for columns in (0, 1, 3, 5, 8, 13, 21):
        for rows in sizes:
            for kernel in kernels_:
                name = f"one pass, {rows} rows, {columns} pad columns, {kernel or 'same'} attention"
                yield name, partial(_one_pass, engine, rows, columns, kernel)


@torch.no_grad()
def _one_pass(
    engine: TransformersEngine,
    n_rows: int,
    columns: int,
    kernel: str | None,
    prompts: Rows,
    outputs: Rows,
) -> list[torch.Tensor]:
    whole = [[*p, *o[:-1]] for p, o in zip(prompts, outputs, strict=True)]
    found: list[torch.Tensor] = []
    with kernels(engine.network, threads=engine.threads, attention=kernel):
        for rows in batches(len(whole), n_rows):
            given = [whole[i] for i in rows]
            found += forward_logits(engine.network, given, extra=columns, pad_id=engine.pad_id)
    return [logits[-len(o) :] for logits, o in zip(found, outputs, strict=True)]


def not_repeated(
    side: Subject,
    own: Sequence[Completion],
    prompts: Sequence[Prompt],
    decoding: Decoding,
    *,
    first: int = 0,
) -> str:
    """Whether a side answers a greedy batch, that of the first, otherwise when asked again."""
    if not (isinstance(side, Live) and decoding.greedy and decoding.n_samples == 1):
        return ""
    start = first - first % side.engine.batch_size
    asked = prompts[start : start + side.engine.batch_size]
    for i, now in enumerate(side.complete(asked, decoding), start):
        if (at := first_divergence(own[i].output_ids, now.output_ids)) is not None:
            told = f"prompt {prompts[i].id!r} asked again differs from token {at} on"
            return f"{side.name} does not repeat itself: {told}, by chance or by a cache"
    return ""


def in_float32(subject: Live) -> Live:
    """The same engine settings around float32 copies of its network and its assistant."""
    engine = subject.engine

    def widened(model: Any) -> Any:
        network = copied(getattr(model, "network", model)).float()
        return network if isinstance(model, nn.Module) else replace(model, network=network)

    assistant = None if engine.assistant is None else widened(engine.assistant)
    return replace(
        subject, engine=replace(engine, model=widened(engine.model), assistant=assistant)
    )
