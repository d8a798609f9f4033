"""What is asked of both sides: prompts and decoding settings, from whatever a user hands in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from lossless_lab import prompts as prompt_sets
from lossless_lab.engines.callable_engine import CallableEngine
from lossless_lab.engines.decoding import Decoding
from lossless_lab.pipeline.subjects import Live, NotEvidence, Stored, Subject
from lossless_lab.prompts import Prompt


def decoding_for(
    subject: Subject, given: Decoding | None, *, like: Decoding | None = None
) -> Decoding:
    """Settings of one side, its end ids resolved.

    Parameters
    ----------
    given : what the user asked for; a stored side has its own.
    like : the other side's settings, whose end ids a function takes over, having none.
    """
    if isinstance(subject, Stored):
        return subject.decoding
    given = given or Decoding()
    if like is not None and isinstance(subject.engine, CallableEngine):
        given = replace(given, stop_token_ids=like.stop_token_ids)
    return subject.engine.resolve(given)


def prompts_for(reference: Subject, given: Any, tokenizer: Any) -> list[Prompt]:
    """Prompts with ids: a path, texts, id lists or Prompts; by default those of a stored side.

    Raises
    ------
    NotEvidence
        For texts where there is no tokenizer.
    ValueError
        For no prompts, or any that break the rules of a prompt file.
    """
    if given is None and isinstance(reference, Stored):
        return reference.prompts
    if given is None or isinstance(given, str | Path):
        given = prompt_sets.read(given)
    listed = [_prompt(i, p) for i, p in enumerate(given)]
    if not listed:
        raise ValueError("`prompts` must hold at least one prompt; got none")
    if all(p.ids is not None for p in listed) or isinstance(reference, Stored):
        return listed
    engine = reference.engine
    tokenizer = getattr(engine, "tokenizer", None) or tokenizer
    if tokenizer is None:
        raise NotEvidence("`prompts` must be token ids where no tokenizer is given; got texts")
    chat = bool(getattr(tokenizer, "chat_template", None))
    model = SimpleNamespace(
        name=reference.name, tokenizer=tokenizer, chat=chat, network=reference.network
    )
    return prompt_sets.tokenize(listed, model)


def _prompt(index: int, given: Any) -> Prompt:
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        return Prompt(id=f"prompt-{index}", text=given)
    return Prompt(id=f"prompt-{index}", ids=tuple(int(i) for i in given))


def require_memory(subject: Subject, prompts: Sequence[Prompt], decoding: Decoding) -> None:
    """Raise ValueError where both sides' logits would take more than half of the free memory."""
    if not isinstance(subject, Live) or subject.network is None:
        return
    vocab_size = subject.network.get_input_embeddings().num_embeddings
    needed = 8 * len(prompts) * decoding.n_samples * decoding.max_new_tokens * vocab_size
    available = psutil.virtual_memory().available
    if needed > available / 2:
        raise ValueError(
            f"{len(prompts)} prompts × {decoding.n_samples} samples × {decoding.max_new_tokens} "
            f"tokens of {vocab_size} logits take {needed / 2**30:.1f} GiB for both sides, more "
            f"than half of the {available / 2**30:.1f} GiB at hand; use fewer prompts or tokens"
        )
