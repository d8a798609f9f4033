"""`answer`: task items through a model into a table of who was right, by how much."""

from __future__ import annotations

import argparse
import sys

import pandas as pd

from lossless_lab import optimizations
from lossless_lab.cli.recording import loaded
from lossless_lab.pipeline.tasks import answer as answer_freely
from lossless_lab.pipeline.tasks import choose
from lossless_lab.prompts.task_items import read_tasks


def answer(arguments: argparse.Namespace) -> None:
    """Score every item of a task file, or of the bundled set, and write one row per item."""
    tasks = read_tasks(arguments.tasks)[:: arguments.every]
    model = loaded(arguments)
    if arguments.optimization != "none":
        model = optimizations.find(arguments.optimization).apply(model).model
    chosen = [task for task in tasks if task.choices is not None]
    asked = [task for task in tasks if task.choices is None]
    tables = [choose(model, chosen, progress=sys.stderr.isatty())] if chosen else []
    tables += [answer_freely(model, asked)] if asked else []
    table = pd.concat(tables)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(arguments.out, index=False)
    print(f"{table['right'].sum()} of {len(table)} items right, written to {arguments.out}")
