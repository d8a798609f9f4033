"""Recording a run: batch by batch, flushed as it goes, resumable after a kill."""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tqdm.auto import tqdm

from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.protocol import Completion, batches, complete
from lossless_lab.models.planning import refuse_if_beyond
from lossless_lab.prompts import Prompt
from lossless_lab.prompts.files import refuse_same_names

from .folder import (
    Run,
    RunError,
    append,
    json_line,
    logits_name,
    whole_characters,
    write_atomically,
    write_json,
)
from .manifest import Manifest, circumstances, differences, facts
from .metrics import PeakMemory, measured

PARTS = "logits.parts"
_JSON = TypeAdapter(dict[str, Any])  # writes null for every number that JSON has no word for
_RECORD_BYTES = 400  # of an output besides its tokens
_TOLD = ("prompt_ids", "output_ids", "finish_reason", "logprobs", "top_logprobs", "timings")


def record(
    folder: str | Path,
    engine: Any,
    prompts: Sequence[Prompt] | Mapping[str, Sequence[int]],
    decoding: Decoding | None = None,
    *,
    optimization: str = "none",
    save_logits: bool = False,
    progress: bool = True,
) -> Run:
    """Run prompts through an engine into a folder; called again, it goes on where it stopped.

    Rows (prompt by prompt, sample by sample) are cut into batches of `engine.batch_size`; each
    batch has its own seed and is appended and flushed as one. A batch of which a part is missing
    is done again whole, so a resumed run ends with the records of an uninterrupted one.

    Parameters
    ----------
    folder : path; made where it is missing
    engine : Engine
    prompts : Prompts with ids, or id -> token ids
    decoding : Decoding, optional
    optimization : name of what was done to the model
    save_logits : also write logits.safetensors; n_tokens * vocab_size * 4 bytes per output
    progress : show a progress bar

    Returns
    -------
    Run

    Raises
    ------
    RunError
        Where the folder holds a run with another manifest; the fields are named.
    ValueError
        For prompts that cannot be run, before anything runs.
    """
    folder, decoding = Path(folder), decoding or Decoding()
    prompts = with_ids(prompts)
    ids = [prompt.ids for prompt in prompts]
    if hasattr(engine, "validate"):
        engine.validate(ids, decoding)
    if save_logits and "keep_logits" in getattr(engine, "__dataclass_fields__", {}):
        engine = dataclasses.replace(engine, keep_logits=True)
    fields = facts(engine, prompts, decoding, optimization=optimization)
    n_rows, length = len(prompts) * decoding.n_samples, decoding.max_new_tokens
    held = n_rows if save_logits else min(n_rows, engine.batch_size)
    refuse_if_beyond(
        4 * held * length * (fields["vocab_size"] or 0) + n_rows * (8 * length + _RECORD_BYTES),
        f"{len(prompts)} prompts × {decoding.n_samples} samples × {length} tokens",
    )
    _open(folder, Manifest(**fields, save_logits=save_logits, **circumstances()))
    run, keys = Run(folder), [(p.id, k) for p in prompts for k in range(decoding.n_samples)]
    todo = batches(len(keys), engine.batch_size)
    done = _recover(folder, todo, keys, save_logits=save_logits)
    if run.complete and done == len(todo):
        return run
    (folder / "metrics.json").unlink(missing_ok=True)
    memory = PeakMemory()
    bar = tqdm(total=len(keys), unit="output", desc=folder.name, disable=not progress)
    with bar:
        bar.update(todo[done].start if done < len(todo) else len(keys))
        for index, completions in complete(engine, ids, decoding, start=done):
            names = [keys[i] for i in todo[index]]
            if save_logits:
                _write_part(_part(folder, index), names, completions)
            lines = [json_line(_as_dict(n, c)) for n, c in zip(names, completions, strict=True)]
            append(folder / "outputs.jsonl", lines)
            memory.look()
            bar.update(len(completions))
    if save_logits:
        _merge(folder, len(todo))
    write_json(folder / "metrics.json", measured(run.records, engine.batch_size) | memory.to_dict())
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    return run


def with_ids(prompts: Sequence[Prompt] | Mapping[str, Sequence[int]]) -> list[Prompt]:
    """Prompts, each with token ids; ValueError names those that have none or occur twice."""
    if isinstance(prompts, Mapping):
        prompts = [Prompt(id=name, ids=tuple(ids)) for name, ids in prompts.items()]
    if without := [prompt.id for prompt in prompts if prompt.ids is None]:
        raise ValueError(f"`prompts` without ids (tokenize them first): {', '.join(without[:5])}")
    refuse_same_names(prompts)
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt, got none")
    return list(prompts)


def _open(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a new run, or refuse a folder that belongs to another."""
    if folder.is_file():
        raise RunError(f"`folder`: {folder} is a file; a run needs a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "manifest.json").is_file():
        if (folder / "outputs.jsonl").is_file():
            raise RunError(f"`folder`: {folder} holds outputs without a manifest; use another")
        write_json(folder / "manifest.json", manifest.model_dump(mode="json"))
        return
    before = Run(folder).manifest
    changed = differences(before, manifest)[["field", "reference", "candidate"]].to_numpy().tolist()
    if before.save_logits != manifest.save_logits:
        changed.append(("save_logits", before.save_logits, manifest.save_logits))
    if changed:
        told = "; ".join(f"`{name}` was {then!r} and is {now!r}" for name, then, now in changed)
        raise RunError(f"`folder`: {folder} holds another run: {told}; use another folder")


def _recover(
    folder: Path, todo: Sequence[range], keys: Sequence[tuple[str, int]], *, save_logits: bool
) -> int:
    """Cut outputs.jsonl back to its whole batches; returns how many there are."""
    path, whole = folder / "outputs.jsonl", folder / "logits.safetensors"
    content = path.read_bytes() if path.is_file() else b""
    ends, names = [0], []
    for line in content.split(b"\n")[:-1]:  # what follows the last line break is torn
        try:
            held = json.loads(line)
        except (ValueError, RecursionError):
            break
        ends.append(ends[-1] + len(line) + 1)
        held = held if isinstance(held, dict) else {}
        names.append((held.get("prompt_id"), held.get("sample_index")))
    if names != list(keys[: len(names)]):
        raise RunError(f"{path} holds outputs of other prompts or in another order")
    done = sum(rows.stop <= len(names) for rows in todo)
    if save_logits and not (whole.is_file() and done == len(todo)):
        whole.unlink(missing_ok=True)
        there = (_part(folder, index).is_file() for index in range(done))
        done = next((index for index, found in enumerate(there) if not found), done)
    kept = ends[todo[done - 1].stop] if done else 0
    if kept < len(content):
        with open(path, "r+b") as file:
            file.truncate(kept)
    return done


def _part(folder: Path, index: int) -> Path:
    return folder / PARTS / f"{index:06d}.safetensors"


def _write_part(path: Path, names: Iterable[tuple[str, int]], rows: Sequence[Completion]) -> None:
    import torch
    from safetensors.torch import save

    tensors = {}
    for (prompt_id, sample_index), row in zip(names, rows, strict=True):
        if row.logits is None:
            raise ValueError("`save_logits` needs an engine that keeps its logits; this does not")
        name = logits_name(prompt_id, sample_index)
        tensors[f"logits/{name}"] = row.logits.detach().float().cpu().contiguous()
        tensors[f"ids/{name}"] = torch.tensor(row.output_ids)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, save(tensors))


def _merge(folder: Path, n_parts: int) -> None:
    from safetensors.torch import load_file, save_file

    whole, part = folder / "logits.safetensors", folder / "logits.safetensors.part"
    if whole.is_file():
        return
    tensors = {}
    for index in range(n_parts):
        tensors |= load_file(_part(folder, index))
    save_file(tensors, part)
    part.replace(whole)


def _as_dict(name: tuple[str, int], row: Completion) -> dict[str, Any]:
    told = {"prompt_id": name[0], "sample_index": name[1], "text": whole_characters(row.text)}
    told |= {field: getattr(row, field) for field in _TOLD}
    return _JSON.dump_python(told, mode="json")
