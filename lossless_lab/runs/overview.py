"""All runs side by side, as a table and between two markers of a Markdown file."""

from pathlib import Path
from typing import Any

import pandas as pd

from lossless_lab import paths
from lossless_lab.engines.decoding import Decoding

from .folder import Run, RunError, write_atomically
from .manifest import configuration_hash

BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"
_IN = [
    *["model_id", "dtype", "optimization", "engine", "attention", "cache"],
    *["batch_size", "sampling", "seed", "prompts", "configuration", "created"],
]
_OUT = [
    *["n_outputs", "tokens_per_s", "latency_ms_p50", "latency_ms_p95", "first_token_ms_p50"],
    *["peak_rss_bytes", "witness"],
]


def table(root: str | Path | None = None) -> pd.DataFrame:
    """Every run under a folder, one row each, newest last; damaged ones say so under `state`.

    Parameters
    ----------
    root : folder, searched in depth; data/runs by default

    Returns
    -------
    DataFrame
        run, state, model_id, dtype, optimization, engine, attention, cache, batch_size, sampling,
        seed, prompts, configuration, created, and the main entries of metrics.json.
    """
    root = Path(root) if root is not None else paths.RUNS
    rows = [_row(root, path.parent) for path in sorted(root.rglob("manifest.json"))]
    frame = pd.DataFrame(rows, columns=["run", "state", *_IN, *_OUT])
    return frame.sort_values("created", kind="stable", ignore_index=True)


def write_table(path: str | Path, root: str | Path | None = None) -> Path:
    """Keep the table of runs between the two markers of a Markdown file; add them where missing.

    Raises
    ------
    ValueError
        Where only one marker is there, one occurs twice, or they stand in the wrong order.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"`path`: there is no folder {path.parent}")
    text = path.read_bytes().decode() if path.is_file() else ""
    counts = text.count(BEGIN), text.count(END)
    if counts == (0, 0):
        text += ("\n" if text and not text.endswith("\n") else "") + f"{BEGIN}\n{END}\n"
    elif counts != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path} must hold {BEGIN} once and then {END} once, got {counts}")
    before, rest = text.split(BEGIN)
    written = before + BEGIN + "\n\n" + _markdown(table(root)) + "\n\n" + END + rest.split(END)[1]
    write_atomically(path, written.encode())
    return path


def readable(frame: pd.DataFrame) -> pd.DataFrame:
    """The table as text: memory in MiB, one decimal, nothing where a run says nothing."""
    shown = frame.convert_dtypes().rename(columns={"peak_rss_bytes": "peak_rss_MiB"})
    shown["peak_rss_MiB"] = pd.to_numeric(frame["peak_rss_bytes"]) / 2**20
    return shown.astype(object).map(_cell)


def _row(root: Path, folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"run": folder.relative_to(root).as_posix(), "created": ""}
    try:
        run = Run(folder)
        row["state"], metrics = "complete" if run.complete else "unfinished", run.metrics
    except (RunError, ValueError) as error:
        return row | {"state": str(error).split(" is ", 1)[-1].splitlines()[0]}
    manifest = run.manifest
    row |= {name: getattr(manifest, name) for name in _IN if hasattr(manifest, name)}
    row |= {
        "sampling": _sampling(manifest.decoding),
        "seed": manifest.decoding.seed if manifest.decoding else None,
        "prompts": f"{manifest.n_prompts} ({manifest.prompt_set_sha256[:8]})",
        "configuration": configuration_hash(manifest)[:12],
    }
    return row | {name: metrics.get(name) for name in _OUT}


def _sampling(decoding: Decoding | None) -> str:
    """The settings that do something, in words.

    >>> _sampling(Decoding(temperature=0.7, top_p=0.9, n_samples=2))
    '32 tokens, temperature 0.7, top_p 0.9, n_samples 2'
    """
    if decoding is None:
        return "unknown"
    neutral, said = Decoding(), [f"{decoding.max_new_tokens} tokens"]
    said += ["greedy"] if decoding.greedy else [f"temperature {decoding.temperature:g}"]
    names = ("repetition_penalty", "n_samples")
    names = names if decoding.greedy else ("top_k", "top_p", "min_p", *names)
    set_ = [n for n in names if getattr(decoding, n) != getattr(neutral, n)]
    return ", ".join([*said, *(f"{n} {getattr(decoding, n):g}" for n in set_)])


def _markdown(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "No runs yet."
    shown = readable(frame.drop(columns=["attention", "created"]))
    shown = shown.replace(r"\|", r"\\|", regex=True)
    return shown.to_markdown(index=False, disable_numparse=True)


def _cell(value: Any) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return "" if pd.isna(value) else " ".join(text.split())
