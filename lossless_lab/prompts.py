"""Prompts: reading and checking a prompt file, texts to token ids, the hash of a prompt set."""

import codecs
import difflib
import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lossless_lab import paths

Language = Literal["en", "zh", "other"]
Category = Literal["faq", "detail", "code", "special", "long", "short", "other"]
FILE_FIELDS = ("id", "text", "ids", "language", "category")
TokenId = Annotated[int, Field(strict=True, ge=0)]
SHOWN_ERRORS = 20


class PromptFileError(ValueError):
    """A prompt file breaks its rules; the message lists file, line, field, rule and value."""


class PromptsLeftOut(UserWarning):
    """Prompts longer than `max_prompt_tokens` were left out; the message names each of them."""


class Prompt(BaseModel):
    """One prompt: a name, and a text or token ids.

    Parameters
    ----------
    id : unique name within a set: 1 to 64 of the characters A-Z a-z 0-9 . _ -
    text : what the user says, or None where only ids are known
    ids : token ids as the model receives them, or None before `tokenize`
    language : language of the instruction
    category : kind of question, see data/prompts/README.md
    templated : True or False once `tokenize` has decided about the chat template

    Examples
    --------
    >>> Prompt(id="greeting", text="你好！", language="zh", category="short").ids is None
    True
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    text: str | None = None
    ids: Annotated[tuple[TokenId, ...] | None, Field(strict=False)] = None
    language: Language = "other"
    category: Category = "other"
    templated: bool | None = None

    @field_validator("text")
    @classmethod
    def _has_content(cls, text):
        if text is not None and not text.strip():
            raise ValueError("must hold more than white space")
        if text is not None and any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError("must be valid Unicode, without half of a surrogate pair")
        return text

    @field_validator("ids")
    @classmethod
    def _has_ids(cls, ids):
        if ids == ():
            raise ValueError("must hold at least one token id")
        return ids

    @model_validator(mode="after")
    def _has_text_or_ids(self):
        if self.text is None and self.ids is None:
            raise ValueError("one of `text` and `ids` is required")
        return self


def read(path: str | Path | None = None) -> list[Prompt]:
    """Read a JSONL prompt file and check every line of it.

    Parameters
    ----------
    path : JSONL file in UTF-8, one object per line; None reads data/prompts/evaluation.jsonl

    Returns
    -------
    list of Prompt, in the order of the file

    Raises
    ------
    PromptFileError
        names file, line, field, rule, value received and the nearest allowed value, for all faults
    FileNotFoundError
        where there is no such file

    Examples
    --------
    >>> len(read()), read()[0].id
    (72, 'faq-en-1')
    """
    path = Path(path) if path is not None else paths.DATA / "prompts" / "evaluation.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"`path`: there is no prompt file {str(path)!r}")
    lines = _decode(path).split("\n")  # never splitlines(): a text may hold U+2028 or U+0085
    if lines[-1] == "":
        lines.pop()
    prompts, faults, first_line = [], [], {}
    for number, line in enumerate(lines, start=1):
        prompt, rules = _parse(line)
        if prompt is not None and prompt.id in first_line:
            rules = [f"`id` must be unique; {prompt.id!r} is on line {first_line[prompt.id]} too"]
        elif prompt is not None:
            first_line[prompt.id] = number
            prompts.append(prompt)
        faults += [f"{path}:{number}: {rule}" for rule in rules]
    if not lines:
        faults = [f"{path}: must hold at least one prompt; the file is empty"]
    if faults:
        more = len(faults) - SHOWN_ERRORS
        tail = [f"... and {more} more"] if more > 0 else []
        raise PromptFileError("\n".join(faults[:SHOWN_ERRORS] + tail))
    return prompts


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


def prompt_difference(
    reference: Sequence[int], candidate: Sequence[int], *, bos_id: int | None = None
) -> str:
    """Where two id lists of one prompt first differ, in words; empty where they are equal.

    Examples
    --------
    >>> prompt_difference([257, 256], [257, 257, 256], bos_id=257)
    'prompts differ at position 1 (extra BOS)'
    """
    reference, candidate = list(reference), list(candidate)
    if reference == candidate:
        return ""
    shared = zip(reference, candidate, strict=False)
    position = next((i for i, (a, b) in enumerate(shared) if a != b), None)
    if position is None:
        position = min(len(reference), len(candidate))
    longer, shorter = sorted((reference, candidate), key=len, reverse=True)
    extra = bos_id is not None and longer[:1] == [bos_id] and longer[1:] == shorter
    cause = "extra BOS" if extra else f"{len(reference)} and {len(candidate)} tokens"
    return f"prompts differ at position {position} ({cause})"


def prompt_set_hash(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of names and contents in order: ids where known, else texts.

    Language and category do not enter, since no model sees them.

    Examples
    --------
    >>> a, b = Prompt(id="a", ids=(1, 2)), Prompt(id="a", ids=(1, 2), language="en")
    >>> prompt_set_hash([a]) == prompt_set_hash([b])
    True
    """
    content = [[p.id, list(p.ids) if p.ids is not None else p.text] for p in prompts]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


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


def _decode(path: Path) -> str:
    raw = path.read_bytes()
    marks = {"UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-8": (codecs.BOM_UTF8,)}
    for name, starts in marks.items():
        if raw.startswith(starts):
            raise PromptFileError(
                f"{path}:1: must be UTF-8 without a byte-order mark; received a {name} mark "
                f"({raw[:3].hex(' ')}); save the file as plain UTF-8"
            )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        found = raw[error.start : error.start + 4].hex(" ")
        raise PromptFileError(f"{path}:{line}: must be UTF-8; received bytes {found}") from None


def _parse(line: str) -> tuple[Prompt | None, list[str]]:
    """The prompt on one line, or the rules which that line breaks."""
    if not line.strip():
        return None, ["line must hold one JSON object; received a blank line"]
    try:
        fields = json.loads(line, object_pairs_hook=_unique_keys)
    except ValueError as error:
        return None, [f"line must be one JSON object; {error}; received {_short(line)}"]
    if not isinstance(fields, dict):
        return None, [f"line must be one JSON object; received {_short(fields)}"]
    if unknown := [name for name in fields if name not in FILE_FIELDS]:
        return None, [f"`{n}` is no field of a prompt; {_near(n, FILE_FIELDS)}" for n in unknown]
    if fields.get("text") is not None and fields.get("ids") is not None:
        return None, [f"`text` and `ids` exclude each other; received both in {_short(line)}"]
    try:
        return Prompt.model_validate(fields), []
    except ValidationError as error:
        return None, [_rule(fault) for fault in error.errors()]


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"a field must occur once; {', '.join(map(repr, twice))} occurs twice")
    return dict(pairs)


def _rule(fault: dict) -> str:
    name = ".".join(map(str, fault["loc"]))
    field = f"`{name}` " if name else ""
    received = f"received {_short(fault['input'])}"
    allowed = {"language": get_args(Language), "category": get_args(Category)}.get(name)
    if fault["type"] == "missing":
        return f"{field}is required; {received}"
    if allowed:
        return f"{field}must be one of {', '.join(allowed)}; {_near(fault['input'], allowed)}"
    if fault["type"] == "string_pattern_mismatch":
        return f"{field}must be 1 to 64 of the characters A-Z a-z 0-9 . _ -; {received}"
    rule = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{field}{rule[0].lower()}{rule[1:]}; {received}"


def _near(value: object, allowed: Sequence[str]) -> str:
    match = difflib.get_close_matches(str(value).lower(), allowed, n=1, cutoff=0.4)
    nearest = f"the nearest is {match[0]!r}" if match else f"allowed are {', '.join(allowed)}"
    return f"received {_short(value)}; {nearest}"


def _short(value: object) -> str:
    shown = repr(value)  # escapes invisible characters, leaves Chinese readable
    return shown if len(shown) <= 80 else shown[:77] + "..."
