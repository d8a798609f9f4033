"""A model answers task items: by the likeliest of the choices, or freely; one row per item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.protocol import complete
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.prompts.task_items import Task
from lossless_lab.semantic.items import COLUMNS
from lossless_lab.semantic.paired import smallest_margin
from lossless_lab.semantic.tasks import TaskComparison, answer_scores
from lossless_lab.semantic.text import refuse_uneven
from lossless_lab.verdict import Answer, Verdict

_TOKENS = 2048  # of one pass over prompts, all of one length


@torch.inference_mode()
def choose(model: Any, tasks: Sequence[Task], *, progress: bool = True) -> pd.DataFrame:
    """Σ log p of each choice after its prompt, in nats; the answer is the likeliest choice.

    The prompt and each choice are tokenised apart and joined, so that every choice follows the
    same ids. Each prompt is computed once; its cache is shared by its choices.

    Parameters
    ----------
    model : as `models.load` returns it.
    tasks : choice items.

    Returns
    -------
    DataFrame
        `semantic.items.COLUMNS` and SHOWN, and logprobs_nats (of the choices).

    Raises
    ------
    ValueError
        For no items, items without choices, and logits that are not finite.
    """
    if not tasks or any(task.choices is None for task in tasks):
        raise ValueError("`tasks` must be one or more items with `choices`")
    tokenizer = model.tokenizer
    prompts = [tokenizer(task.prompt)["input_ids"] for task in tasks]
    endings = [
        [tokenizer(c, add_special_tokens=False)["input_ids"] for c in t.choices] for t in tasks
    ]
    found: dict[int, list[float]] = {}
    batches = [*_batches(prompts, endings)]
    for batch in tqdm(batches, disable=not progress, unit="batch"):
        ids = torch.tensor([prompts[i] for i in batch])
        values = _logprobs(model.network, ids, [endings[i] for i in batch])
        found |= dict(zip(batch, values, strict=True))
    rows = []
    for i, task in enumerate(tasks):
        logprobs = np.array(found[i])
        if not np.isfinite(logprobs).all():
            raise ValueError(f"item {task.id!r}: log-likelihoods of the choices are {logprobs}")
        best = int(logprobs.argmax())
        margin = logprobs[task.answer] - np.delete(logprobs, task.answer).max()
        rows.append(
            _row(task, best == task.answer, margin, 1 / len(logprobs))
            | {"chosen": task.choices[best], "logprobs_nats": logprobs.round(6).tolist()}
        )
    return pd.DataFrame(rows)


def answer(
    model: Any, tasks: Sequence[Task], *, max_new_tokens: int = 16, batch_size: int = 8
) -> pd.DataFrame:
    """Greedy answers, cut at the first line; right where a right answer's words are all there.

    Returns
    -------
    DataFrame
        `semantic.items.COLUMNS` (margin NaN, chance 0) and SHOWN; exact, recall and f1.
    """
    if not tasks or any(task.answers is None for task in tasks):
        raise ValueError("`tasks` must be one or more items with `answers`")
    engine = TransformersEngine(model, batch_size=batch_size)
    decoding = Decoding(max_new_tokens=max_new_tokens)
    prompts = [model.tokenizer(task.prompt)["input_ids"] for task in tasks]
    batches = complete(engine, prompts, decoding)
    rows = []
    for task, done in zip(tasks, (one for _, batch in batches for one in batch), strict=True):
        text = done.text.strip().split("\n")[0]
        scores = answer_scores(text, task.answers)
        rows.append(_row(task, scores["recall"] == 1, np.nan, 0.0) | {"chosen": text} | scores)
    return pd.DataFrame(rows)


@torch.inference_mode()
def likelihood_shift(
    model: Any, prompts: Sequence[str], own: Sequence[str], other: Sequence[str]
) -> pd.DataFrame:
    """How much likelier a model finds its own answers than the other side's, in nats per token.

    It takes no embedding model and works in every language that the model does: near 0 where the
    other answer might as well have been its own. Compare it with what another seed gives.

    Parameters
    ----------
    model : as `models.load` returns it.
    prompts, own, other : texts, answer by answer; `own` is what this model answered.

    Returns
    -------
    DataFrame
        own_nats and other_nats, log p of each answer per token; shift_nats, the first minus the
        second, exactly 0 where the texts are equal.

    Examples
    --------
    >>> from lossless_lab import load
    >>> likelihood_shift(load("tiny-target"), ["The cache"], [" keeps keys"], [" keeps keys"])[
    ...     "shift_nats"].tolist()
    [0.0]
    """
    refuse_uneven(prompts=prompts, own=own, other=other)
    rows = []
    for i, (prompt, *pair) in enumerate(zip(prompts, own, other, strict=True)):
        ids = model.tokenizer(prompt)["input_ids"]
        ends = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in pair]
        if not ids or not all(ends):
            raise ValueError(f"prompt and answers {i} must hold a token at least; got {pair}")
        (sums,) = _logprobs(model.network, torch.tensor([ids]), [ends])
        nats = [total / len(end) for total, end in zip(sums, ends, strict=True)]
        shift = nats[0] - nats[1] if pair[0] != pair[1] else 0.0
        rows.append({"own_nats": nats[0], "other_nats": nats[1], "shift_nats": shift})
    return pd.DataFrame(rows)


def with_task_quality(verdict: Verdict, found: TaskComparison) -> Verdict:
    """The verdict with its answer at level 3 from items; INVALID and VACUOUS ones stay so."""
    if verdict["3"].word != "NOT TESTED":
        return verdict
    blunt = found.frame.query("why != ''")["category"].tolist()
    if found.table is None:
        answer = Answer(level="3", word="INCONCLUSIVE", not_shown="no item could have shown harm")
    else:
        last = found.frame.iloc[-1]
        smallest = smallest_margin(found.table.n, max(found.table.flip_rate, 1 / found.table.n))
        hidden = ["other kinds of items"]
        hidden += [f"the same answers ({found.finding})"] if found.finding else []
        hidden += [last["why"]] if last["why"] else []
        hidden += [f"categories without assay sensitivity ({', '.join(blunt)})"] if blunt else []
        answer = Answer(
            level="3",
            word=last["word"],
            estimate=100 * found.table.difference,
            confidence_interval=(100 * last["low"], 100 * last["high"]),
            margin=100 * found.margin,
            n=found.table.n,
            minimum_detectable_effect=100 * smallest,
            not_shown="; ".join(hidden),
        )
    answers = tuple(answer if a.level == "3" else a for a in verdict.answers)
    return replace(verdict, answers=answers)


def _row(task: Task, right: bool, margin: float, chance: float) -> dict:
    group = task.group if task.group is not None else task.prompt
    values = (task.id, task.category, group, bool(right), float(margin), chance)
    right_answer = task.answers[0] if task.choices is None else task.choices[task.answer]
    shown = {"prompt": task.prompt, "right_answer": right_answer}
    return dict(zip(COLUMNS, values, strict=True)) | shown


def _batches(prompts: list[list[int]], endings: list[list[list[int]]]) -> Iterator[list[int]]:
    """Items whose prompts have one length and that have as many choices: none needs padding."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for i, (prompt, choices) in enumerate(zip(prompts, endings, strict=True)):
        kinds.setdefault((len(prompt), len(choices)), []).append(i)
    for (length, _), items in sorted(kinds.items()):
        size = max(1, _TOKENS // length)
        yield from (items[start : start + size] for start in range(0, len(items), size))


def _logprobs(network: Any, ids: torch.Tensor, endings: list[list[list[int]]]) -> list[list[float]]:
    """Log-likelihood of each choice of each row."""
    n_choices = len(endings[0])
    flat = [ids_ for choices in endings for ids_ in choices]
    lengths = torch.tensor([len(c) for c in flat])
    padded = torch.zeros(len(flat), int(lengths.max()), dtype=torch.long)
    for row, choice in zip(padded, flat, strict=True):
        row[: len(choice)] = torch.tensor(choice)
    out = network(ids.to(network.device), use_cache=True, logits_to_keep=1)
    first = out.logits[:, -1:].repeat_interleave(n_choices, 0)
    logits = first
    if padded.shape[1] > 1:
        cache = out["cache"]
        cache.batch_repeat_interleave(n_choices)
        rest = network(padded[:, :-1].to(network.device), cache=cache, use_cache=True).logits
        logits = torch.cat([first, rest], 1)
    picked = torch.empty(len(flat))
    for i, (row, choice) in enumerate(zip(logits, padded.to(logits.device), strict=True)):
        n = int(lengths[i])
        logprobs = row[:n].float().log_softmax(-1).gather(1, choice[:n, None])
        picked[i] = logprobs.sum()
    return picked.reshape(-1, n_choices).tolist()
