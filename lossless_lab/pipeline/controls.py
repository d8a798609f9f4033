"""Runs beside the two that are compared: the reference's noise floor, and both sides in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from torch import nn

from lossless_lab.engines.protocol import Completion, score_batches
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.engines.variants import harmless_variants
from lossless_lab.numerical.noise import NoiseFloor, centred_rms, noise_floor
from lossless_lab.pipeline.subjects import Live

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
    n_variants: int = 4,
    measured: dict[str, np.ndarray] | None = None,
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
    outputs = [c.output_ids for c in completions]
    ids = [c.prompt_ids for c in completions]

    measured = {} if measured is None else measured

    def rms(name: str, engine: Any) -> np.ndarray:
        if name not in measured:
            progress(f"noise floor: {name}")
            scored = score_batches(engine, ids, outputs)
            pairs = zip(completions, scored, strict=True)
            measured[name] = np.concatenate([centred_rms(c.logits, x) for c, x in pairs])
        return measured[name]

    chosen = islice(_admissible(reference.engine, under_test), n_variants)
    found = {name: rms(name, engine) for name, engine in chosen}
    if not found:
        return None
    return noise_floor(
        found,
        top_logits=np.concatenate([c.logits.max(-1).values.numpy() for c in completions]),
        dtype=reference.network.dtype,
        self_rms=rms("unchanged", reference.engine),
    )


def _admissible(
    engine: TransformersEngine, under_test: Sequence[str]
) -> Iterator[tuple[str, TransformersEngine]]:
    """Variants, each made when asked for, that leave everything under test alone."""
    tested = set().union(*(_UNDER_TEST.get(name, set()) for name in under_test))
    for name, make in harmless_variants(engine).items():
        variant = make()
        if all(getattr(variant, field) == getattr(engine, field) for field in tested):
            yield name, variant


def in_float32(subject: Live) -> Live:
    """The same engine settings around float32 copies of its network and its assistant."""
    engine = subject.engine

    def widened(model: Any) -> Any:
        network = copy.deepcopy(getattr(model, "network", model)).float()
        return network if isinstance(model, nn.Module) else replace(model, network=network)

    assistant = None if engine.assistant is None else widened(engine.assistant)
    return replace(
        subject, engine=replace(engine, model=widened(engine.model), assistant=assistant)
    )
