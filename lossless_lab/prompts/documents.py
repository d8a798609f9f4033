"""Documents: texts that models read and are compared on; the bundled corpus and its validator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lossless_lab import paths

from .files import Named, read_items


class Document(Named):
    """One independent text.

    Parameters
    ----------
    id : unique name within a file: 1 to 64 of the characters A-Z a-z 0-9 . _ -
    language : "en", "zh" or "code"
    kind : sort of text, for instance news, recipe, table, python; lower-case letters
    text : 20 characters or more, with no white space around it
    """

    language: Literal["en", "zh", "code"]
    kind: Annotated[str, Field(pattern=r"^[a-z]+$")]
    text: Annotated[str, Field(min_length=20, pattern=r"(?s)^\S.*\S$")]


def read_documents(
    path: str | Path | None = None, *, part: Literal["evaluation", "calibration"] = "evaluation"
) -> list[Document]:
    """Read a JSONL file of documents and check every line of it.

    Parameters
    ----------
    path : JSONL file in UTF-8, one object per line; None reads data/corpus/<part>.jsonl.
    part : the bundled set that is judged on, or the one disjoint from it that may tune a method.

    Raises
    ------
    PromptFileError, FileNotFoundError
        As `read`: all faults with file, line, field, rule and value.

    Examples
    --------
    >>> len(read_documents()), len(read_documents(part="calibration"))
    (157, 43)
    """
    path = Path(path) if path is not None else paths.DATA / "corpus" / f"{part}.jsonl"
    return read_items(path, Document, fields=tuple(Document.model_fields))
