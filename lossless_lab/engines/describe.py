"""Facts about a model, its limits, installed versions and a device, as plain values."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lossless_lab.models.loading import state_sha256


def model(model: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Identity of a Model or of a bare network; folders by name, never by path."""
    network = getattr(model, "network", model)
    name = getattr(model, "name", None) or getattr(network.config, "_name_or_path", "")
    return {
        "model_id": portable(str(name)) or type(network).__name__,
        "revision": getattr(model, "revision", None) or "unknown",
        "weights_sha256": getattr(model, "weights_sha256", None) or state_sha256(network),
        "tokenizer_sha256": getattr(model, "tokenizer_sha256", None) or _tokenizer(tokenizer),
        "vocab_size": network.get_input_embeddings().num_embeddings,
        "max_seq_len": max_seq_len(network),
    }


def max_seq_len(network: Any) -> int | None:
    """Positions that the config allows, or None where it does not say."""
    config = network.config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def portable(name: str) -> str:
    """A model's name without the path that leads to it.

    Examples
    --------
    >>> portable("/somewhere/models/mine"), portable("org/model")
    ('mine', 'org/model')
    """
    path = Path(name).expanduser()
    return path.name if path.is_absolute() or path.exists() or "\\" in name else name


def versions() -> dict[str, str]:
    """Versions of torch and transformers; the latter is this engine's."""
    torch, transformers = (importlib.metadata.version(n) for n in ("torch", "transformers"))
    return {"torch": torch, "transformers": transformers, "engine_version": transformers}


def device(device: Any) -> dict[str, Any]:
    """Kind, name, memory and, on a GPU, driver and CUDA; no environment, no paths."""
    import psutil
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "kind": "cuda",
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "driver": _driver(),
            "cuda": torch.version.cuda or "unknown",
        }
    return {
        "kind": device.type,
        "name": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": psutil.virtual_memory().total,
        "driver": "none",
        "cuda": "none",
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    if version.is_file():
        words = version.read_text().split()
        return next((w for w in words if w[0].isdigit() and "." in w), "unknown")
    return "unknown"


def _tokenizer(tokenizer: Any) -> str:
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = (
        backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    )
    return f"state:{hashlib.sha256(content.encode()).hexdigest()}"


def refuse_prompts(network: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise ValueError for no prompt, an empty one, an unknown id, or one beyond the context."""
    vocab_size, limit = network.get_input_embeddings().num_embeddings, max_seq_len(network)
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt, got none")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"`prompts[{i}]` must hold at least one token id, got none")
        odd = next((j for j, token_id in enumerate(prompt) if not 0 <= token_id < vocab_size), None)
        if odd is not None:
            raise ValueError(
                f"`prompts[{i}][{odd}]` must be an id from 0 to {vocab_size - 1}, got {prompt[odd]}"
            )
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"`prompts[{i}]` has {len(prompt)} tokens and `max_new_tokens` is "
                f"{max_new_tokens}; together they may be at most {limit}, the context of this model"
            )
