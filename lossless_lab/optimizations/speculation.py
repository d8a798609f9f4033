"""Speculative decoding: tokens drafted cheaply, then judged by the model itself in one pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from lossless_lab import models
from lossless_lab.optimizations.caches import after_the_first
from lossless_lab.optimizations.entry import Optimization
from lossless_lab.optimizations.faults import kept_draft
from lossless_lab.optimizations.witness import Observation


def assisted(draft: Any) -> Optimization:
    """Drafts by a smaller model with the same vocabulary; claims level 2.

    Parameters
    ----------
    draft : name or path for `models.load`, its result, or a network.

    >>> assisted("tiny-draft").name
    'assisted-by-tiny-draft'
    """
    named = str(draft) if isinstance(draft, str) else getattr(draft, "name", type(draft).__name__)

    def settings(network: nn.Module) -> dict[str, Any]:
        assistant = models.load(draft) if isinstance(draft, str) else draft
        sides = (network, getattr(assistant, "network", assistant))
        sizes = [side.config.get_text_config().vocab_size for side in sides]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"`draft` {named} has a vocabulary of {sizes[1]} ids and the model one of "
                f"{sizes[0]}: the ids that one drafts must mean the same to the other"
            )
        return {"assistant": assistant}

    return _entry(f"assisted-by-{named}", settings)


def prompt_lookup(n_tokens: int = 4) -> Optimization:
    """Drafts copied from after an earlier occurrence of the last ids; claims level 2.

    >>> prompt_lookup().name, prompt_lookup(10).name
    ('prompt-lookup', 'prompt-lookup-10')
    """
    if isinstance(n_tokens, bool) or not isinstance(n_tokens, int) or n_tokens < 1:
        raise ValueError(f"`n_tokens` must be a whole number of at least 1; got {n_tokens!r}")
    options = {"prompt_lookup_num_tokens": n_tokens}
    name = "prompt-lookup" + (f"-{n_tokens}" if n_tokens != 4 else "")
    return _entry(name, lambda network: {"generate_options": options})


def early_exit(share: float = 0.5) -> Optimization:
    """Drafts by the model's own first layers, that share of them; claims level 2.

    >>> early_exit().name, early_exit(0.25).name
    ('early-exit', 'early-exit-0.25')
    """
    if not 0 < share < 1:
        raise ValueError(f"`share` must be above 0 and below 1; got {share!r}")

    def settings(network: nn.Module) -> dict[str, Any]:
        n_layers = network.config.get_text_config().num_hidden_layers
        exit_at = max(1, round(share * n_layers))
        return {"generate_options": {"assistant_early_exit": exit_at}}

    return _entry("early-exit" + (f"-{share:g}" if share != 0.5 else ""), settings)


def _entry(name: str, settings: Any) -> Optimization:
    return Optimization(
        name=name,
        level="2",
        changes=("launch_arguments", "batch_size"),
        transform=lambda network: (network, {"batch_size": 1, **settings(network)}),
        witness=_judged,
        exercised=after_the_first,
        counted="rejections",
        rule="the acceptance rule for sampled tokens",
        fault=kept_draft,
    )


def _judged(seen: Observation) -> str:
    rounds, drafted, accepted, rejections = (
        sum(t.get(name, 0) for t in seen.timings)
        for name in ("rounds", "drafted", "accepted", "rejections")
    )
    if not rounds:
        return ""
    return (
        f"{rounds} rounds: {drafted} tokens drafted, {accepted} accepted, "
        f"a draft rejected in {rejections}"
    )


ENTRIES = (assisted("tiny-draft"), prompt_lookup(), early_exit())
