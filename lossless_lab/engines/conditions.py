"""The conditions of one call: neutral settings, seed, threads, kernel; all put back afterwards."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import MinLengthLogitsProcessor

from .decoding import Decoding

CACHES = {
    "dynamic": {"use_cache": True},
    # left to itself, generate compiles static caches on a GPU: two changes in one
    "static": {"use_cache": True, "cache_implementation": "static", "disable_compile": True},
    "none": {"use_cache": False},
}
_DRAFTING = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)


def generation_fields(decoding: Decoding, cache: Any, *, pad_id: int, slots: int) -> dict[str, Any]:
    """Fields of a GenerationConfig for these settings; `slots` is the least size of a static cache.

    Examples
    --------
    >>> fields = generation_fields(Decoding(), "dynamic", pad_id=0, slots=32)
    >>> fields["do_sample"], "temperature" in fields
    (False, False)
    """
    sampling = {
        "temperature": float(decoding.temperature),
        "top_k": decoding.top_k,
        "top_p": float(decoding.top_p),
        "min_p": decoding.min_p or None,
    }
    return {
        "do_sample": not decoding.greedy,
        "max_new_tokens": decoding.max_new_tokens,
        "repetition_penalty": float(decoding.repetition_penalty),
        "eos_token_id": list(decoding.stop_token_ids or ()) or None,
        "pad_token_id": pad_id,
        "num_beams": 1,
        "return_dict_in_generate": True,
        "output_logits": True,
        **({} if decoding.greedy else sampling),
        **({"max_cache_len": slots} if cache == "static" else {}),
        **CACHES[cache if isinstance(cache, str) else "dynamic"],
    }


def own_cache(network: Any, cache: Any) -> dict[str, Any]:
    """The argument of `generate` that carries a cache of one's own, empty; none for a name."""
    if isinstance(cache, str):
        return {}
    told, built = inspect.signature(network.forward).parameters, cache.build(network.config)
    if held := int(built.get_seq_length()):
        raise ValueError(f"`cache`: `build` must give an empty cache, got one of {held} tokens")
    return {"cache" if "cache" in told else "past_key_values": built}


@contextlib.contextmanager
def neutral_settings(*networks: Any) -> Iterator[None]:
    """Generation configs that impose nothing, for every part of the networks that carries one.

    `generate` fills each field left None from the checkpoint's config, so that config has to be
    out of the way. How an assistant drafts is kept: that is no sampling setting.
    """
    parts = [module for network in networks for module in network.modules()]
    owners = [(part, part.generation_config) for part in parts if "generation_config" in vars(part)]
    try:
        for part, config in owners:
            drafting = {name: getattr(config, name, None) for name in _DRAFTING}
            part.generation_config = GenerationConfig(**drafting)
        yield
    finally:
        for part, config in owners:
            part.generation_config = config


@contextlib.contextmanager
def kernels(network: Any, *, threads: int | None, attention: str | None) -> Iterator[None]:
    """Intra-op threads and attention kernel; None leaves either as it is."""
    threads_before, kernel_before = torch.get_num_threads(), network.config._attn_implementation
    other_kernel = attention not in (None, kernel_before)
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if other_kernel:
            network.set_attn_implementation(attention)
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(threads_before)
        if other_kernel:
            network.set_attn_implementation(kernel_before)


@contextlib.contextmanager
def random_state(network: Any, seed: int) -> Iterator[None]:
    """Seed the generators that this network draws from, then put their states back."""
    kind = network.device.type
    if kind == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    devices = range(torch.get_device_module(kind).device_count())
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield


class ForcedTokens(MinLengthLogitsProcessor):
    """Leaves one id per row and step; of this base class so that an assistant is not forced."""

    def __init__(self, forced: torch.Tensor, width: int) -> None:
        self.forced, self.width = forced, width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = min(input_ids.shape[1] - self.width, self.forced.shape[1] - 1)
        chosen = self.forced[:, step : step + 1].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)
