"""From texts to token ids: the chat template, no second BOS, nothing cut in silence."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

from .files import Prompt


class PromptsLeftOut(UserWarning):
    """Prompts longer than `max_prompt_tokens` were left out; the message names each of them."""


def tokenize(
    prompts: Sequence[Prompt],
    model,
    *,
    chat: Literal["auto", True, False] = "auto",
    max_prompt_tokens: int | None = None,
) -> list[Prompt]:
    """Token ids of each prompt, straight from the chat template where the model has one.

    The template goes to ids directly: rendering it to text and tokenising that text lets the
    tokenizer prepend a second BOS. Some templates print today's date; then the ids, and with them
    `prompt_set_hash`, change from one day to the next.

    Parameters
    ----------
    prompts : prompts with text; those that already have ids keep them
    model : has `tokenizer` (or None) and `chat` (has a chat template), as `models.load` returns
    chat : "auto" applies the template where there is one, True insists on it, False never does
    max_prompt_tokens : leave out longer prompts, with a PromptsLeftOut warning that names them;
        None keeps all. Nothing is ever truncated.

    Returns
    -------
    list of Prompt with `ids` and `templated` set

    Raises
    ------
    ValueError
        for a second BOS, an empty id list, an id outside the vocabulary, a missing template or
        tokenizer, or when no prompt is short enough
    """
    if chat not in ("auto", True, False):
        raise ValueError(f'`chat` must be "auto", True or False; received {chat!r}')
    if chat is True and not model.chat:
        raise ValueError(f"`chat` is True, but the tokenizer of {model.name!r} has no template")
    templated = model.chat if chat == "auto" else chat
    done = [p if p.ids is not None else _with_ids(p, model, templated) for p in prompts]
    vocab_size = getattr(getattr(model.network, "config", None), "vocab_size", None)
    for prompt in done:
        largest = max(prompt.ids)
        if vocab_size is not None and largest >= vocab_size:
            rule = f"`ids` must be below {vocab_size}; received {largest}"
            raise ValueError(f"prompt {prompt.id!r}: {rule}")
    return done if max_prompt_tokens is None else _short_enough(done, max_prompt_tokens)


def refuse_second_bos(ids: Sequence[int], bos_id: int | None, *, place: str) -> None:
    """Raise ValueError where a prompt starts with two BOS tokens.

    Examples
    --------
    >>> refuse_second_bos([257, 256], 257, place="prompt 'a'")
    >>> refuse_second_bos([257, 257, 256], 257, place="prompt 'a'")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: prompt 'a': position 1 holds a second BOS (id 257); a prompt has at most one. ...
    """
    if bos_id is not None and tuple(ids[:2]) == (bos_id, bos_id):
        raise ValueError(
            f"{place}: position 1 holds a second BOS (id {bos_id}); a prompt has at most one. Take "
            "ids from the chat template directly, or remove the BOS from the template or the text"
        )


def _with_ids(prompt: Prompt, model, templated: bool) -> Prompt:
    if model.tokenizer is None:
        raise ValueError(f"prompt {prompt.id!r}: {model.name!r} has no tokenizer; give `ids`")
    if templated:
        ids = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
    else:
        ids = model.tokenizer(prompt.text, verbose=False)["input_ids"]  # we check the length
    if not ids:
        raise ValueError(f"prompt {prompt.id!r}: `text` gives no tokens; received {prompt.text!r}")
    refuse_second_bos(ids, model.tokenizer.bos_token_id, place=f"prompt {prompt.id!r}")
    return prompt.model_copy(update={"ids": tuple(ids), "templated": bool(templated)})


def _short_enough(prompts: list[Prompt], max_prompt_tokens: int) -> list[Prompt]:
    kept = [p for p in prompts if len(p.ids) <= max_prompt_tokens]
    names = ", ".join(f"{p.id} ({len(p.ids)})" for p in prompts if len(p.ids) > max_prompt_tokens)
    if prompts and not kept:
        raise ValueError(f"`max_prompt_tokens` = {max_prompt_tokens} leaves out all: {names}")
    if names:
        left = len(prompts) - len(kept)
        message = f"{left} of {len(prompts)} prompts have more than {max_prompt_tokens} tokens"
        warnings.warn(f"{message} and were left out: {names}", PromptsLeftOut, stacklevel=3)
    return kept
