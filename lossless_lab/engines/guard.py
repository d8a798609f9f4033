"""A guard for low precision: answers that are not finite are recorded, and made again elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from .decoding import Decoding
from .protocol import Completion, Engine, batch_seed, batches


def guarded(
    candidate: Engine, reference: Engine, prompts: Mapping[str, Sequence[int]], decoding: Decoding
) -> tuple[dict[str, Completion], dict[str, str]]:
    """The candidate's answers; the reference's for each prompt where those break down.

    An answer breaks down where the log-probability of one of its tokens is not finite, or where
    the candidate raises RuntimeError (a sampler that finds NaN) or FloatingPointError. A batch that
    raises is run again row by row, so that one prompt does not take its neighbours with it.

    Parameters
    ----------
    candidate, reference : engines of one vocabulary that report log-probabilities.
    prompts : prompt id -> token ids.
    decoding : with one sample per prompt.

    Returns
    -------
    Completions by prompt id; and by id of each prompt that was run again, by either engine, what
    went wrong in its batch and alone.

    Raises
    ------
    ValueError
        Naming the prompt, where an engine cannot take it or the reference breaks down as well; for
        engines of two vocabularies, answers without log-probabilities, and more than one sample.

    Notes
    -----
    Each rerun draws with a seed of its own. Under sampling, the candidate's answers of a batch that
    raised are drawn on condition that they raise no more: no sample of its law.
    """
    if not isinstance(prompts, Mapping):
        raise ValueError(f"`prompts` must map prompt ids to ids; got a {type(prompts).__name__}")
    if decoding.n_samples != 1:
        raise ValueError(f"`decoding.n_samples` must be 1; got {decoding.n_samples}")
    known = [engine.describe() for engine in (candidate, reference)]
    for key in ("vocab_size", "tokenizer_sha256"):
        if len(told := {facts.get(key, "none"): 0 for facts in known} | {"none": 0}) > 2:
            raise ValueError(f"`reference` must have the candidate's {key}; got {[*told][:2]}")
    done, faults, items = {}, {}, [*prompts.items()]
    for index, numbers in enumerate(batches(len(items), candidate.batch_size)):
        rows, seed = dict(items[numbers.start : numbers.stop]), batch_seed(decoding.seed, index)
        answers = _answers(candidate, rows, decoding, seed)
        for k, (name, answer) in enumerate(zip(rows, answers, strict=True)):
            alone = {name: prompts[name]}, decoding, batch_seed(seed, k)
            fault = again = _fault(answer)
            if isinstance(answer, Exception) and len(rows) > 1:
                (answer,) = _answers(candidate, *alone)
                fault = f"in its batch {fault}; alone {(again := _fault(answer)) or 'nothing'}"
            if again:
                (answer,) = _answers(reference, *alone)
                if worse := _fault(answer):
                    raise ValueError(f"`reference` must answer prompt {name!r} too; got {worse}")
            done[name] = answer
            faults |= {name: fault} if fault else {}
    return done, faults


def _answers(engine: Engine, rows: Mapping, decoding: Decoding, seed: int) -> Sequence:
    """A Completion of each row, or the error that all of them met."""
    try:
        return engine.generate([*rows.values()], decoding, seed=seed)
    except (NotImplementedError, RecursionError):  # RuntimeErrors that no number causes
        raise
    except (RuntimeError, FloatingPointError) as error:
        return [error] * len(rows)
    except ValueError as error:
        named = re.sub(r"(?<=prompts\[)\d+", lambda i: repr([*rows][int(i[0])]), str(error))
        raise ValueError(named) from error


def _fault(answer: Completion | Exception) -> str:
    """What is wrong with an answer; "" for nothing."""
    if isinstance(answer, Exception):
        return f"{type(answer).__name__}: {answer}"
    if answer.logprobs is None:
        raise ValueError("`candidate` and `reference` must report log-probabilities; got None")
    bad = [(i, x) for i, x in enumerate(answer.logprobs) if not math.isfinite(x)]
    return f"log-probability {bad[0][1]} at token {bad[0][0]}" if bad else ""
