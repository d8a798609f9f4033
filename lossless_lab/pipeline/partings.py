"""How outputs part: by an echoed prompt, by their ends, as text alone, or from their own logits."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

import torch

from lossless_lab.engines.protocol import Completion
from lossless_lab.numerical.noise import ulp_of
from lossless_lab.pipeline.evidence import Evidence
from lossless_lab.statistical.sampler_laws import penalised

_ROUNDING = 8  # steps between the logits of two passes


def in_common(evidence: Evidence) -> str:
    """What explains all outputs that differ, in words; "" where some part in another way."""
    stops = [evidence.tokens.reference_stop_ids or (), evidence.tokens.candidate_stop_ids or ()]
    told, names = {}, ["reference", "candidate"]
    for i in evidence.tokens.frame.index[~evidence.tokens.frame["ids_equal"]]:
        pair = [evidence.reference[i], evidence.candidate[i]]
        told[_told(pair, stops, names) or _told(pair[::-1], stops[::-1], names[::-1])] = None
    return "" if "" in told else "; ".join(told)


def _told(pair: Sequence[Completion], stops: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """What the second of a pair has that the first has not, in words; "" for nothing known."""
    (a, b), (one, other), (x, y) = pair, names, [c.output_ids for c in pair]
    if x is None or y is None:
        if len(a.text) > 3 and b.text.endswith(a.text):  # fewer may be there by chance
            return f"the {other}'s texts begin with more, such as an echoed prompt"
        if len(a.text) > 3 and b.text.startswith(a.text):
            return f"the {other}'s texts go on where the {one}'s end"
        same = len({unicodedata.normalize("NFC", c.text) for c in pair}) == 1
        return "texts differ in their Unicode normal form alone" if same else ""
    n, rest = len(x), y[len(b.prompt_ids) :]
    if b.prompt_ids and rest and y[: -len(rest)] == b.prompt_ids and rest[:n] == x[: len(rest)]:
        return f"the {other}'s outputs begin with their prompts"
    ended = n > 0 and x[-1] in stops[0]
    if y[:n] != x:
        if a.logits is b.logits is None and ended and len(y) >= n and y[: n - 1] == x[:-1]:
            return f"the {other} writes on where the {one} ends, as if end ids were held back"
        return "texts are equal: the same text in other tokens" if a.text == b.text != "" else ""
    if ended and x[-1] in stops[1]:
        pads = " (one id alone: a pad tail?)" if len({*y[n:]}) == 1 else ""
        return f"the {other} goes on after the end id {x[-1]}{pads}"
    if ended:
        sets = " and ".join(f"{[*ids]} ({name})" for ids, name in zip(stops, names, strict=True))
        return f"stop sets differ: {sets}; outputs agree up to the stop"
    if len(y) == n + 1 and y[-1] in {*stops[0], *stops[1]}:
        return f"the {one} leaves out the end id {y[-1]} that the {other} keeps"
    return f"the {one} stops earlier, without an end id; outputs agree up to there"


def against_own_logits(evidence: Evidence) -> str:
    """Greedy tokens of one side, up to where outputs part, that its own logits make unlikely.

    Where both sides have some, they may share a rule, such as one against repeated n-grams. What
    does not tell how it ended, such as a bare file of logits, is not held to anything.
    """
    parted = evidence.tokens.frame[["prompt_id", "sample_index", "first_divergence"]].dropna()
    places: list[list[str]] = [[], []]
    for i, *key, at in parted.itertuples() if evidence.decoding.greedy else ():
        pair, laws = (evidence.reference[i], evidence.candidate[i]), evidence.logits.get((*key,))
        for completion, logits, found in zip(pair, laws or (), places, strict=False):
            told = _unlikely(completion, logits[: int(at) + 1], evidence)
            found += [f"prompt {key[0]!r}, token {t}: {what}" for t, what in told]
    if bool(places[0]) == bool(places[1]):
        return ""
    side, told = ("candidate", places[1]) if places[1] else ("reference", places[0])
    return (
        f"the {side} does not choose the likeliest token of its own logits ({len(told)} times up "
        f"to where outputs part, as at {told[-1]}): a penalty, an end id held back, logits of "
        "another position, or sampling"
    )


def _unlikely(c: Completion, logits: torch.Tensor, evidence: Evidence) -> Iterator[tuple[int, str]]:
    """(position, token written and likeliest one) where they are not one but for rounding."""
    penalty = evidence.decoding.repetition_penalty
    for t, (chosen, law) in enumerate(zip(c.output_ids, logits, strict=False)):
        if c.finish_reason is not None:
            before = (*c.prompt_ids, *c.output_ids[:t])
            law = penalised(law[None], before, (chosen,), penalty)[0].double()
            step = float(ulp_of(float(law.max()), evidence.tokens.dtype))
            if law.max() - law[chosen] > _ROUNDING * step:
                yield t, f"{chosen}, not {int(law.argmax())}"
