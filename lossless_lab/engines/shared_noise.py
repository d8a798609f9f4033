"""Samples drawn as argmax(ln p + noise), with noise that any engine can be given alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessor

from .conditions import generation_fields, neutral_settings
from .decoding import Decoding


class SharedNoise(LogitsProcessor):
    """Adds Gumbel noise that depends on the row's seed and the position alone (rows unpadded)."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = seeds

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1]
        rows = [
            np.random.default_rng([seed, place]).gumbel(size=scores.shape[1]) for seed in self.seeds
        ]
        return scores + torch.from_numpy(np.array(rows)).to(scores)


@torch.no_grad()
def drawn_with_shared_noise(
    network: Any,
    prompt_ids: Sequence[int],
    seeds: Sequence[int],
    decoding: Decoding,
    *,
    assistant: Any = None,
    **options: Any,
) -> np.ndarray:
    """One sample [max_new_tokens] per seed, by greedy `generate` over the noisy processed logits.

    Parameters
    ----------
    network : result of `load`, or a network.
    seeds : of the samples; the same seed gives the same sample wherever the laws are the same.
    decoding : its filters are transformers' own processors, before the noise.
    assistant, **options : as for `generate`, one seed at a time; drafts see the same noise.

    Notes
    -----
    The engine decodes greedily, so an acceptance step for sampled drafts is not run. Source: the
    Gumbel-max trick, Gumbel 1954; as in Token-DiFR, arXiv 2511.20621.
    """
    network, assistant = (getattr(m, "network", m) for m in (network, assistant))
    fields = generation_fields(decoding, "dynamic", pad_id=0, slots=1)
    processors = network._get_logits_processor(GenerationConfig(**fields))
    greedy = generation_fields(Decoding(max_new_tokens=decoding.max_new_tokens, stop_token_ids=()),
                               "dynamic", pad_id=0, slots=1)  # fmt: skip
    size = 1 if assistant is not None or options else len(seeds)
    rows = []
    with neutral_settings(*filter(None, (network, assistant))):
        for i in range(0, len(seeds), size):
            part = seeds[i : i + size]
            done = network.generate(
                torch.tensor([list(prompt_ids)] * len(part), device=network.device),
                generation_config=GenerationConfig(**greedy, **options),
                logits_processor=[*processors, SharedNoise(part)],
                assistant_model=assistant,
            )
            rows += done.sequences[:, len(prompt_ids) :].tolist()
    return np.array(rows)
