"""transformers' own acceptance step, driven on given laws, integrated exactly, and its counts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation.utils import _speculative_sampling

from .conditions import generation_fields, random_state
from .decoding import Decoding

NextLogits = Callable[[tuple[int, ...]], torch.Tensor]


def processed_logits(
    network: Any, prompt_ids: Sequence[int], decoding: Decoding | None = None
) -> NextLogits:
    """Function from the ids after a prompt to the next token's logits [1, vocab_size].

    Parameters
    ----------
    network : causal language model; each prefix is computed once, without a cache.
    decoding : passes the logits through transformers' own processors; None leaves them raw.
    """
    network = getattr(network, "network", network)
    processors = None
    if decoding is not None:
        fields = generation_fields(decoding, "dynamic", pad_id=0, slots=1)
        processors = network._get_logits_processor(GenerationConfig(**fields))

    @functools.cache
    @torch.no_grad()
    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        ids = torch.tensor([[*prompt_ids, *prefix]], device=network.device)
        last = network(ids, use_cache=False).logits[:, -1].float()
        return last if processors is None else processors(ids, last)

    return logits


_TRIED = torch.arange(16) / 16 + 1 / 257  # uniform numbers, off round ones


def speculative_rounds(
    target: NextLogits,
    draft: NextLogits,
    n: int,
    *,
    n_tokens: int = 2,
    n_draft: int = 2,
    judged: NextLogits | None = None,
    seed: int,
) -> np.ndarray:
    """n continuations [n, n_tokens], each drafted and judged by `_speculative_sampling` itself.

    Parameters
    ----------
    target, draft : as from `processed_logits`; on the CPU.
    n_tokens : per continuation; what the last round writes beyond is left out.
    n_draft : γ, tokens drafted per round.
    judged : the draft's logits that the acceptance step is shown; those drawn from by default.
    """
    rows = []
    judged = judged or draft
    with random_state(target(()), seed):
        for _ in range(n):
            row: tuple[int, ...] = ()
            while len(row) < n_tokens:
                n_rest = min(n_draft, n_tokens - len(row))
                path = row
                for _ in range(n_rest):
                    probs = draft(path).softmax(-1)
                    path = *path, int(torch.multinomial(probs, 1))
                starts = [path[: len(row) + i] for i in range(n_rest)]
                shown = torch.stack([judged(start) for start in starts], 1)
                truth = [target(start) for start in starts]
                # the token after the last draft is left out where the continuation is complete
                truth.append(target(path) if len(path) < n_tokens else truth[-1])
                drafted = torch.tensor([path[len(row) :]])
                valid, _ = _speculative_sampling(drafted, shown, n_rest, torch.stack(truth, 1))
                row = (*row, *valid[0].tolist())
            rows.append(row[:n_tokens])
    return np.array(rows)


def exact_output_law(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, drawn_probs: torch.Tensor
) -> torch.Tensor:
    """Law of one token out of `_speculative_sampling`, by integrating that very function.

    The function is run on each token that can be drafted, with its uniform number at 16 places,
    just at the ratio that it computes and just above, and with the law of its second draw read off.

    Parameters
    ----------
    target_logits, draft_logits : [vocab_size], as they are handed to the function.
    drawn_probs : [vocab_size], the law that the draft is really drawn from.

    Returns
    -------
    Tensor [vocab_size] float64

    Raises
    ------
    RuntimeError
        Where the function does not accept up to its ratio and reject above it.

    >>> target, draft = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    >>> exact_output_law(target.log(), draft.log(), draft.double()).numpy().round(6).tolist()
    [0.7, 0.2, 0.1]
    >>> greedy = torch.tensor([0.0, 1.0, 0.0])
    >>> exact_output_law(target.log(), draft.log(), greedy).numpy().round(6).tolist()
    [0.6, 0.4, 0.0]
    """
    given = draft_logits[None, None], 1, target_logits.expand(1, 2, -1)
    law = torch.zeros_like(drawn_probs, dtype=torch.float64)
    for token in drawn_probs.nonzero()[:, 0].tolist():
        drafted, share = torch.tensor([[token]]), float(drawn_probs[token])
        above = _Probe(torch.inf)
        above.function(drafted, *given)
        ratio = above.ratio
        for u in (*_TRIED, ratio, torch.nextafter(ratio, ratio + 1)):
            u = torch.as_tensor(u, dtype=ratio.dtype)
            if u < 1 and bool(_Probe(float(u)).function(drafted, *given)[1]) != bool(u <= ratio):
                raise RuntimeError("`_speculative_sampling` no longer accepts where r <= p/q")
        kept = min(1.0, float(ratio))
        law[token] += share * kept
        if kept < 1:
            law += share * (1 - kept) * above.drawn_from[0].double()
    return law


class _Probe:
    """What `_speculative_sampling` sees as torch: one uniform number, no chance."""

    def __init__(self, uniform: float) -> None:
        self.uniform = uniform
        own = {**_speculative_sampling.__globals__, "torch": self}
        self.function = FunctionType(
            _speculative_sampling.__code__, own, argdefs=_speculative_sampling.__defaults__
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def rand_like(self, ratio: torch.Tensor) -> torch.Tensor:
        self.ratio = ratio
        return torch.full_like(ratio, self.uniform)

    def multinomial(self, probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        self.drawn_from = probs
        return probs.argmax(-1, keepdim=True)


@contextlib.contextmanager
def counted_drafts(network: Any) -> Iterator[list[tuple[int, int]]]:
    """(drafted, accepted) tokens of every round that `generate` of this network makes inside."""
    rounds: list[tuple[int, int]] = []
    original = network._get_candidate_generator

    def watched(*args: Any, **kwargs: Any) -> Any:
        generator = original(*args, **kwargs)
        told = generator.update_candidate_strategy

        def update(input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
            rounds.append((scores.shape[1] - 1, int(num_matches)))
            told(input_ids, scores, num_matches)

        generator.update_candidate_strategy = update
        return generator

    network._get_candidate_generator = watched
    try:
        yield rounds
    finally:
        del network._get_candidate_generator


def draft_counts(rounds: Sequence[tuple[int, int]]) -> dict[str, int]:
    """rounds, drafted and accepted (tokens), rejections (rounds that had one); {} for no round.

    >>> draft_counts([(4, 4), (4, 1)])
    {'rounds': 2, 'drafted': 8, 'accepted': 5, 'rejections': 1}
    """
    if not rounds:
        return {}
    drafted, accepted = map(sum, zip(*rounds, strict=True))
    rejections = sum(kept < made for made, kept in rounds)
    told = {"rounds": len(rounds), "drafted": drafted, "accepted": accepted}
    return told | {"rejections": rejections}
