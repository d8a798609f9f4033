"""Many samples of one prompt from a black box: any engine, and continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import ContinuousBatchingConfig, GenerationConfig

from .conditions import generation_fields, random_state
from .decoding import Decoding
from .protocol import Engine, complete

_BLOCKS, _PAGE = 64, 32  # left to itself, the paged cache takes 60 % of memory


def drawn(engine: Engine, prompt_ids: Sequence[int], n: int, decoding: Decoding) -> np.ndarray:
    """n samples [n, max_new_tokens] of one prompt, each a row of the engine's own batches.

    Parameters
    ----------
    decoding : with temperature above 0 and no end ids, so that all samples have one length.
    """
    rows = complete(engine, [prompt_ids] * n, decoding)
    return np.array([c.output_ids for _, batch in rows for c in batch])


def continuously_batched(
    network: Any, prompt_ids: Sequence[int], n: int, decoding: Decoding
) -> np.ndarray:
    """n samples [n, max_new_tokens] of one prompt through `generate_batch` and its paged cache.

    Raises
    ------
    ValueError
        For min_p, which continuous batching has no processor for.
    """
    if decoding.min_p:
        raise ValueError(
            f"`decoding.min_p` must be 0 for continuous batching; got {decoding.min_p}"
        )
    network = getattr(network, "network", network)
    fields = generation_fields(decoding, "dynamic", pad_id=0, slots=1)
    names = ("do_sample", "max_new_tokens", "repetition_penalty", "temperature", "top_k", "top_p")
    settings = GenerationConfig(eos_token_id=-1, **{name: fields[name] for name in names})
    paged = ContinuousBatchingConfig(
        page_size=_PAGE, num_blocks=_BLOCKS, max_batch_tokens=256, seed=decoding.seed
    )
    kernel = network.config._attn_implementation
    try:
        with random_state(network, decoding.seed):
            done = network.generate_batch([list(prompt_ids)] * n, settings, paged)
    finally:
        network.set_attn_implementation(kernel)
    if len(done) != n:
        raise RuntimeError(f"generate_batch returned {len(done)} of {n} samples")
    return np.array([output.generated_tokens for output in done.values()])
