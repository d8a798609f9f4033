"""Which model: the bundled tiny pair, SmolLM2, any Hub id or folder; loading them safely."""

import difflib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from lossless_lab import paths

BUNDLED = ("tiny-target", "tiny-draft")
FETCHED = ("smollm2",)
DTYPES = ("float32", "float64", "float16", "bfloat16")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A network with its tokenizer and the identity that a run's manifest records."""

    name: str
    network: object  # a transformers PreTrainedModel in eval mode
    tokenizer: object | None
    revision: str
    weights_sha256: str
    tokenizer_sha256: str
    chat: bool  # the tokenizer has a chat template

    def __str__(self):
        millions = sum(p.numel() for p in self.network.parameters()) / 1e6
        dtype = str(self.network.dtype).removeprefix("torch.")
        return f"{self.name}: {millions:.1f}M parameters, {dtype}, {self.weights_sha256[:12]}"


def folder(name):
    """The folder of a model by name, whether or not it is there."""
    if name in BUNDLED:
        return paths.DATA / "models" / name
    if name in FETCHED:
        return paths.CACHE / name
    return Path(name)


def is_present(name) -> bool:
    """Whether `load(name)` would find its weights on this machine."""
    return any(folder(name).glob("*.safetensors"))


def load(name, *, dtype="float32", device="cpu", attn_implementation="sdpa") -> Model:
    """Load a model in eval mode with an explicit dtype; safetensors only, no remote code."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = folder(name)
    placement = {"device_map": "auto"} if device == "auto" else {}
    network = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=getattr(torch, dtype),
        attn_implementation=attn_implementation,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        **placement,
    ).eval()
    if device != "auto":
        network = network.to(device)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    return Model(
        name=str(name),
        network=network,
        tokenizer=tokenizer,
        revision="",
        weights_sha256=digest(sorted(source.glob("*.safetensors"))),
        tokenizer_sha256=digest([source / f for f in TOKENIZER_FILES if (source / f).is_file()]),
        chat=bool(getattr(tokenizer, "chat_template", None)),
    )


def digest(files) -> str:
    """SHA-256 of one file, or of the list of names and digests of several."""
    digests = {}
    for file in files:
        with open(file, "rb") as stream:
            digests[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
