"""Which names are models, where their files lie and what identifies them; loads nothing."""

import difflib
import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path

import pandas as pd

from lossless_lab import paths

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED = {
    "tiny-target": "Llama, 2.6M parameters, true float32, trained on the standard library",
    "tiny-draft": "Llama, 0.4M parameters, true float32, same tokenizer as tiny-target",
}
FETCHED = {
    "smollm2": "SmolLM2-135M-Instruct, Apache-2.0, from a 4-bit GGUF: its weights lie on that grid"
}
KNOWN = BUNDLED | FETCHED
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


def choose(parameter, value, allowed) -> str:
    """The value if it is allowed; otherwise an error that suggests the nearest one."""
    if value in allowed:
        return value
    said = f"`{parameter}` must be one of {', '.join(allowed)}; got {value!r}"
    raise ValueError(said + nearest(value, allowed))


def nearest(name, known) -> str:
    """The end of an error message: the known name that looks most like this one, if any does.

    >>> nearest("cudda", ["cpu", "cuda"])
    "; did you mean 'cuda'?"
    """
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def is_hub_id(name) -> bool:
    """Whether the name reads owner/model and is no folder here.

    Examples
    --------
    >>> is_hub_id("HuggingFaceTB/SmolLM2-135M"), is_hub_id("smollm2"), is_hub_id("./a/b")
    (True, False, False)
    """
    shaped = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(name))
    return bool(shaped) and not Path(name).is_dir()


def is_named(name) -> bool:
    """Whether the name says which model it is on any machine; a folder's does not."""
    return name in KNOWN or is_hub_id(name)


def folder(name) -> Path:
    """The folder that a model's files lie in, or will lie in once fetched.

    Raises
    ------
    ValueError
        If the name is no known model, folder or Hub id; suggests the nearest name.
    FileNotFoundError
        If a path does not exist, or a Hub id has no snapshot on this machine.
    """
    if name in BUNDLED:
        return paths.DATA / "models" / name
    if name in FETCHED:
        return paths.CACHE / name
    if Path(name).is_dir():
        return Path(name)
    if is_hub_id(name):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), local_files_only=True))
    if Path(name).name != str(name):
        raise FileNotFoundError(f"`name` {str(name)!r} is no folder on this machine")
    raise ValueError(
        f"`name` {str(name)!r} is no model here{nearest(name, KNOWN) or '.'} Known are "
        f"{', '.join(KNOWN)}, an existing folder, or a Hub id written owner/name"
    )


def gguf_file() -> Path:
    """The GGUF that smollm2 was converted from; it stays in the cache for llama.cpp."""
    return paths.CACHE / GGUF


def is_present(name) -> bool:
    """Whether `load(name)` would find all its weights on this machine."""
    try:
        return bool(weight_files(folder(name)))
    except FileNotFoundError:
        return False


def weight_files(folder) -> list[Path]:
    """The safetensors files that make up the model in a folder, [] unless all are there."""
    files = [folder / "model.safetensors"]
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text("utf-8"))
        files = [folder / shard for shard in sorted(set(index["weight_map"].values()))]
    return files if all(file.is_file() for file in files) else []


def tokenizer_files(folder) -> list[Path]:
    """The files that decide how text becomes ids."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def sha256(file) -> str:
    """SHA-256 of a file, remembered in the cache by path, size and time of change."""
    file, memory = Path(file).resolve(), paths.CACHE / "sha256.json"
    key = f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"
    try:
        known = json.loads(memory.read_text("utf-8"))
    except (OSError, ValueError):
        known = {}
    if key not in known:
        known[key] = _hash(file)
        if file.stat().st_size < 2**24:  # hashed sooner than looked up
            return known[key]
        with suppress(OSError):  # a read-only cache only costs the hash again
            paths.CACHE.mkdir(parents=True, exist_ok=True)
            memory.write_text(json.dumps(known, indent=1), encoding="utf-8")
    return known[key]


def digest(files) -> str:
    """One file's own SHA-256; of several, that of their names and hashes; "" of none."""
    hashes = {file.name: sha256(file) for file in files}
    if len(hashes) < 2:
        return "".join(hashes.values())
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def available() -> pd.DataFrame:
    """The models known by name: `name, present, size_mib, description, fetch`."""
    rows = []
    for name, description in KNOWN.items():
        files = weight_files(folder(name))
        fix = f"lossless-lab models fetch {name}" if name in FETCHED and not files else ""
        size = sum(file.stat().st_size for file in files) / 2**20
        rows.append((name, bool(files), round(size, 1), description, fix))
    return pd.DataFrame(rows, columns=["name", "present", "size_mib", "description", "fetch"])


def _hash(file) -> str:
    from huggingface_hub.utils.sha import sha_fileobj

    with open(file, "rb") as stream:
        return sha_fileobj(stream, 2**22).hex()
