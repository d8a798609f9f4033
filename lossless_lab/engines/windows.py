"""Sliding windows: does a cached run agree with an uncached one around the model's own window?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from .decoding import Decoding
from .transformers_engine import TransformersEngine


class WindowNotExercised(UserWarning):
    """No tested length passes the window, so the sliding path never ran."""


def sliding_windows(config: Any) -> tuple[int, ...]:
    """Window widths, in tokens, of the layers that have one; () where none slides.

    Examples
    --------
    >>> from transformers import MistralConfig
    >>> sliding_windows(MistralConfig(sliding_window=8)), sliding_windows(MistralConfig(
    ...     sliding_window=None))
    ((8,), ())
    """
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    names = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    found = {getattr(config, names[kind], None) for kind in set(kinds) & set(names)}
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo
        found.add(config.window_size)
    return tuple(sorted(width for width in found if width))


def window_consistency(
    reference: TransformersEngine,
    candidate: TransformersEngine,
    prompt: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    n_tokens: int = 12,
) -> pd.DataFrame:
    """Largest logit difference along the reference's greedy ids, for prompts of the window ± 2.

    A window that rolls a step early or late, or a length read from a layer that has forgotten the
    start, is right for short texts and wrong from the window on.

    Parameters
    ----------
    reference : an engine without a cache, of the network as it should be; tells the window.
    candidate : the engine to be judged.
    prompt : token ids, at least as long as the longest of `lengths`.
    lengths : prompt lengths; by default w − 2 to w + 2 of each window.
    n_tokens : new tokens.

    Returns
    -------
    DataFrame with one row per length: prompt_length, passes_window, first_divergence (of the
    greedy ids; NA where there is none), max_abs_difference (logits).

    Warns
    -----
    WindowNotExercised
        Where no prompt with its new tokens is longer than a window, or there is no window.
    """
    widths = sliding_windows(reference.network.config)
    if lengths is None:
        lengths = sorted({w + d for w in widths for d in range(-2, 3) if w + d > 0}) or [8]
    if len(prompt) < max(lengths):
        raise ValueError(f"`prompt` must have {max(lengths)} ids or more; got {len(prompt)}")
    largest = max(widths, default=None)
    passes = [largest is not None and n + n_tokens > largest for n in lengths]
    if not any(passes):
        why = "the model has no window" if largest is None else f"the window is {largest}"
        warnings.warn(f"sliding path never exercised: {why}", WindowNotExercised, stacklevel=2)
    decoding = Decoding(max_new_tokens=n_tokens, stop_token_ids=())
    reference, candidate = (
        replace(engine, batch_size=1, keep_logits=True) for engine in (reference, candidate)
    )
    rows = []
    for n, passed in zip(lengths, passes, strict=True):
        (own,) = reference.generate([prompt[:n]], decoding, seed=0)
        (logits,) = candidate.score([prompt[:n]], [own.output_ids])
        other = logits.argmax(-1).tolist()
        first = next((i for i, pair in enumerate(zip(own.output_ids, other, strict=True))
                      if len(set(pair)) > 1), pd.NA)  # fmt: skip
        rows.append((n, passed, first, float((logits - own.logits).abs().max())))
    columns = ["prompt_length", "passes_window", "first_divergence", "max_abs_difference"]
    return pd.DataFrame(rows, columns=columns).astype({"first_divergence": "Int64"})
