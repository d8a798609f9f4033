"""From whatever a user hands in to a subject: models, entries, functions, folders and files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from lossless_lab import runs
from lossless_lab.engines.callable_engine import CallableEngine
from lossless_lab.engines.protocol import Completion
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.models import Model
from lossless_lab.optimizations import CATALOGUE, Candidate, Optimization, find
from lossless_lab.pipeline.subjects import Live, NotEvidence, Stored, Subject


def as_subject(given: Any, *, name: str = "", tokenizer: Any = None) -> Subject:
    """Turn whatever a user holds into a subject.

    Parameters
    ----------
    given : a subject, an engine, models.Model, optimizations.Candidate, module, run folder (path or
        Run), file of logits (.safetensors), or a function from ids [1, n] to logits.
    name : what reports call it; by default something that fits.
    tokenizer : decodes outputs where `given` brings none.

    Raises
    ------
    NotEvidence
        For anything else, or a file that lacks its ids.
    """
    if isinstance(given, Live | Stored):
        return given
    if isinstance(given, Candidate):
        engine = TransformersEngine(
            given.model,
            tokenizer=getattr(given.model, "tokenizer", tokenizer),
            keep_logits=True,
            **given.settings,
        )
        return Live(
            name=name or given.name,
            engine=engine,
            optimization=given.optimization,
            intact=given.reference_intact,
        )
    if isinstance(given, Model | nn.Module):
        engine = TransformersEngine(
            given, tokenizer=getattr(given, "tokenizer", tokenizer), keep_logits=True
        )
        return Live(name=name or _name_of(given), engine=engine)
    if isinstance(given, TransformersEngine):
        return Live(name=name or _name_of(given.model), engine=replace(given, keep_logits=True))
    if hasattr(given, "generate") and hasattr(given, "score"):
        return Live(name=name or type(given).__name__, engine=given)
    if isinstance(given, runs.Run | str | Path):
        return _stored(given, name)
    if isinstance(given, Callable):
        label = name or getattr(given, "__name__", "callable")
        return Live(
            name=label, engine=CallableEngine(function=given, name=label, tokenizer=tokenizer)
        )
    raise NotEvidence(
        "a subject must be an engine, a model, a candidate, a module, a run folder, a .safetensors "
        f"file of logits or a function from ids to logits; got {type(given).__name__}"
    )


def _stored(given: runs.Run | str | Path, name: str) -> Stored:
    """A run folder, a .safetensors file of logits or a text file with one output per line."""
    if not isinstance(given, runs.Run):
        path = Path(given)
        if path.suffix in (".npy", ".npz"):
            raise NotEvidence(
                f"{path.name}: logits need the ids they belong to beside them; write a "
                ".safetensors file with logits/<prompt_id> and ids/<prompt_id>"
            )
        if path.suffix == ".safetensors":
            return Stored(name=name or path.stem, completions=_from_logits(path))
        if path.is_file():
            return _from_text(path, name)
        given = runs.Run(path)
    completions = {}
    for r in given.records:
        kept = given.logits(r.prompt_id, r.sample_index)
        completions[r.prompt_id, r.sample_index] = Completion(
            prompt_ids=r.prompt_ids or (),
            output_ids=r.output_ids,
            text=r.text,
            finish_reason=r.finish_reason,
            logprobs=r.logprobs,
            top_logprobs=r.top_logprobs,
            timings=r.timings,
            logits=None if kept is None else kept[1],
        )
    if not completions:
        raise NotEvidence(f"{given.folder.name} holds no outputs")
    manifest = {n: getattr(given.manifest, n) for n in type(given.manifest).model_fields}
    entry = manifest["optimization"]
    known = entry in CATALOGUE or entry.startswith("batch-")
    return Stored(
        name=name or given.folder.name,
        completions=completions,
        manifest=manifest,
        metrics=given.metrics,
        optimization=find(entry) if known else None,
    )


def _from_logits(path: Path) -> dict[tuple[str, int], Completion]:
    found = {}
    with safe_open(path, framework="pt") as file:
        keys = set(file.keys())
        for key in sorted(k for k in keys if k.startswith("logits/")):
            prompt_id = key.removeprefix("logits/")
            if f"ids/{prompt_id}" not in keys:
                raise NotEvidence(f"{path.name} holds {key} but no ids/{prompt_id}")
            logits, ids = file.get_tensor(key), file.get_tensor(f"ids/{prompt_id}").tolist()
            if logits.ndim != 2 or len(logits) != len(ids):
                raise NotEvidence(
                    f"{path.name}: {key} must be [{len(ids)}, vocab_size], one row per id; got "
                    f"{tuple(logits.shape)}"
                )
            stem, _, sample = prompt_id.partition("#")
            found[stem, int(sample or 0)] = Completion(
                prompt_ids=(), output_ids=tuple(ids), text="", finish_reason=None, logits=logits
            )
    if not found:
        raise NotEvidence(f"{path.name} holds no logits/<prompt_id>")
    return found


def _from_text(path: Path, name: str) -> Stored:
    with tempfile.TemporaryDirectory() as folder:
        return _stored(runs.import_text(path, Path(folder, path.stem)), name or path.name)


def _name_of(model: Any) -> str:
    network = getattr(model, "network", model)
    dtype = str(getattr(network, "dtype", "")).removeprefix("torch.")
    return f"{getattr(model, 'name', type(network).__name__)} {dtype}".strip()


def applied(candidate: Any, reference: Any) -> Any:
    """A catalogue entry or its name as a subject with the reference's other settings."""
    if isinstance(candidate, str) and not Path(candidate).exists():
        candidate = find(candidate)
    if not isinstance(candidate, Optimization):
        return candidate
    engine = getattr(as_subject(reference), "engine", None)
    if not isinstance(engine, TransformersEngine):
        raise NotEvidence(
            f"{candidate.name!r} can only be applied to a model in this process; "
            f"`reference` is {type(reference).__name__}"
        )
    made = candidate.apply(engine.model)
    return Live(
        name=made.name,
        engine=replace(engine, model=made.model, **made.settings),
        optimization=candidate,
        intact=made.reference_intact,
    )


def is_stored(candidate: Any) -> bool:
    return isinstance(candidate, Stored | runs.Run | str | Path)
