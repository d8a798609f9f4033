"""Commands that only tell: models, runs, doctor, and the size of a KV cache."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from lossless_lab import paths


def models(arguments: argparse.Namespace) -> None:
    """`models list` and `models fetch NAME`."""
    from lossless_lab import models

    if arguments.action == "list":
        print(models.available().to_string(index=False))
    elif arguments.name is None:
        raise ValueError("`models fetch` needs a name, such as smollm2")
    else:
        print(models.fetch(arguments.name))


def runs(arguments: argparse.Namespace) -> None:
    """The table of all runs, printed or kept in a Markdown file."""
    from lossless_lab import runs

    root = arguments.root
    if not root.is_dir() and root != paths.RUNS:
        raise ValueError(f"`--root`: there is no folder {root}")
    if arguments.write is not None:
        runs.write_table(arguments.write, root=root)
        print(f"wrote the table of runs to {arguments.write}")
        return
    table = runs.readable(runs.table(root))
    said = table.loc[:, (table != "").any()].to_string(index=False)
    print(said if len(table) else f"no runs under {root}")


def doctor(arguments: argparse.Namespace) -> None:
    """What this machine has, and what is missing."""
    from lossless_lab import doctor

    print(doctor.report().to_string(index=False))


def kv_cache(arguments: argparse.Namespace) -> None:
    """Bytes of a KV cache, by kind of layer, as a table or as JSON."""
    from lossless_lab import kv_cache

    if arguments.config == "list":
        print(kv_cache.models().to_string(index=False))
        return
    names = ("engine", "encoder_len", "state_dtype", "draft", "num_beams", "tensor_parallel")
    size = kv_cache.kv_cache_bytes(
        arguments.config,
        seq_len=arguments.context,
        batch_size=arguments.batch,
        dtype=arguments.dtype.split(",") if "," in arguments.dtype else arguments.dtype,
        **{name: getattr(arguments, name) for name in names},
    )
    print(_as_json(size) if arguments.format == "json" else _as_text(size))


def _as_json(size) -> str:
    totals = ("bytes", "stored_bytes", "fixed_bytes", "bytes_per_token")
    record = asdict(size) | {name: getattr(size, name) for name in totals}
    return json.dumps(record, ensure_ascii=False, indent=1, allow_nan=False)


def _as_text(size) -> str:
    from lossless_lab.kv_cache import binary

    held = f"{size.n_sequences} × {size.seq_len:,} tokens, {size.dtype}"
    gpus = f", on each of {size.tensor_parallel} GPUs" if size.tensor_parallel > 1 else ""
    per_token = f"{size.bytes_per_token:,.0f} B per token"
    lines = [
        f"{size.model_type}, {size.engine}, {held}{gpus}",
        size.to_frame().drop(columns="widths").to_string(index=False),
    ]
    lines += [f"{binary(size.bytes)} ({size.bytes:,} B), {per_token}"]
    return "\n".join([*lines, *(f"note: {note}" for note in size.notes)])
