"""WHO runs it: the engine protocol, transformers in this process, and its harmless variants."""

from __future__ import annotations

from .decoding import Decoding, leaks, stop_token_ids
from .protocol import Completion, Engine, batch_seed, batches, score_batches

__all__ = [
    "Completion",
    "Decoding",
    "Engine",
    "batch_seed",
    "batches",
    "leaks",
    "score_batches",
    "stop_token_ids",
]
