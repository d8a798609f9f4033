"""`run`: prompts through a model into a run folder, with proof that its optimisation ran."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from safetensors import SafetensorError

from lossless_lab import models, optimizations, pipeline, prompts, runs
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.pipeline import triage


def run(arguments: argparse.Namespace) -> None:
    """Record a run; all that can be wrong with the request is said before anything is written."""
    fields = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    decoding = Decoding(**{n: getattr(arguments, n) for n in (*fields, "seed", "n_samples")})
    name = arguments.optimization
    entry = None if name == "none" else optimizations.find(name)
    read = prompts.read(arguments.prompts)
    model = loaded(arguments)
    asked = _fitting(read, model, decoding.max_new_tokens, arguments.limit)
    settings: dict[str, Any] = {"top_logprobs": arguments.top_logprobs}
    if entry is not None:
        candidate = entry.apply(model)
        model, settings = candidate.model, settings | candidate.settings
    if arguments.batch_size is not None:
        settings["batch_size"] = arguments.batch_size
    engine = TransformersEngine(model, keep_logits=arguments.save_logits, **settings)
    run = runs.record(
        arguments.folder,
        engine,
        asked,
        decoding,
        optimization=name,
        save_logits=arguments.save_logits,
        progress=sys.stderr.isatty(),
    )
    if entry is not None and run.metrics.get("witness") is None:
        subject = pipeline.Live(name=name, engine=engine, optimization=entry)
        run.add_metrics(**_trace(run, subject, asked))
    print(f"{len(run.records)} outputs in {arguments.folder}")


def loaded(arguments: argparse.Namespace) -> models.Model:
    """The model that --model, --dtype, --device and --attention name."""
    try:
        return models.load(
            arguments.model,
            dtype=arguments.dtype,
            device=arguments.device,
            attn_implementation=arguments.attention,
        )
    except (RuntimeError, ImportError, SafetensorError) as error:
        where = f"{arguments.model} with {arguments.dtype}, {arguments.device}"
        said = str(error).splitlines()[0]
        raise ValueError(f"cannot load {where}, {arguments.attention}: {said}") from error


def _fitting(
    read: list[prompts.Prompt], model: models.Model, max_new_tokens: int, limit: int | None
) -> list[prompts.Prompt]:
    """Prompts with ids, up to the `limit`-th of those that fit the model's context."""
    asked = prompts.tokenize(read, model)
    context = getattr(model.network.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return asked[:limit]
    room = context - max_new_tokens
    if room < 1:
        raise ValueError(
            f"`--max-new-tokens` {max_new_tokens} leaves no room for a prompt in the context of "
            f"{context} tokens of {model.name}"
        )
    fits = [i for i, prompt in enumerate(asked) if len(prompt.ids) <= room]
    if limit is not None and limit <= len(fits):
        asked = asked[: fits[limit - 1] + 1]
    return prompts.tokenize(asked, model, max_prompt_tokens=room)


def _trace(run: runs.Run, subject: pipeline.Live, asked: list[prompts.Prompt]) -> dict[str, Any]:
    """What shows that the optimisation ran ("" for nothing), and how many positions needed it."""
    seen = triage.witness(subject, asked, run.manifest.decoding)
    exercised, n_positions = triage.exercised(subject, run.records)
    return {"witness": seen, "exercised": exercised, "n_positions": n_positions}
