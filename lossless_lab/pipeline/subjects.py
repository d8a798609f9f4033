"""What can be compared: each kind of subject as completions and logits, prompt by prompt.

A live subject (engine, model, candidate, function) answers anew; a stored one (run folder, file of
logits) answers from what it holds, and so limits what can be claimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lossless_lab import runs
from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.protocol import Completion, batches, complete
from lossless_lab.optimizations import Optimization
from lossless_lab.prompts import Prompt


class NotEvidence(ValueError):
    """What was handed in cannot be compared; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """An engine that answers anew.

    Parameters
    ----------
    name : what reports call it.
    engine : the engine; keeps its logits.
    optimization : the catalogue entry that made it, if any.
    intact : False where applying the entry changed the network it was applied to.
    """

    name: str
    engine: Any
    optimization: Optimization | None = None
    intact: bool = True

    @property
    def network(self) -> nn.Module | None:
        """The network, where there is one to look into."""
        return getattr(self.engine, "network", None)

    @property
    def computes(self) -> Any:
        """What the answers come from: network, function, or the engine where it holds neither."""
        if self.network is not None:
            return self.network
        return getattr(self.engine, "function", self.engine)

    @property
    def compiled(self) -> bool:
        """Whether someone wrapped the network by `torch.compile(network)`."""
        return isinstance(self.network, torch._dynamo.eval_frame.OptimizedModule)

    def facts(self, decoding: Decoding, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Manifest fields of this side."""
        name = self.optimization.name if self.optimization else "none"
        return runs.facts(self.engine, prompts, decoding, optimization=name)

    def complete(self, prompts: Sequence[Prompt], decoding: Decoding) -> list[Completion]:
        """Completions of all prompts, sample by sample, in the engine's own batches."""
        if unknown := [p.id for p in prompts if p.ids is None]:
            raise NotEvidence(f"token ids of prompt {unknown[0]!r} are not known; give `prompts`")
        ids = [prompt.ids for prompt in prompts]
        found = [c for _, rows in complete(self.engine, ids, decoding) for c in rows]
        if len(found) != (n := len(ids) * decoding.n_samples):
            raise NotEvidence(f"{self.name} must give {n} completions, got {len(found)}")
        return found

    def along(
        self, own: Sequence[Completion], given: Sequence[Sequence[int]]
    ) -> list[torch.Tensor | None]:
        """Logits [n, vocab_size] along `given` outputs; `own` ones are used where they serve."""
        found: list[torch.Tensor | None] = []
        for rows in batches(len(own), self.engine.batch_size):
            if all(own[i].output_ids == tuple(given[i]) for i in rows):
                found += [own[i].logits for i in rows]
            else:
                inputs = [own[i].prompt_ids for i in rows]
                found += self.engine.score(inputs, [given[i] for i in rows])
        for logits, ids in zip(found, given, strict=True):
            if logits is not None and len(logits) < len(ids):
                raise NotEvidence(f"{self.name} must score {len(ids)} ids, got {len(logits)} rows")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Completions and logits that were written down.

    Parameters
    ----------
    name : what reports call it.
    completions : (prompt id, sample index) -> completion, its logits where they were kept.
    manifest : manifest fields, empty for a bare file of logits.
    metrics : what came out besides; a recorded witness and exercised count among it.
    optimization : the catalogue entry that the manifest names, if any.
    """

    name: str
    completions: Mapping[tuple[str, int], Completion]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    optimization: Optimization | None = None
    intact: bool = True
    network: None = None
    compiled: bool = False

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that were answered, in order."""
        firsts = {name: c.prompt_ids for (name, sample), c in self.completions.items()}
        return [
            Prompt(id=name, ids=ids) if ids else Prompt(id=name, text="unknown")
            for name, ids in firsts.items()
        ]

    @property
    def decoding(self) -> Decoding | None:
        """How it was decoded; for a bare file only the number of samples is known."""
        n_samples = 1 + max(sample for _, sample in self.completions)
        return self.manifest.get("decoding") or Decoding(n_samples=n_samples)

    def facts(self, decoding: Decoding, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Manifest fields as they were written."""
        return dict(self.manifest)

    def complete(self, prompts: Sequence[Prompt], decoding: Decoding) -> list[Completion]:
        """The stored completions of these prompts."""
        keys = [(p.id, sample) for p in prompts for sample in range(decoding.n_samples)]
        self.refuse_without(keys)
        return [self.completions[key] for key in keys]

    def refuse_without(self, keys: Sequence[tuple[str, int]]) -> None:
        """Raise NotEvidence where outputs are missing: the rest is a choice that nobody made."""
        missing = [f"{name} (sample {i})" for name, i in keys if (name, i) not in self.completions]
        if missing:
            raise NotEvidence(
                f"{self.name} lacks {len(missing)} of {len(keys)} outputs: {', '.join(missing[:5])}"
            )

    def along(
        self, own: Sequence[Completion], given: Sequence[Sequence[int]]
    ) -> list[torch.Tensor | None]:
        """Stored logits up to and including the first position where the outputs part."""
        return [
            None if c.logits is None else c.logits[: shared_positions(c.output_ids, ids)]
            for c, ids in zip(own, given, strict=True)
        ]


Subject = Live | Stored


def shared_positions(a: Sequence[int], b: Sequence[int]) -> int:
    """Positions with the same context on both sides: the common prefix, and one more.

    >>> shared_positions([1, 2, 3], [1, 9, 3])
    2
    """
    n = min(len(a), len(b))
    return next((i + 1 for i in range(n) if a[i] != b[i]), n)
