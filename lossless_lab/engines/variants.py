"""Harmless re-orderings of an engine: the same function, its sums in another order."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .transformers_engine import TransformersEngine

_BATCHES = (8, 4, 2, 1, 3, 16)
_PAD_COLUMNS = (1, 3, 8, 2, 5, 16, 4)
_COMPANIONS = (1, 3, 7, 2, 4, 5)
_THREADS = (1, 2, 4, 8)


def harmless_variants(engine: TransformersEngine) -> dict[str, Callable[[], TransformersEngine]]:
    """Engines that compute the same function as `engine`, by name; each is built when called.

    Batch shape (rows per batch; copies of a row beside it, which also works on a single prompt),
    pad columns on the left, threads, attention kernel, with and without cache, and combinations:
    at least 19 without an assistant, so that their maximum is a floor with a rate of at most 5 %.

    Parameters
    ----------
    engine : TransformersEngine

    Returns
    -------
    dict
        Name -> callable without arguments; the most different kinds come first.

    Notes
    -----
    Under sampling, another batch shape deals the random numbers differently: compare logits by
    `score`, not sampled ids.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(_attn_implementation="sdpa")
    >>> list(_changes(SimpleNamespace(config=config), assisted=True, cores=1, cache="dynamic"))[:2]
    ['1 pad column', 'eager attention']
    """
    found = _changes(
        engine.network,
        assisted=engine.assistant is not None,
        cores=os.cpu_count() or 1,
        cache=engine.cache,
        attention=engine.attention,
    )
    threads = engine.threads or torch.get_num_threads()
    moves = {
        name: fields
        for name, fields in found.items()
        if any((threads if n == "threads" else getattr(engine, n)) != v for n, v in fields.items())
    }
    return {name: _maker(engine, fields) for name, fields in moves.items()}


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _maker(engine: TransformersEngine, fields: dict[str, Any]) -> Callable[[], TransformersEngine]:
    return lambda: replace(engine, **fields)


def _changes(
    network: Any, *, assisted: bool, cores: int, cache: str, attention: str | None = None
) -> dict[str, dict[str, Any]]:
    """Name -> engine fields, kinds interleaved so that the first few are the most different."""
    kernel = attention or network.config._attn_implementation
    other = "sdpa" if kernel == "eager" else "eager"
    eager = {f"{other} attention": {"attention": other}}
    pads = {_count(n, "pad column"): {"extra_padding": n} for n in _PAD_COLUMNS}
    batches = {f"batches of {n}": {"batch_size": n} for n in _BATCHES}
    company = {_count(n, "companion row"): {"companions": n} for n in _COMPANIONS}
    threads = {_count(n, "thread"): {"threads": n} for n in _THREADS if n <= cores}
    uncached = {} if cache == "none" else {"uncached": {"cache": "none"}}
    if assisted:
        batches, company, uncached = {}, {}, {}
    kinds = [batches, pads, company, eager, threads]
    longest = max(map(len, kinds))
    rounds = [[*kind.items()][i : i + 1] for i in range(longest) for kind in kinds]
    single = {name: fields for part in rounds for name, fields in part}
    pairs = [(eager, pads), (eager, company), (uncached, pads), (uncached, eager), (company, pads)]
    both = {
        f"{a}, {b}": fields_a | fields_b
        for left, right in pairs
        for a, fields_a in [*left.items()][:1]
        for b, fields_b in [*right.items()][:1]
    }
    return single | uncached | both  # uncached last of the single ones: by far the slowest
