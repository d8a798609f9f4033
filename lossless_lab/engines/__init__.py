"""WHO runs it: the engine protocol, transformers in this process, and its harmless variants."""

from __future__ import annotations

import importlib
from typing import Any

from .decoding import Decoding, declared, leaks, stop_token_ids
from .protocol import Completion, Engine, batch_seed, batches, complete, score_batches

# name -> module that needs torch or transformers, imported on first use
_LAZY = {
    "CallableEngine": "callable_engine",
    "TransformersEngine": "transformers_engine",
    "forward_logits": "padding",
    "harmless_variants": "variants",
    "padding_fault": "padding",
}

__all__ = [
    "CallableEngine", "Completion", "Decoding", "Engine", "TransformersEngine", "batch_seed",
    "batches", "complete", "declared", "forward_logits", "harmless_variants", "leaks",
    "padding_fault", "score_batches", "stop_token_ids",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
