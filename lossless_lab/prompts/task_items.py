"""Task items: questions with their right answers, by category; the bundled sets and a validator."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lossless_lab import paths

from .files import Named, decode, nearest, read_items, short

LISTS = ("choices", "answers")  # in CSV a column per entry: choices_0, choices_1, …


class Task(Named):
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
    """Read a JSONL or CSV file of task items and check every line of it.

    Parameters
    ----------
    path : file in UTF-8 (data/tasks/README.md has its fields); CSV where its name ends in .csv;
        None reads data/tasks/<kind>.jsonl.

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
    rows = _csv_rows if path.suffix.lower() == ".csv" else None
    return read_items(path, Task, fields=tuple(Task.model_fields), rows=rows)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict | str]]:
    """First line and fields of each row, or the rule that it breaks."""
    table = csv.reader(io.StringIO(decode(path, mark=True), newline=""), strict=True)
    try:
        header = next(table, [])
        lists = {kind: [n for n in header if n.startswith(f"{kind}_")] for kind in LISTS}
        lists = {kind: [f"{kind}_{i}" for i in range(len(n))] for kind, n in lists.items()}
        wrong = _wrong_columns(header, [n for names in lists.values() for n in names])
        yield from ((1, rule) for rule in wrong)
        start = table.line_num + 1
        for cells in () if wrong else table:
            counts = f"row must have {len(header)} cells; received {len(cells)}"
            same = len(cells) == len(header)
            yield start, _fields(dict(zip(header, cells, strict=True)), lists) if same else counts
            start = table.line_num + 1
        if header and not wrong and start == 2:
            yield 1, "the header must be followed by at least one task; received none"
    except csv.Error as error:
        yield table.line_num, f"row must be CSV; {error}"


def _wrong_columns(header: list[str], listed: list[str]) -> list[str]:
    """The rules that a header breaks; `listed` : the columns that its lists must have."""
    known = [name for name in Task.model_fields if name not in LISTS] + listed
    rules = []
    for i, name in enumerate(header):
        if name not in known or name in header[:i]:
            what = "unknown" if name not in known else "here twice"
            rules.append(f"column {short(name)} is {what}; {nearest(name, known)}")
    needed = [name for name, field in Task.model_fields.items() if field.is_required()]
    lost = [name for name in needed if header and name not in header]
    return rules + [f"column {short(name)} is required; received {short(header)}" for name in lost]


def _fields(row: dict[str, str], lists: dict[str, list[str]]) -> dict:
    """What a row says; an empty cell says nothing, unless a filled one of its list follows."""
    fields: dict = {name: row[name] for name in Task.model_fields if row.get(name)}
    for kind, names in lists.items():
        filled = max((i for i, name in enumerate(names, start=1) if row[name]), default=0)
        fields |= {kind: [row[name] for name in names[:filled]]} if filled else {}
    if fields.get("answer", "").isdecimal():
        fields["answer"] = int(fields["answer"])
    return fields
