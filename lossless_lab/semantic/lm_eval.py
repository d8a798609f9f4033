"""Reads the samples that lm-evaluation-harness logs, as tables of who was right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd

from .items import COLUMNS

METRICS = ("acc", "exact_match", "acc_norm")
_NAME = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.-]+")


def read_lm_eval(
    path: str | Path, *, metric: str | None = None, filter: str | None = None
) -> pd.DataFrame:
    """The items of `lm_eval --log_samples` as `compare_tasks` takes them, a category per task.

    Parameters
    ----------
    path : a file samples_<task>_<date>.jsonl, or a folder, whose such files are all read.
    metric : what decides who was right, 0 or 1 for each item; None takes the first of METRICS that
        the file has.
    filter : which extraction of the answer, where the task logs several ("strict-match"); None
        takes the first of the file and names it in the category.

    Returns
    -------
    DataFrame
        `semantic.items.COLUMNS` and SHOWN. `margin_nats` is that of the raw log-likelihoods,
        whatever the metric; NaN for generated answers and where the log does not say which choice
        is right. `group` is the prompt's hash: two runs with other prompts are refused.

    Raises
    ------
    ValueError
        With file, line, field, rule and value, for what is no such log.

    Notes
    -----
    Source: `save_results_samples` of lm-evaluation-harness 0.4.13. `chance` is one of the choices'
    number, 0 for generated answers.
    """
    path = Path(path)
    files = sorted(path.rglob("samples_*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"`path` must be or hold samples_<task>_<date>.jsonl; got {str(path)!r}")
    frames = [_read(file, metric, filter) for file in files]
    return pd.concat(frames, ignore_index=True)


def _read(path: Path, metric: str | None, wanted: str | None) -> pd.DataFrame:
    """One file: a row per document."""
    match = _NAME.fullmatch(path.stem)
    task, rows, filters = match[1] if match else path.stem, [], []
    for line, text in enumerate(path.open(encoding="utf-8", newline="\n"), start=1):
        try:
            sample = json.loads(text)
            filters += [sample["filter"]] if sample["filter"] not in filters else []
            if sample["filter"] == (wanted or filters[0]):
                rows.append(_row(task, sample, metric))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            said = "it must have the field " * isinstance(error, KeyError) + str(error)
            raise ValueError(f"{path}:{line}: must be a logged sample; {said}") from None
    if not rows:
        said = f" of filter {wanted!r}; there are {filters}" if filters else "; the file is empty"
        raise ValueError(f"{path}: must hold at least one sample{said}")
    frame = pd.DataFrame(rows)
    if len(filters) > 1:
        frame["category"] += f":{wanted or filters[0]}"
    return frame


def _row(task: str, sample: dict, metric: str | None) -> dict:
    asked = [*sample["arguments"].values()]
    answers = sample["filtered_resps"]
    name = metric or next((m for m in METRICS if m in sample), METRICS[0])
    if sample[name] not in (0, 1):
        raise ValueError(f"`{name}` must be 0 or 1; received {sample[name]!r}")
    margin, chance, chosen, right = np.nan, 0.0, sample["resps"][0][0], sample["target"]
    if len(answers) > 1 and all(isinstance(a, list) and len(a) == 2 for a in answers):
        # `acc_mutual_info` logs each choice a second time, without its prompt
        n = len(answers) // (1 + ("acc_mutual_info" in sample))
        nats = np.array([float(a[0]) for a in answers[:n]])
        if not np.isfinite(nats).all():
            raise ValueError(f"`filtered_resps` must be finite; received {nats.tolist()}")
        choices = [a["arg_1"] for a in asked[:n]]
        chance, chosen = 1 / n, choices[int(nats.argmax())]
        place = _right_choice(sample, nats, choices)
        if place is not None:
            right = choices[place]
            margin = nats[place] - np.delete(nats, place).max()
    values = (f"{task}-{sample['doc_id']}", task, sample["prompt_hash"])
    values += bool(sample[name]), float(margin), chance
    shown = {"prompt": asked[0]["arg_0"], "right_answer": right, "chosen": str(chosen)}
    return dict(zip(COLUMNS, values, strict=True)) | shown


def _right_choice(sample: dict, nats: np.ndarray, choices: list[str]) -> int | None:
    """Its index: the target, as a number or a text, where it explains `acc`; of two, from `acc`."""
    target, best = sample["target"], int(nats.argmax())
    texts = [choice.strip() for choice in choices]
    if target.isdecimal() and int(target) < len(choices):
        found = int(target)
    elif texts.count(target.strip()) == 1:
        found = texts.index(target.strip())
    elif len(choices) == 2 and "acc" in sample:
        found = best if sample["acc"] else 1 - best
    else:
        return None
    return found if sample.get("acc", found == best) == (found == best) else None
