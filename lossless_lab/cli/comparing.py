"""`compare` and `report`: two run folders, files of logits or text files to a verdict."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors import SafetensorError

from lossless_lab.pipeline import Stored, as_subject, check
from lossless_lab.pipeline.top_k import compare_top_k
from lossless_lab.runs.folder import write_json
from lossless_lab.semantic.lm_eval import read_lm_eval
from lossless_lab.semantic.tasks import TaskComparison, compare_tasks
from lossless_lab.semantic.text import similarity
from lossless_lab.verdict import Verdict
from lossless_lab.verdict.junit import junit

HINT = "; if that is what you test, allow it with --under-test FIELD"


def compare(arguments: argparse.Namespace) -> int:
    """Print the verdict, write its records; returns the exit code of the level asked for."""
    sides, verdict = _checked(arguments)
    print(_printed(verdict, arguments.format, arguments.require))
    outputs = [c for side in sides for c in side.completions.values()]
    if arguments.format == "text" and all(c.top_logprobs and c.logits is None for c in outputs):
        try:
            compare_top_k(arguments.reference, arguments.candidate)  # prints what the lists prove
        except ValueError as error:
            print(f"The lists of likeliest tokens bound no KL: {error}")
    if arguments.out is not None:
        _write_records(arguments.out, sides, verdict)
    return _code(verdict, arguments.require)


def report(arguments: argparse.Namespace) -> int:
    """Write the figures, tables and page of a report; returns the code that `compare` would."""
    from lossless_lab.pipeline.reporting import write_report

    sides, verdict = _checked(arguments)
    before, after = arguments.reference.resolve(), arguments.candidate.resolve()
    folder = arguments.out or after.parent / f"report-{after.name}-against-{before.name}"
    layers = after / "layers.csv"
    _write_records(folder, sides, verdict)
    left = write_report(sides, verdict, folder, captured=layers if layers.is_file() else None)
    said = [verdict.sentence, *(f"{name} left out: {why}" for name, why in left.items())]
    print(*said, f"report written to {folder}", sep="\n")
    return _code(verdict, arguments.require)


def _checked(arguments: argparse.Namespace) -> tuple[tuple[Stored, Stored], Verdict]:
    sides = _side(arguments.reference), _side(arguments.candidate)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if (arguments.out / "manifest.json").exists():
            raise ValueError(f"`--out`: {arguments.out} is a run, whose metrics.json would be lost")
    given = {"1b": arguments.margin_prompts, "2": arguments.margin_tv}
    return sides, check(
        *sides,
        margins={level: value for level, value in given.items() if value is not None},
        under_test=arguments.under_test,
        tasks=_items(arguments.items, arguments.margin_points / 100),
        progress=sys.stderr.isatty(),
    )


def _write_records(folder: Path, sides: tuple[Stored, Stored], verdict: Verdict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "verdict.json", json.loads(verdict.to_json()))
    write_json(folder / "metrics.json", _record(sides, verdict))


def _code(verdict: Verdict, require: str) -> int:
    answer = verdict[require]
    if answer.word == "INVALID":
        kinds = {row[3] for row in verdict.differences}
        hint = HINT if kinds & {"sampling", "seed", "scheduling"} and "prompts" not in kinds else ""
        cause = verdict.cause.partition(" (outputs compared")[0]
        print(f"lossless-lab: INVALID: {cause}{hint}", file=sys.stderr)
    return answer.exit_code


def _side(path: Path) -> Stored:
    if not path.exists():
        raise ValueError(f"there is no run folder or file {path}")
    try:
        return as_subject(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no file of logits: {error}") from None


def _items(tables: list[Path], margin: float) -> TaskComparison | None:
    """Both sides' task items compared; None where there are none."""
    if not tables:
        return None
    if len(tables) not in (2, 3):
        raise ValueError(
            "`--items` takes two tables, of reference and candidate, and a third of a control; "
            f"got {len(tables)}"
        )
    read = [_table(path) for path in tables]
    return compare_tasks(*read[:2], margin=margin, control=read[2] if read[2:] else None)


def _table(path: Path) -> pd.DataFrame:
    if path.is_dir() or path.suffix == ".jsonl":
        return read_lm_eval(path)
    try:
        return pd.read_csv(path, dtype=str, keep_default_na=False)
    except ValueError as error:
        raise ValueError(f"`--items`: {path} is no table of `answer`: {error}") from None


def _printed(verdict: Verdict, form: str, require: str) -> str:
    text = "\n".join(filter(None, [verdict.sentence, verdict.supporting_line]))
    if form == "markdown":
        return f"{verdict.to_markdown()}\n\n{text}"
    if form == "junit":
        return junit(verdict, require=require)
    return {"text": lambda: text, "latex": verdict.to_latex, "json": verdict.to_json}[form]()


def _record(sides: tuple[Stored, Stored], verdict: Verdict) -> dict[str, Any]:
    """metrics.json: counts, exact share, mean character similarity, one row per sample."""
    a, b = (side.completions for side in sides)
    tokens = verdict.evidence.get("tokens")
    frame = [] if tokens is None else json.loads(tokens.to_json(orient="records"))
    told = {(row["prompt_id"], row["sample_index"]): row for row in frame}
    samples = []
    for key in a:
        if key not in b or (a[key].prompt_ids and b[key].prompt_ids not in ((), a[key].prompt_ids)):
            continue  # not the same question
        ids = a[key].output_ids, b[key].output_ids
        exact = a[key].text == b[key].text if None in ids else ids[0] == ids[1]
        alike = similarity(a[key].text, b[key].text) if a[key].text or b[key].text else None
        found = {"exact": exact, "character_similarity": alike}
        samples.append({"prompt_id": key[0], "sample_index": key[1]} | told.get(key, {}) | found)
    texts = [s["character_similarity"] for s in samples if s["character_similarity"] is not None]
    return {
        "n_samples": len(samples),
        "exact_share": sum(s["exact"] for s in samples) / len(samples) if samples else None,
        "mean_character_similarity": sum(texts) / len(texts) if texts else None,
        "answers": {answer.level: answer.word for answer in verdict.answers},
        "samples": samples,
    }
