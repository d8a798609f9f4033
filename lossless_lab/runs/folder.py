"""A run folder on disk: strict JSON, atomic writes, and reading back what is there."""

import json
import os
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from .manifest import Manifest

# What a reader that splits lines freely, or is strict about UTF-8, would trip over.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class RunError(ValueError):
    """A run folder is missing, damaged, or belongs to another run; the message names the place."""


class Record(BaseModel):
    """One output: of sample `sample_index` of prompt `prompt_id`.

    `output_ids` is None where only text is known, () where an engine wrote nothing. A logprob that
    was not finite is None. `finish_reason` is None where nobody told. Half a surrogate pair, which
    is no text, is stored as U+FFFD.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    prompt_id: str
    sample_index: int
    prompt_ids: tuple[int, ...] | None
    output_ids: tuple[int, ...] | None
    text: str
    finish_reason: str | None
    logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float | None], ...], ...] | None = None
    timings: dict[str, float] = {}


class Run:
    """What happened: a folder with manifest.json, outputs.jsonl and, once complete, metrics.json.

    Parameters
    ----------
    folder : path

    Raises
    ------
    RunError
        Where there is no manifest, or it cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        _ = self.manifest

    @cached_property
    def manifest(self) -> Manifest:
        """What went in."""
        path = self.folder / "manifest.json"
        if not path.is_file():
            raise RunError(f"`folder`: {self.folder} holds no manifest.json, so it is no run")
        return _read(_MANIFEST, path.read_bytes(), path)

    @property
    def records(self) -> list[Record]:
        """The outputs in order; a torn last line is left out."""
        path = self.folder / "outputs.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(_read(_RECORD, line, f"{path}:{number}"))
            except RunError:
                if number == len(lines) and not self.complete:
                    break
                raise
        lines = {}
        for number, record in enumerate(found, start=1):
            key = (record.prompt_id, record.sample_index)
            if lines.setdefault(key, number) != number:
                said = f"prompt {key[0]!r}, sample {key[1]} stands there more than once"
                raise RunError(f"{path}:{number} is damaged: {said}")
        return found

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return (self.folder / "metrics.json").is_file()

    @property
    def metrics(self) -> dict[str, Any]:
        """What came out; empty until the run is complete."""
        path = self.folder / "metrics.json"
        return _read(_METRICS, path.read_bytes(), path) if path.is_file() else {}

    def logits(self, prompt_id: str, sample_index: int = 0) -> tuple[Any, Any] | None:
        """(ids, logits [n_output, vocab_size]), row t being the law of ids[t]; None if not kept."""
        from safetensors import safe_open

        path = self.folder / "logits.safetensors"
        if not path.is_file():
            return None
        name = logits_name(prompt_id, sample_index)
        with safe_open(path, framework="pt") as stored:
            if f"logits/{name}" not in stored.keys():  # noqa: SIM118 (not a mapping)
                raise KeyError(f"{path} holds no logits of {name!r}")
            return stored.get_tensor(f"ids/{name}"), stored.get_tensor(f"logits/{name}")

    def add_metrics(self, **fields: Any) -> None:
        """Add what is known only afterwards (witness, exercised, …) to metrics.json."""
        write_json(self.folder / "metrics.json", self.metrics | fields)

    def to_frame(self) -> pd.DataFrame:
        """One row per output."""
        rows = [
            {
                "prompt_id": r.prompt_id,
                "sample_index": r.sample_index,
                "n_output": None if r.output_ids is None else len(r.output_ids),
                "finish_reason": r.finish_reason,
                "text": r.text,
                **{k: v for k, v in r.timings.items() if k.endswith("_ms")},
            }
            for r in self.records
        ]
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        m, state = self.manifest, "complete" if self.complete else "unfinished"
        return f"{self.folder.name}: {m.model_id}, {m.optimization}, {m.n_prompts} prompts, {state}"

    __repr__ = __str__


_MANIFEST, _RECORD, _METRICS = map(TypeAdapter, (Manifest, Record, dict[str, Any]))


def _read(kind: TypeAdapter, content: bytes, place: str | Path) -> Any:
    """What the JSON at a place holds, if it is of that kind."""
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise RunError(f"{place} is damaged: {where}: {first['msg']}") from None


def logits_name(prompt_id: str, sample_index: int) -> str:
    """Name of an output inside logits.safetensors: the prompt's, then `#` and the sample."""
    return prompt_id if sample_index == 0 else f"{prompt_id}#{sample_index}"


def whole_characters(text: str) -> str:
    """The text with surrogate pairs joined and single halves replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_line(value: Any) -> bytes:
    """One line of strict JSON in UTF-8: no NaN, no character that breaks a line.

    Examples
    --------
    >>> json_line({"text": "中\\u2028"}).decode()
    '{"text": "中\\\\u2028"}\\n'
    """
    return _strict(value)


def append(path: Path, lines: Iterable[bytes]) -> None:
    """Add lines in one write and wait until they are on disk."""
    _put(path, "ab", b"".join(lines))


def write_atomically(path: Path, content: bytes) -> None:
    """All of the content or the former file, never a part."""
    part = path.with_name(path.name + ".part")
    _put(part, "wb", content)
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    """Strict, indented JSON, written atomically."""
    write_atomically(path, _strict(value, indent=1))


def _strict(value: Any, indent: int | None = None) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"
    return _UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", text).encode()


def _put(path: Path, mode: str, content: bytes) -> None:
    with open(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
