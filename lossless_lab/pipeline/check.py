"""The one question: is this candidate lossless against this reference? `check` answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lossless_lab.engines.callable_engine import CallableEngine
from lossless_lab.engines.decoding import Decoding
from lossless_lab.numerical.noise import NoiseFloor
from lossless_lab.pipeline.asked import decoding_for
from lossless_lab.pipeline.recognition import applied, as_subject, tokenizer_of
from lossless_lab.pipeline.study import Study
from lossless_lab.pipeline.subjects import Live, Stored
from lossless_lab.pipeline.tasks import with_task_quality
from lossless_lab.semantic.tasks import TaskComparison
from lossless_lab.verdict import Verdict


def check(
    reference: Any,
    candidate: Any,
    prompts: Any = None,
    *,
    decoding: Decoding | None = None,
    tokenizer: Any = None,
    margins: Mapping[str, float] | None = None,
    floor: NoiseFloor | None = None,
    n_variants: int = 19,
    under_test: Sequence[str] = (),
    tasks: TaskComparison | None = None,
    progress: bool = True,
) -> Verdict:
    """Is `candidate` lossless against `reference` on these prompts, and at which levels?

    Parameters
    ----------
    reference, candidate : models, modules, engines, functions from ids [1, n] to logits, run
        folders or .safetensors files of logits. `candidate` may also be a catalogue entry or its
        name, which is then applied to the reference's model.
    prompts : path of a prompt file, texts, id lists or Prompts; by default those of the stored
        side, else the bundled evaluation set. Prompts with the same ids count once.
    decoding : how tokens are chosen; greedy, 32 new tokens by default.
    tokenizer : for modules and functions, which bring none.
    margins : {"1b": share of prompts, "2": mean total variation}, over the defaults.
    floor : a noise floor measured before; by default it is measured where the logits differ.
    n_variants : harmless variants that set the floor (19 for a 5 % rule); 0 measures none.
    under_test : manifest fields that may differ besides those the entry changes.
    tasks : items that both sides answered (`semantic.tasks.compare_tasks`), for level 3.
    progress : show what is being done.

    Returns
    -------
    Verdict
        INVALID, with the difference named, where the two sides were not asked the same thing;
        VACUOUS where both are one and the same network.

    Raises
    ------
    ValueError
        For input that is no subject, unknown names, prompts that do not fit the model, stored
        outputs that are incomplete.
    """
    reference = as_subject(reference, tokenizer=tokenizer)
    tokenizer = tokenizer or tokenizer_of(reference)
    candidate = as_subject(applied(candidate, reference), tokenizer=tokenizer)
    if isinstance(reference, Live):
        if prompts is None and isinstance(candidate, Stored):
            prompts = candidate.prompts
        if isinstance(reference.engine, CallableEngine):  # declares no end ids of its own
            ends = decoding_for(candidate, decoding).stop_token_ids
            decoding = replace(decoding or Decoding(), stop_token_ids=ends)
    study = Study(
        reference,
        prompts,
        decoding=decoding,
        tokenizer=tokenizer,
        margins=margins,
        floor=floor,
        n_variants=n_variants,
        progress=progress,
    )
    verdict = study.add(candidate, under_test=under_test)
    return verdict if tasks is None else with_task_quality(verdict, tasks)
