"""Prompts and prompt files: every line checked, errors with their place, sets with a name."""

import codecs
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lossless_lab import paths

Language = Literal["en", "zh", "other"]
Category = Literal["faq", "detail", "code", "special", "long", "short", "other"]
FILE_FIELDS = ("id", "text", "ids", "language", "category")
TokenId = Annotated[int, Field(strict=True, ge=0)]
SHOWN_ERRORS = 20


class Named(BaseModel):
    """What one line of a file says: an object with a name, unique within the file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


Item = TypeVar("Item", bound=Named)


class PromptFileError(ValueError):
    """A prompt file breaks its rules; the message lists file, line, field, rule and value."""


class Prompt(Named):
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
    return read_items(path, Prompt, fields=FILE_FIELDS)


def read_items(
    path: Path, model: type[Item], *, fields: Sequence[str], rows: Callable | None = None
) -> list[Item]:
    """The objects of a file in order, each checked by a pydantic model that has an `id`.

    Parameters
    ----------
    fields : the names that an object may hold.
    rows : path to pairs of a line's number and its object, or the rule that the line breaks; None
        reads JSONL.

    Raises
    ------
    PromptFileError, FileNotFoundError
        As `read`.
    """
    noun = model.__name__.lower()
    if not path.is_file():
        raise FileNotFoundError(f"`path`: there is no {noun} file {str(path)!r}")
    items, faults, first_line, number = [], [], {}, 0
    for number, row in (rows or _json_rows)(path):
        item, rules = (None, [row]) if isinstance(row, str) else _checked(row, model, fields)
        if item is not None and item.id in first_line:
            rules = [f"`id` must be unique; {item.id!r} is on line {first_line[item.id]} too"]
        elif item is not None:
            first_line[item.id] = number
            items.append(item)
        faults += [f"{path}:{number}: {rule}" for rule in rules]
    if not number:
        faults = [f"{path}: must hold at least one {noun}; the file is empty"]
    if faults:
        more = len(faults) - SHOWN_ERRORS
        tail = [f"... and {more} more"] if more > 0 else []
        raise PromptFileError("\n".join(faults[:SHOWN_ERRORS] + tail))
    return items


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


def decode(path: Path, *, mark: bool = False) -> str:
    """The text of a UTF-8 file; a byte-order mark is left out with `mark`, refused without."""
    raw = path.read_bytes().removeprefix(codecs.BOM_UTF8 if mark else b"")
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


def lines(text: str) -> list[str]:
    """The lines of a file's text, whose last one may lack its line break."""
    found = text.split("\n")  # never splitlines(): a text may hold U+2028 or U+0085
    return found[:-1] if found[-1] == "" else found


def _json_rows(path: Path) -> Iterator[tuple[int, dict | str]]:
    """Number and object of each line, or the rule that it breaks."""
    for number, line in enumerate(lines(decode(path)), start=1):
        yield number, _object(line)


def _object(line: str) -> dict | str:
    if not line.strip():
        return "line must hold one JSON object; received a blank line"
    try:
        fields = json.loads(line, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        return f"line must be one JSON object; {error}; received {short(line)}"
    if not isinstance(fields, dict):
        return f"line must be one JSON object; received {short(fields)}"
    return fields


def _checked(
    fields: dict, model: type[Item], allowed: Sequence[str]
) -> tuple[Item | None, list[str]]:
    """The item that these fields make, or the rules which they break."""
    if unknown := [name for name in fields if name not in allowed]:
        said = f"is no field of a {model.__name__.lower()}"
        return None, [f"`{n}` {said}; {nearest(n, allowed)}" for n in unknown]
    if fields.get("text") is not None and fields.get("ids") is not None:
        return None, [f"`text` and `ids` exclude each other; received both in {short(fields)}"]
    try:
        return model.model_validate(fields), []
    except ValidationError as error:
        return None, broken_rules(error)


def broken_rules(error: ValidationError) -> list[str]:
    """The rules of a prompt that were broken, in words."""
    return [_rule(fault) for fault in error.errors()]


def refuse_same_names(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError where two prompts have one id."""
    names = [prompt.id for prompt in prompts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"`prompts` must have unique ids; more than one is {', '.join(twice[:5])}")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"a field must occur once; {', '.join(map(repr, twice))} occurs twice")
    return dict(pairs)


def _rule(fault: dict) -> str:
    name = ".".join(map(str, fault["loc"]))
    field = f"`{name}` " if name else ""
    received = f"received {short(fault['input'])}"
    if fault["type"] == "missing":
        return f"{field}is required; {received}"
    if fault["type"] == "literal_error":
        allowed = re.findall(r"'(.*?)'", fault["ctx"]["expected"])
        return f"{field}must be one of {', '.join(allowed)}; {nearest(fault['input'], allowed)}"
    if fault["type"] == "string_pattern_mismatch" and name == "id":
        return f"{field}must be 1 to 64 of the characters A-Z a-z 0-9 . _ -; {received}"
    rule = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{field}{rule[0].lower()}{rule[1:]}; {received}"


def nearest(value: object, allowed: Sequence[str]) -> str:
    """What was received, and the allowed value that is like it."""
    match = difflib.get_close_matches(str(value).lower(), allowed, n=1, cutoff=0.4)
    near = f"the nearest is {match[0]!r}" if match else f"allowed are {', '.join(allowed)}"
    return f"received {short(value)}; {near}"


def short(value: object) -> str:
    """A value as a message shows it."""
    shown = repr(value)  # escapes invisible characters, leaves Chinese readable
    return shown if len(shown) <= 80 else shown[:77] + "..."
