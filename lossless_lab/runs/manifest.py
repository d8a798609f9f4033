"""What went into a run: the manifest, its configuration hash, and how two manifests differ."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from lossless_lab import paths
from lossless_lab.engines.decoding import Decoding
from lossless_lab.prompts import Prompt, prompt_set_hash

KINDS = {
    "prompts": ("prompt_set_sha256", "n_prompts"),
    "scheduling": (
        *("cache", "prefix_cache", "scheduler", "parallel", "max_seq_len"),
        *("batch_size", "threads", "launch_arguments"),
    ),
}
_CHANCE = ("created", "git_commit", "save_logits", "format")
_NOT_HASHED = (*_CHANCE, "n_prompts", "checkpoint_decoding", "revision", "model_id", "text")
_IDLE_UNDER_GREEDY = ("seed", "top_k", "top_p", "min_p")


class Manifest(BaseModel):
    """Everything that went into a run; written once. "unknown" where an engine does not tell.

    `decoding` has its end ids resolved; `checkpoint_decoding` is what the checkpoint would have
    imposed and did not; `text` tells how texts without ids came in ("flattened": line breaks were
    lost), and is None for runs of an engine. Folders are named, never located.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    format: Literal[1] = 1
    model_id: str = "unknown"
    revision: str = "unknown"
    weights_sha256: str = "unknown"
    tokenizer_sha256: str = "unknown"
    vocab_size: int | None = None
    dtype: str = "unknown"
    attention: str = "unknown"
    engine: str = "unknown"
    engine_version: str = "unknown"
    launch_arguments: dict[str, JsonValue] = {}
    torch: str = "unknown"
    transformers: str = "unknown"
    optimization: str = "none"
    cache: str = "unknown"
    prefix_cache: str = "unknown"
    scheduler: str = "unknown"
    parallel: dict[str, JsonValue] = {}
    max_seq_len: int | None = None
    batch_size: int = Field(default=1, ge=1)
    decoding: Decoding | None = None
    checkpoint_decoding: dict[str, JsonValue] = {}
    threads: int | None = None
    device: dict[str, JsonValue] = {}
    prompt_set_sha256: str = "unknown"
    n_prompts: int = 0
    logprobs_kind: Literal["raw", "processed", "none", "unknown"] = "unknown"
    save_logits: bool = False
    text: Literal["exact", "flattened"] | None = None
    git_commit: str = "unknown"
    created: str = "unknown"


def facts(
    engine: Any, prompts: Sequence[Prompt], decoding: Decoding, *, optimization: str = "none"
) -> dict[str, Any]:
    """Manifest fields of running these prompts through this engine, as plain values.

    Parameters
    ----------
    engine : Engine
    prompts : list of Prompt with ids
    decoding : Decoding; its end ids are resolved by the engine
    optimization : name of what was done to the model
    """
    described = _plain(engine.describe())
    manifest = Manifest(
        **described,
        optimization=optimization,
        decoding=engine.resolve(decoding),
        prompt_set_sha256=prompt_set_hash(prompts),
        n_prompts=len(prompts),
    )
    return {name: getattr(manifest, name) for name in Manifest.model_fields if name not in _CHANCE}


def circumstances() -> dict[str, str]:
    """Commit and time, which enter the manifest and no comparison."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"git_commit": paths.git_commit() or "unknown", "created": created}


def configuration_hash(manifest: Manifest | Mapping[str, Any]) -> str:
    """SHA-256 over all that decides the outputs; equal hashes make an A/A comparison.

    Commit, time, names of models and folders and the memory of the device do not enter; weights,
    tokenizer, versions, kernels, cache, decoding, seed, batch, threads, device and prompts do.

    Examples
    --------
    >>> a = Manifest(created="2026-01-01", dtype="float32")
    >>> configuration_hash(a) == configuration_hash(a.model_copy(update={"created": "later"}))
    True
    """
    fields = {k: v for k, v in _flat(manifest).items() if k not in _NOT_HASHED}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def differences(
    reference: Manifest | Mapping[str, Any], candidate: Manifest | Mapping[str, Any]
) -> pd.DataFrame:
    """Fields on which two manifests differ, and which of a triage's questions each answers.

    Parameters
    ----------
    reference, candidate : Manifest or mapping of its fields

    Returns
    -------
    DataFrame
        field, reference, candidate, kind ("sampling", "seed", "prompts", "scheduling" or
        "subject"), effect ("none" with the reason where the field cannot matter, "unknown" where
        a side does not tell, else "possible").

    Examples
    --------
    >>> a, b = ({"decoding": Decoding(seed=seed)} for seed in (1, 2))
    >>> differences(a, b).to_dict("records")  # doctest: +NORMALIZE_WHITESPACE
    [{'field': 'seed', 'reference': 1, 'candidate': 2, 'kind': 'seed',
      'effect': 'none: greedy on both sides'}]
    """
    left, right = _flat(reference), _flat(candidate)
    greedy = left.get("temperature") == right.get("temperature") == 0
    rows = []
    for name in dict.fromkeys([*left, *right]):
        a, b = left.get(name, "unknown"), right.get(name, "unknown")
        if name in _CHANCE or a == b:
            continue
        rows.append((name, a, b, _kind(name), _effect(name, a, b, greedy=greedy)))
    columns = ["field", "reference", "candidate", "kind", "effect"]
    return pd.DataFrame(rows, columns=columns, dtype=object)


def _effect(name: str, a: Any, b: Any, *, greedy: bool) -> str:
    if name in _IDLE_UNDER_GREEDY and greedy:
        return "none: greedy on both sides"
    if name == "checkpoint_decoding":
        return "none: never applied"
    if name.endswith("_sha256") and str(a).startswith("state:") != str(b).startswith("state:"):
        return "unknown: one side hashed files, the other tensors"
    return "unknown" if "unknown" in (a, b) else "possible"


def _kind(name: str) -> str:
    if name in Decoding.__dataclass_fields__:
        return "seed" if name == "seed" else "sampling"
    return next((kind for kind, names in KINDS.items() if name in names), "subject")


def _flat(manifest: Manifest | Mapping[str, Any]) -> dict[str, Any]:
    """Fields as JSON values, those of decoding beside the others, the device without its memory."""
    fields = dict(manifest)
    decoding = fields.pop("decoding", None)
    if isinstance(decoding, Decoding):
        decoding = asdict(decoding)
    unknown = dict.fromkeys(Decoding.__dataclass_fields__, "unknown")
    fields |= decoding or unknown
    if isinstance(fields.get("device"), Mapping):
        fields["device"] = {k: v for k, v in fields["device"].items() if k != "memory_bytes"}
    return _plain(fields)


def _plain(value: Any) -> Any:
    """JSON values only, and the last name of anything that is an absolute path."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(text).is_absolute() and kind(text).name:
            return kind(text).name
    return text
