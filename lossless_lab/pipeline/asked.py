"""What is asked of both sides: prompts and decoding settings, from whatever a user hands in."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from lossless_lab import prompts as prompt_sets
from lossless_lab.engines.callable_engine import CallableEngine
from lossless_lab.engines.decoding import Decoding
from lossless_lab.models.planning import refuse_if_beyond
from lossless_lab.pipeline.subjects import Live, NotEvidence, Stored, Subject
from lossless_lab.prompts import Prompt
from lossless_lab.prompts.files import broken_rules, refuse_same_names


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
    """Prompts with ids: a path, texts, id lists, Prompts or name -> any; a stored side's own.

    Raises
    ------
    NotEvidence
        For texts where there is no tokenizer.
    ValueError
        For no prompts, two of one name, or any that break the rules of a prompt file.
    """
    if given is None and isinstance(reference, Stored):
        return reference.prompts
    if given is None or isinstance(given, str | Path):
        given = _read(given)
    if not isinstance(given, Iterable):
        rule = "a path, texts, lists of token ids or Prompts"
        raise ValueError(f"`prompts` must be {rule}; got {type(given).__name__}")
    named = given.items() if isinstance(given, Mapping) else ((None, p) for p in given)
    listed = [_prompt(i, *pair) for i, pair in enumerate(named)]
    if not listed:
        raise ValueError("`prompts` must hold at least one prompt; got none")
    refuse_same_names(listed)
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


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts without those whose ids came before, with a warning: they are no further evidence."""
    firsts: dict[Any, Prompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.ids or prompt.id, prompt)
    if repeated := len(prompts) - len(firsts):
        warnings.warn(
            f"{repeated} of {len(prompts)} prompts repeat the token ids of another and were left "
            "out: they are no further evidence",
            stacklevel=4,
        )
    return list(firsts.values())


def _read(path: str | Path | None) -> list[Prompt]:
    try:
        return prompt_sets.read(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; for a single text give a list: [text]") from None


def _prompt(index: int, name: str | None, given: Any) -> Prompt:
    if isinstance(given, Prompt):
        return given
    try:
        text = isinstance(given, str)
        content = {"text": given} if text else {"ids": [*map(operator.index, given)]}
        return Prompt(id=f"prompt-{index}" if name is None else name, **content)
    except ValidationError as error:
        raise ValueError(f"`prompts[{index}]`: {'; '.join(broken_rules(error))}") from None
    except TypeError:
        rule = "a text, a list of token ids or a Prompt"
        raise ValueError(f"`prompts[{index}]` must be {rule}; got {given!r:.80}") from None


def require_memory(subject: Subject, prompts: Sequence[Prompt], decoding: Decoding) -> None:
    """Raise ValueError where both sides' logits would take more than half of the free memory."""
    if isinstance(subject, Live) and subject.network is not None:
        vocab_size = subject.network.get_input_embeddings().num_embeddings
        n = len(prompts) * decoding.n_samples * decoding.max_new_tokens
        refuse_if_beyond(
            8 * n * vocab_size,
            f"{len(prompts)} prompts × {decoding.n_samples} samples × {decoding.max_new_tokens} "
            f"tokens of {vocab_size} logits, for both sides",
        )
