"""A guard for low precision: answers that are not finite are recorded, and made again elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .decoding import Decoding
from .protocol import Completion, Engine, batch_seed, batches


def guarded(
    candidate: Engine, reference: Engine, prompts: Mapping[str, Sequence[int]], decoding: Decoding
) -> tuple[dict[str, Completion], dict[str, str]]:
    """The candidate's answers; the reference's for each prompt where those break down.

    An answer breaks down where the log-probability of one of its tokens is not finite, or where
    the candidate raises RuntimeError (a sampler that finds NaN); a batch that raises is run again
    row by row, so that one prompt does not take its neighbours with it.

    Parameters
    ----------
    candidate, reference : engines that report log-probabilities.
    prompts : prompt id -> token ids.
    decoding : with one sample per prompt.

    Returns
    -------
    Completions by prompt id, and what was wrong by id of the prompts that were run again.

    Raises
    ------
    ValueError
        Where an engine reports no log-probabilities, or the reference breaks down as well.
    """
    done, faults, names = {}, {}, [*prompts]
    for index, numbers in enumerate(batches(len(names), candidate.batch_size)):
        rows, seed = [names[i] for i in numbers], batch_seed(decoding.seed, index)
        answers = _answers(candidate, [prompts[name] for name in rows], decoding, seed)
        for name, answer in zip(rows, answers, strict=True):
            done[name] = answer
            if fault := _fault(answer):
                faults[name] = fault
                (done[name],) = _answers(reference, [prompts[name]], decoding, seed)
                if again := _fault(done[name]):
                    raise ValueError(f"`reference` must answer prompt {name!r} too; got {again}")
    return done, faults


def _answers(
    engine: Engine, rows: list[Sequence[int]], decoding: Decoding, seed: int
) -> list[Completion | RuntimeError]:
    try:
        return engine.generate(rows, decoding, seed=seed)
    except RuntimeError as error:
        if len(rows) == 1:
            return [error]
        return [answer for row in rows for answer in _answers(engine, [row], decoding, seed)]


def _fault(answer: Completion | RuntimeError) -> str:
    """What is wrong with an answer; "" for nothing."""
    if isinstance(answer, RuntimeError):
        return f"RuntimeError: {answer}"
    if answer.logprobs is None:
        raise ValueError("`candidate` and `reference` must report log-probabilities; got None")
    bad = [(i, x) for i, x in enumerate(answer.logprobs) if not math.isfinite(x)]
    return f"log-probability {bad[0][1]} at token {bad[0][0]}" if bad else ""
