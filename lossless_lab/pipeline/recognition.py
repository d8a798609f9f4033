"""From whatever a user hands in to a subject: models, entries, functions, folders and files."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from lossless_lab import models, runs
from lossless_lab.engines.callable_engine import CallableEngine
from lossless_lab.engines.protocol import Completion
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.optimizations import Candidate, Optimization, find
from lossless_lab.pipeline.subjects import Live, NotEvidence, Stored, Subject
from lossless_lab.prompts import prompt_set_hash
from lossless_lab.runs.folder import logits_name


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
    if isinstance(given, runs.Run | str | Path):
        return _stored(given, name)
    settings, made = {}, {}
    if isinstance(given, Candidate):
        made = {"optimization": given.optimization, "intact": given.reference_intact}
        settings, name, given = given.settings, name or given.name, given.model
    if isinstance(given, models.Model | nn.Module):
        own = getattr(given, "tokenizer", tokenizer)
        given = TransformersEngine(given, tokenizer=own, **settings)
    if isinstance(given, TransformersEngine):
        engine = replace(given, keep_logits=True)
        return Live(name=name or _name_of(given.model), engine=engine, **made)
    if hasattr(given, "generate") and hasattr(given, "score"):
        return Live(name=name or type(given).__name__, engine=given)
    if callable(given):
        name = name or getattr(given, "__name__", "callable")
        engine = CallableEngine(function=given, name=name, tokenizer=tokenizer)
        return Live(name=name, engine=engine)
    raise NotEvidence(
        "a subject must be an engine (with generate and score), a model, a candidate, a module, a "
        "run folder, a .safetensors file of logits or a function from ids to logits; got "
        f"{type(given).__name__}"
    )


def applied(candidate: Any, reference: Any) -> Any:
    """A catalogue entry or its name as a subject with the reference's other settings."""
    if isinstance(candidate, str) and not Path(candidate).exists():
        _refuse_model_name(candidate)
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


def tokenizer_of(subject: Subject) -> Any:
    """What decodes this subject's outputs, None where nothing does."""
    return getattr(getattr(subject, "engine", None), "tokenizer", None)


def _refuse_model_name(given: Any) -> None:
    if str(given) in models.places.KNOWN and not Path(given).exists():
        raise NotEvidence(f"{str(given)!r} names a model: pass `models.load({str(given)!r})`")


def _stored(given: runs.Run | str | Path, name: str) -> Stored:
    """A run folder, a .safetensors file of logits or a text file with one output per line."""
    if isinstance(given, runs.Run):
        return _from_run(given, name)
    _refuse_model_name(given)
    path = Path(given)
    if path.suffix in (".npy", ".npz"):
        raise NotEvidence(
            f"{path.name}: logits need the ids they belong to beside them; write a "
            ".safetensors file with logits/<prompt_id> and ids/<prompt_id>"
        )
    if path.suffix in (".json", ".jsonl"):
        raise NotEvidence(f"{path} is a part of a run; give the folder that holds it")
    if path.suffix == ".safetensors":
        return Stored(name=name or path.stem, completions=_from_logits(path))
    if path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            run = runs.import_text(path, Path(folder, path.stem))
            return _from_run(run, name or path.name)
    return _from_run(runs.Run(path), name)


def _from_run(run: runs.Run, name: str) -> Stored:
    completions = {}
    for r in run.records:
        ids, logits = run.logits(r.prompt_id, r.sample_index) or (None, None)
        if ids is not None and (tuple(ids.tolist()) != r.output_ids or len(logits) != len(ids)):
            raise runs.RunError(
                f"{run.folder} is damaged: logits.safetensors and outputs.jsonl hold different ids "
                f"of {logits_name(r.prompt_id, r.sample_index)!r}"
            )
        told = ("output_ids", "text", "finish_reason", "logprobs", "top_logprobs", "timings")
        completions[r.prompt_id, r.sample_index] = Completion(
            prompt_ids=r.prompt_ids or (),
            logits=logits,
            **{field: getattr(r, field) for field in told},
        )
    if not completions:
        raise NotEvidence(f"{run.folder.name} holds no outputs")
    found = Stored(
        name=name or run.folder.name,
        completions=completions,
        manifest=dict(run.manifest),
        metrics=run.metrics,
        optimization=_entry(run.manifest.optimization),
    )
    _refuse_incomplete(run, found)
    return found


def _refuse_incomplete(run: runs.Run, found: Stored) -> None:
    """A comparison of what is left would be silent about what was lost."""
    n_prompts, n_samples = run.manifest.n_prompts, found.decoding.n_samples
    promised, held = n_prompts * n_samples, len(found.completions)
    if n_prompts and held != promised:
        unfinished = "" if run.complete else "; the run is unfinished, its command goes on"
        raise NotEvidence(
            f"{run.folder} holds {held} of the {promised} outputs that its manifest promises "
            f"({n_prompts} prompts × {n_samples} samples): {abs(promised - held)} "
            f"{'are missing' if held < promised else 'are too many'}{unfinished}"
        )
    promised_set, prompts = run.manifest.prompt_set_sha256, found.prompts
    known = promised_set != "unknown" and all(p.ids for p in prompts)
    if known and prompt_set_hash(prompts) != promised_set:
        raise runs.RunError(f"{run.folder} is damaged: its outputs answer other prompts than its "
                            "manifest names")  # fmt: skip


def _entry(name: str) -> Optimization | None:
    try:
        return find(name)
    except (KeyError, ValueError):  # "none", one of the user's own, or of another version
        return None


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


def _name_of(model: Any) -> str:
    network = getattr(model, "network", model)
    dtype = str(getattr(network, "dtype", "")).removeprefix("torch.")
    return f"{getattr(model, 'name', type(network).__name__)} {dtype}".strip()
