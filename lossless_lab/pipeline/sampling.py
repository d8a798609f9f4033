"""What a network's next few tokens can be: their exact joint law, and many draws from it.

Both walk the tree of continuations level by level: the prompt is computed once, and each distinct
prefix after it once, from a copy of its parent's cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from lossless_lab.results import Result
from lossless_lab.statistical.sampler_laws import sampler_probs

_ROWS = 64  # prefixes per forward pass
_LIMIT = 1 << 22  # continuations enumerated at most
Split = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointLaw(Result):
    """The law of the next few tokens: every continuation that has mass, and its probability.

    Parameters
    ----------
    ids : array [n_outcomes, n_tokens], in lexicographic order.
    probs : array [n_outcomes] float64; sums to 1 within 1e-9.
    """

    ids: np.ndarray
    probs: np.ndarray

    def counted(self, samples: Any) -> tuple[np.ndarray, np.ndarray]:
        """Counts and probabilities [n_outcomes + 1]; the last cell is what cannot be (0).

        Parameters
        ----------
        samples : ids [n, n_tokens or more]; what follows the first n_tokens is left out.

        >>> law = JointLaw(ids=np.array([[1, 2], [3, 4]]), probs=np.array([0.5, 0.5]))
        >>> [a.tolist() for a in law.counted([[3, 4], [3, 4], [7, 7]])]
        [[0, 2, 1], [0.5, 0.5, 0.0]]
        """
        samples = np.asarray(samples, dtype=np.int64)
        n = self.ids.shape[1]
        if samples.ndim != 2 or samples.shape[1] < n:
            raise ValueError(f"`samples` must be [n, {n} or more] ids; got {samples.shape}")
        place = {tuple(row): i for i, row in enumerate(self.ids.tolist())}
        at = [place.get(tuple(row), len(place)) for row in samples[:, :n].tolist()]
        return np.bincount(at, minlength=len(place) + 1), np.append(self.probs, 0.0)

    def first(self) -> JointLaw:
        """The law of the first token alone."""
        ids, where = np.unique(self.ids[:, 0], return_inverse=True)
        return JointLaw(ids=ids[:, None], probs=np.bincount(where, self.probs))

    def to_frame(self) -> pd.DataFrame:
        """One row per continuation: token_1, token_2, …, probability."""
        names = [f"token_{i + 1}" for i in range(self.ids.shape[1])]
        return pd.DataFrame(self.ids, columns=names).assign(probability=self.probs)

    def __str__(self) -> str:
        n = self.ids.shape[1]
        return f"{len(self.ids):,} continuations of {n} tokens, likeliest {self.probs.max():.3g}"


def next_tokens_law(
    network: Any, prompt_ids: Sequence[int], *, n_tokens: int = 2, **sampler: float
) -> JointLaw:
    """P(t₁, …, tₙ | prompt) = Π P(tᵢ | prompt, t₁ … tᵢ₋₁), by enumeration.

    Parameters
    ----------
    network : causal language model, or result of `load`.
    prompt_ids : at least one.
    n_tokens : how many.
    **sampler : temperature, top_k, top_p, min_p, as in `sampler_probs`.

    Raises
    ------
    ValueError
        For an empty prompt, n_tokens below 1, and more than 4 million continuations.
    """
    weights = torch.ones(1, dtype=torch.float64)
    leaves = list(_walk(network, prompt_ids, n_tokens, sampler, weights, _with_mass))
    ids, probs = (torch.cat(part).numpy() for part in zip(*leaves, strict=True))
    order = np.lexsort(ids.T[::-1])
    return JointLaw(ids=ids[order], probs=probs[order])


def draw(
    network: Any,
    prompt_ids: Sequence[int],
    n: int,
    *,
    n_tokens: int = 2,
    rng: np.random.Generator,
    **sampler: float,
) -> np.ndarray:
    """n independent continuations, one forward pass per distinct prefix rather than per sample.

    Parameters
    ----------
    network, prompt_ids, n_tokens, **sampler : as in `next_tokens_law`.
    rng : draws the tokens.

    Returns
    -------
    array [n, n_tokens] of ids, in random order.
    """
    if n < 1:
        raise ValueError(f"`n` must be at least 1; got {n}")

    def dealt(laws: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """So many draws from each row's law, as distinct (row, token) with their counts."""
        tokens = []
        for law, count in zip(laws.numpy(), counts.tolist(), strict=True):
            upto = law.cumsum()
            tokens.append(np.searchsorted(upto, rng.random(count) * upto[-1], side="right"))
        rows = torch.arange(len(laws)).repeat_interleave(counts)
        pairs = torch.stack([rows, torch.from_numpy(np.concatenate(tokens))])
        pairs, times = pairs.unique(dim=1, return_counts=True)
        return *pairs, times

    leaves = list(_walk(network, prompt_ids, n_tokens, sampler, torch.tensor([n]), dealt))
    ids, counts = (torch.cat(part).numpy() for part in zip(*leaves, strict=True))
    return rng.permutation(np.repeat(ids, counts, axis=0))


def _with_mass(laws: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    row, token = laws.nonzero(as_tuple=True)
    return row, token, weights[row] * laws[row, token]


@torch.no_grad()
def _walk(
    network: Any,
    prompt_ids: Sequence[int],
    n_tokens: int,
    sampler: dict[str, float],
    weights: torch.Tensor,
    split: Split,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids [n, n_tokens], weights [n]) of the leaves; `split` shares a weight among next tokens."""
    network = getattr(network, "network", network)
    if not len(prompt_ids) or n_tokens < 1 or n_tokens % 1:
        what, got = ("n_tokens", n_tokens) if len(prompt_ids) else ("prompt_ids", "none")
        raise ValueError(f"`{what}` must be at least one; got {got}")

    def step(ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        out = network(ids.to(network.device), cache=cache, use_cache=True, logits_to_keep=1)
        return sampler_probs(out.logits[:, -1].cpu().double(), **sampler), out.cache

    def below(laws: torch.Tensor, cache: Any, prefix: torch.Tensor, weights: torch.Tensor):
        row, token, weights = split(laws, weights)
        ids = torch.cat([prefix[row], token[:, None]], 1)
        if ids.shape[1] == n_tokens:
            yield ids, weights
            return
        likely = len(row) * int((laws > 0).sum(-1).max()) ** (n_tokens - ids.shape[1])
        if split is _with_mass and likely > _LIMIT:
            raise ValueError(
                f"`n_tokens` = {n_tokens} has up to {likely:,} continuations here, more than "
                f"{_LIMIT:,}: filter (`top_k`) or take fewer tokens"
            )
        for at in torch.arange(len(row)).split(_ROWS):
            own = copy.deepcopy(cache)
            own.batch_select_indices(row[at].to(network.device))
            yield from below(*step(token[at, None], own), ids[at], weights[at])

    laws, cache = step(torch.tensor([list(prompt_ids)]), None)
    yield from below(laws, cache, torch.empty(1, 0, dtype=torch.long), weights)
