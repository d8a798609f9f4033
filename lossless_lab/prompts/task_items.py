"""Task items: questions with their right answers, by category; the bundled sets and a validator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lossless_lab import paths

from .files import read_items


class Task(BaseModel):
    """One question: with choices and the index of the right one, or with its right answers.

    Parameters
    ----------
    id : unique name within a file: 1 to 64 of the characters A-Z a-z 0-9 . _ -
    category : business scenario or skill; lower-case letters and -
    language : "en", "zh" or "code"
    prompt : what the model reads.
    choices, answer : different continuations of the prompt as they follow it, and the index of the
        right one.
    answers : every free answer that is right.
    group : items that share it are variants of one text, and count once as evidence; the prompt
        itself by default.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    category: Annotated[str, Field(pattern=r"^[a-z][a-z-]*$")]
    language: Literal["en", "zh", "code"]
    prompt: Annotated[str, Field(min_length=1)]
    choices: list[Annotated[str, Field(min_length=1)]] | None = None
    answer: int | None = None
    answers: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    group: str | None = None

    @model_validator(mode="after")
    def _has_one_kind_of_answer(self):
        if (self.choices is None) == (self.answers is None):
            raise ValueError("an item has either `choices` with `answer`, or `answers`")
        if (self.choices is None) != (self.answer is None):
            raise ValueError("`choices` and `answer` go together")
        if self.choices is not None:
            if len(self.choices) < 2 or len(set(self.choices)) < len(self.choices):
                raise ValueError("`choices` must be two or more, all different")
            if not 0 <= self.answer < len(self.choices):
                raise ValueError(f"`answer` must be an index of `choices`; got {self.answer}")
        return self


def read_tasks(
    path: str | Path | None = None, *, kind: Literal["choice", "free"] = "choice"
) -> list[Task]:
    """Read a JSONL file of task items and check every line of it.

    Parameters
    ----------
    path : JSONL file in UTF-8, one object per line; None reads data/tasks/<kind>.jsonl.

    Raises
    ------
    PromptFileError, FileNotFoundError
        As `read`: all faults with file, line, field, rule and value.

    Examples
    --------
    >>> len(read_tasks()), len(read_tasks(kind="free"))
    (1843, 340)
    """
    path = Path(path) if path is not None else paths.DATA / "tasks" / f"{kind}.jsonl"
    return read_items(path, Task, fields=tuple(Task.model_fields))
