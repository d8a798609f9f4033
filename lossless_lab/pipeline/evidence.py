"""Both sides' outputs on the same prompts, and how they compare, before anything is concluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch

from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.protocol import Completion
from lossless_lab.numerical.noise import ulp_of
from lossless_lab.numerical.tokens import TokenComparison, compare_tokens
from lossless_lab.pipeline.subjects import Subject
from lossless_lab.prompts import Prompt
from lossless_lab.semantic.text import similarity
from lossless_lab.statistical.divergences import divergences
from lossless_lab.statistical.goodness_of_fit import SamplerFit, sampler_fit
from lossless_lab.statistical.sampler_laws import penalised


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Both sides' outputs and how they compare, before anything is concluded.

    Parameters
    ----------
    prompts, decoding : what was asked, and how.
    reference, candidate : completions of either side, prompt by prompt, sample by sample.
    tokens : the outputs compared.
    positions : one row per position whose laws were at hand: the columns of `divergences`, and
        sample_index, bitwise_equal and ulp (of the reference's top logit).
    undefined : (prompt_id, position, side, reason) where logits are no law (NaN, inf).
    logits : (prompt_id, sample_index) -> both sides' logits, kept only where asked for.
    """

    prompts: tuple[Prompt, ...]
    decoding: Decoding
    reference: tuple[Completion, ...]
    candidate: tuple[Completion, ...]
    tokens: TokenComparison
    positions: pd.DataFrame
    undefined: tuple[tuple[str, int, str, str], ...]
    logits: Mapping[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )

    @property
    def one_recording(self) -> bool:
        """Whether both sides hold the same, down to the time that each output took."""
        pairs = zip(self.reference, self.candidate, strict=True)
        bits = self.positions.empty or self.positions["bitwise_equal"].all()
        equal = bits and self.tokens.frame["ids_equal"].all()
        return bool(equal and all(a.timings and a.timings == b.timings for a, b in pairs))

    def without_logits(self) -> Evidence:
        """The same without what is large."""
        own = tuple(replace(c, logits=None) for c in self.candidate)
        return replace(self, candidate=own, logits={})


def gather(
    reference: Subject,
    candidate: Subject,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    decodings: tuple[Decoding, Decoding],
) -> Evidence:
    """Run the candidate and compare it with the reference's `completions`.

    Laws are compared along the reference's own outputs, so that both sides see the same contexts;
    a stored candidate has them up to its first divergence only.

    Parameters
    ----------
    completions : the reference's, prompt by prompt, sample by sample, with logits where it has any.
    decodings : the reference's and the candidate's, which may differ in their end ids.
    """
    decoding = decodings[0]
    own = candidate.complete(prompts, decodings[1])
    keys = [(p.id, i) for p in prompts for i in range(decoding.n_samples)]
    scored = candidate.along(own, [c.output_ids for c in completions])
    dtypes = [dtype_of(side, decoding, prompts) for side in (reference, candidate)]
    told = [side.facts(decoding, prompts).get("text") for side in (reference, candidate)]
    flattened = "flattened" in told  # white space then means nothing
    frames, undefined, logits = [], [], {}
    for key, c, theirs in zip(keys, completions, scored, strict=True):
        if c.logits is None or theirs is None:
            continue
        logits[key] = (c.logits[: len(theirs)], theirs[: len(c.logits)])
        found = divergences(
            *logits[key],
            prompt_id=key[0],
            token_ids=c.output_ids[: len(logits[key][0])],
            temperature=decoding.temperature or 1.0,
        )
        undefined += [(key[0], *rest) for rest in found.undefined]
        frames.append(_with_bits(found.frame, *logits[key], dtypes[0]).assign(sample_index=key[1]))
    tokens = compare_tokens(
        _records(keys, completions, flattened),
        _records(keys, own, flattened),
        laws=logits.get,
        dtype=max(dtypes, key=lambda name: torch.finfo(getattr(torch, name)).eps),
        reference_stop_ids=decoding.stop_token_ids,
        candidate_stop_ids=decodings[1].stop_token_ids,
    )
    return Evidence(
        prompts=tuple(prompts),
        decoding=decoding,
        reference=tuple(completions),
        candidate=tuple(own),
        tokens=tokens,
        positions=pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(),
        undefined=tuple(undefined),
        logits=logits,
    )


def supporting(evidence: Evidence) -> dict[str, Any]:
    """Figures that decide nothing: exact share and text similarity."""
    pairs = list(zip(evidence.reference, evidence.candidate, strict=True))
    found: dict[str, Any] = {"exact share": evidence.tokens.exact_share}
    if any(a.text or b.text for a, b in pairs):  # no texts where nothing decodes them
        alike = [similarity(a.text, b.text) for a, b in pairs]
        found["mean text similarity"] = float(np.mean(alike))
    return found


def sampler_of(evidence: Evidence) -> SamplerFit | None:
    """The candidate's tokens against the laws of its own logits; None if greedy, or no laws."""
    d = evidence.decoding
    if d.greedy or evidence.undefined:
        return None
    own = [c for c in evidence.candidate if c.logits is not None]
    return sampler_fit(
        (
            (penalised(c.logits, c.prompt_ids, c.output_ids, d.repetition_penalty), c.output_ids)
            for c in own
        ),
        temperature=d.temperature,
        top_k=d.top_k,
        top_p=d.top_p,
        min_p=d.min_p,
        rng=np.random.default_rng([d.seed, len(own)]),
    )


def dtype_of(subject: Subject, decoding: Decoding, prompts: Sequence[Prompt]) -> str:
    """Compute dtype of a subject, float32 where it does not tell."""
    if subject.network is not None:
        return str(next(subject.network.parameters()).dtype).removeprefix("torch.")
    named = str(subject.facts(decoding, prompts).get("dtype", ""))
    return named if named in ("bfloat16", "float16", "float64") else "float32"


def _with_bits(
    frame: pd.DataFrame, reference: torch.Tensor, candidate: torch.Tensor, dtype: str
) -> pd.DataFrame:
    same = (reference == candidate) & (reference.signbit() == candidate.signbit())
    same |= reference.isnan() & candidate.isnan()
    top = reference.amax(-1).double().numpy()
    return frame.assign(bitwise_equal=same.all(-1).numpy(), ulp=ulp_of(top, dtype))


def _records(
    keys: Sequence[tuple[str, int]], completions: Sequence[Completion], flattened: bool
) -> list[SimpleNamespace]:
    told = ("prompt_ids", "output_ids", "finish_reason")
    return [
        SimpleNamespace(
            prompt_id=prompt_id,
            sample_index=sample_index,
            text=" ".join(c.text.split()) if flattened else c.text,
            **{name: getattr(c, name) for name in told},
        )
        for (prompt_id, sample_index), c in zip(keys, completions, strict=True)
    ]
