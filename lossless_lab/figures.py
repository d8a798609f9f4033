"""Saves a figure or table with its data and origin; the same input gives the same bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from . import __version__, paths
from .plots.labels import escaped, make_drawable
from .plots.theme import size
from .results import Result

# An absolute path inside a text, and its last part.
_PATH = re.compile(
    r"(?:(?<![\w.:/~-])~?/|\b[A-Za-z]:[\\/])(?:[^\s'\",;/\\]+[\\/])+([^\s'\",;/\\]+)"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Result):
    """What was written: files by suffix, the data's SHA-256, and whether anything changed."""

    name: str
    files: Mapping[str, Path]
    data_sha256: str
    changed: bool

    def to_frame(self) -> pd.DataFrame:
        """One row a file, with its size in bytes."""
        rows = [(path.name, path.stat().st_size) for path in self.files.values()]
        return pd.DataFrame(rows, columns=["file", "size_bytes"])

    def __str__(self) -> str:
        state = "saved" if self.changed else "unchanged"
        return f"{self.name} ({', '.join(self.files)}) {state}, data {self.data_sha256[:12]}"


def save(
    fig: Figure,
    name: str,
    data: pd.DataFrame,
    provenance: Mapping,
    *,
    preset: str = "single",
    folder: Path | None = None,
) -> Saved:
    """Write `name`.png, .svg, .csv and .json; files that would not change are left alone.

    Parameters
    ----------
    fig : figure; saved at the preset's size unless it already has the preset's width.
    name : file name without suffix.
    data : the frame that was drawn.
    provenance : notebook, parameters and what else belongs with the figure, as JSON values;
        an absolute path in it is cut to its last part.
    preset : "single" (3.35 in), "double" (6.9 in) or "slide" (16:9, 1920 pixels wide).
    folder : where to write; figures/ by default.

    Raises
    ------
    ValueError where `name`, `preset` or `provenance` breaks its rule.
    """
    pictures = _render(fig, *size(preset))
    return _write(name, pictures, data, {**provenance, "preset": preset}, folder)


def save_table(
    frame: pd.DataFrame, name: str, provenance: Mapping, *, folder: Path | None = None
) -> Saved:
    """Write a table as `name`.md, .tex and .csv, its provenance as .json; as `save`."""
    texts = {"md": to_markdown(frame).encode(), "tex": to_latex(frame).encode()}
    return _write(name, texts, frame, provenance, folder)


def to_markdown(frame: pd.DataFrame) -> str:
    r"""Markdown table whose cells are on one line each, with pipes escaped.

    >>> print(to_markdown(pd.DataFrame({"token": ["a|b"]})))
    | token   |
    |:--------|
    | a\|b    |
    """
    cells = frame.map(lambda value: _cell(value).replace("|", r"\|"))
    return cells.to_markdown(index=False, disable_numparse=True)


def to_latex(frame: pd.DataFrame) -> str:
    """LaTeX tabular (booktabs) with special characters escaped."""
    return frame.map(_cell).to_latex(index=False, escape=True)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "".join(escaped(character, fonts=False) for character in str(value))


def _render(fig: Figure, width: float, height: float, dpi: int) -> dict[str, bytes]:
    before = fig.get_size_inches().copy()
    if abs(before[0] - width) > 0.01:
        fig.set_size_inches(width, height)
    make_drawable(fig)
    nothing = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    files = {suffix: io.BytesIO() for suffix in nothing}
    try:
        with mpl.rc_context({"svg.hashsalt": "lossless_lab", "svg.fonttype": "path"}):
            for suffix, file in files.items():
                fig.savefig(file, format=suffix, dpi=dpi, metadata=nothing[suffix])
    finally:
        fig.set_size_inches(before)
    return {suffix: file.getvalue() for suffix, file in files.items()}


def _write(name: str, contents: dict, data: pd.DataFrame, provenance: Mapping, folder) -> Saved:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f"`name` must be letters, digits, '.', '_' and '-' only; got {name!r}")
    folder = paths.FIGURES if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents = {**contents, "csv": data.to_csv(index=False, lineterminator="\n").encode()}
    record = _record(provenance, hashlib.sha256(contents["csv"]).hexdigest())
    files = {suffix: folder / f"{name}.{suffix}" for suffix in (*contents, "json")}
    before = {suffix: path.read_bytes() for suffix, path in files.items() if path.exists()}
    # A later commit that draws the same figure leaves it, and the commit that it names, as is.
    changed = before != {**contents, "json": before.get("json")} or not _same(before, record)
    if changed:
        text = json.dumps(record, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        for suffix, content in {**contents, "json": text.encode()}.items():
            files[suffix].write_bytes(content)
    return Saved(name=name, files=files, data_sha256=record["data_sha256"], changed=changed)


def _same(before: Mapping[str, bytes], record: dict) -> bool:
    try:
        return {**json.loads(before["json"]), "git_commit": record["git_commit"]} == record
    except (KeyError, TypeError, ValueError):
        return False


def _record(provenance: Mapping, digest: str) -> dict:
    versions = {name: metadata.version(name) for name in ("matplotlib", "numpy", "pandas")}
    versions["lossless_lab"] = __version__
    try:
        given = json.loads(json.dumps(_without_paths(provenance), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`provenance` must hold JSON values only: {error}") from None
    return {**given, "versions": versions, "git_commit": paths.git_commit(), "data_sha256": digest}


def _without_paths(value):
    if isinstance(value, Mapping):
        return {str(key): _without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_paths(item) for item in value]
    if isinstance(value, (str, Path)):
        return _PATH.sub(r"\1", str(value))
    return value
