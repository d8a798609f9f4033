"""What the command line accepts; an unknown name is met with the nearest known one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from lossless_lab import __version__, paths

USAGE = 3
LEVELS = ("numerical", "statistical", "semantic")
COMPARE = """\
REFERENCE and CANDIDATE are run folders, .safetensors files of logits (logits/<prompt_id> and
ids/<prompt_id>), or text files with one output per line. Fields that a recorded optimisation
changes may differ; others that matter make the comparison INVALID, unless --under-test names them.

Exit code, for the answer that --require asks for: 0 PROVEN or EQUIVALENT, 1 DIFFERENT,
2 INCONCLUSIVE, NOT EXERCISED, VACUOUS or NOT TESTED, 3 INVALID or wrong usage.
"""


class _Parser(argparse.ArgumentParser):
    """Wrong usage exits with 3; argparse's own 2 would read as INCONCLUSIVE."""

    def error(self, message: str) -> Any:
        self.exit(USAGE, f"{self.prog}: {message} (see `{self.prog} --help`)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            allowed = ", ".join(action.choices)
            said = f"must be one of {allowed}; got {value!r}{_nearest(value, action.choices)}"
            raise argparse.ArgumentError(action, said)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; exits with USAGE where they make no sense."""
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        parser: argparse.ArgumentParser = arguments.parser
        name = unknown[0].partition("=")[0]
        kind = "option" if name.startswith("-") else "argument"
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unknown {kind} {name!r}{_nearest(name, known)}")
    return arguments


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lossless-lab", description="Is an LLM inference optimisation lossless?")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, text: str, **more: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, **({"description": text} | more))
        made.set_defaults(command=name, parser=made)
        return made

    models = command("models", "list models, or fetch one")
    models.add_argument("action", choices=("list", "fetch"))
    models.add_argument("name", nargs="?", help="model to fetch: smollm2, or a Hub id")

    _add_run(command("run", "run prompts through a model and keep the outputs"))

    _add_answer(command("answer", "answer task items and keep who was right"))

    listed = command("runs", "list all runs side by side")
    listed.add_argument("--root", type=Path, default=paths.RUNS, help="folder searched in depth")
    listed.add_argument("--write", type=Path, metavar="FILE.md", help="keep the table in this file")

    raw = argparse.RawDescriptionHelpFormatter
    text = "compare two run folders, files of logits or text files; a gate for CI"
    more = {"description": COMPARE, "formatter_class": raw, "aliases": ["check"]}
    _add_compare(command("compare", text, **more))

    text = "from two runs a page, the table of answers, three figures; exit code as of compare"
    _add_verdict(report := command("report", text))
    text = "(report-CANDIDATE-against-REFERENCE, beside the candidate)"
    report.add_argument("--out", type=Path, metavar="FOLDER", help=text)

    _add_kv_cache(command("kv-cache", "how much memory a model's KV cache takes"))
    command("doctor", "what this machine has, and what is missing")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="tiny-target", help="name, Hub id or folder (%(default)s)")
    add("--dtype", default="float32", help="float32, bfloat16, … (%(default)s)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, mps, auto (%(default)s)")
    add("--attention", default="sdpa", help="kernel: sdpa, eager, … (%(default)s)")
    add("--optimization", default="none", help="catalogue entry, such as int8-channel")


def _add_answer(answer: argparse.ArgumentParser) -> None:
    answer.add_argument("out", type=Path, metavar="OUT.csv", help="table to write, a row per item")
    _add_model(answer)
    text = "JSONL or CSV task file (see data/tasks/README.md); by default the bundled choice items"
    answer.add_argument("--tasks", type=Path, metavar="FILE", help=text)
    answer.add_argument("--every", type=_count, default=1, metavar="N", help="ask each N-th item")


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("folder", type=Path, help="run folder; an unfinished one is resumed")
    _add_model(run)
    run.add_argument("--batch-size", type=_count, help="rows per batch (1, or the entry's own)")
    run.add_argument("--save-logits", action="store_true", help="keep the full logits as well")
    run.add_argument("--top-logprobs", type=int, default=0, help="kept per token (%(default)s)")
    run.add_argument("--prompts", type=Path, help="JSONL prompt file (see data/prompts/README.md)")
    run.add_argument("--limit", type=_count, help="run only the first so many that fit the model")
    run.add_argument("--max-new-tokens", type=int, default=32, help="(%(default)s)")
    run.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    run.add_argument("--top-k", type=int, default=0, help="0, the default, is off")
    run.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    run.add_argument("--min-p", type=float, default=0.0, help="(%(default)s)")
    run.add_argument("--repetition-penalty", type=float, default=1.0, help="(%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    run.add_argument("--n-samples", type=int, default=1, help="per prompt (%(default)s)")


def _add_compare(compare: argparse.ArgumentParser) -> None:
    _add_verdict(compare)
    forms = ("text", "markdown", "latex", "json", "junit")
    text = "of what is printed (%(default)s)"
    compare.add_argument("--format", choices=forms, default="text", help=text)
    text = "write metrics.json and verdict.json there"
    compare.add_argument("--out", type=Path, metavar="FOLDER", help=text)


def _add_verdict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("reference", type=Path)
    add("candidate", type=Path)
    required = "numerical (same token ids; the default), statistical, semantic"
    add("--require", choices=LEVELS, default=LEVELS[0], metavar="LEVEL", help=required)
    prompts = "share of prompts that may differ (0.05)"
    add("--margin-prompts", type=_share, metavar="SHARE", help=prompts)
    tv = "mean total variation that counts as the same (0.01, half 0.05)"
    add("--margin-tv", type=_share, metavar="TV", help=tv)
    fields = "manifest fields that may differ, such as batch_size"
    add("--under-test", nargs="+", default=[], metavar="FIELD", help=fields)
    text = "for level 3, tables of `answer` or samples that lm_eval logged (.jsonl or their "
    text += "folder): reference, candidate and, better, a known-bad control"
    add("--items", nargs="+", type=Path, default=[], metavar="FILE", help=text)
    points = "task points that may be lost (2)"
    add("--margin-points", type=_points, default=2.0, metavar="POINTS", help=points)


def _add_kv_cache(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", help="bundled name (`list` shows them), config.json, its folder, or a Hub id")
    text = "tokens of each sequence, prompt and answer (%(default)s)"
    add("--context", type=_count, default=4096, metavar="TOKENS", help=text)
    add("--batch", type=_count, default=1, help="sequences at once (%(default)s)")
    text = "of keys and values, two where they differ: bfloat16, fp8, q8_0,f16, … (%(default)s)"
    add("--dtype", default="bfloat16", metavar="FORMAT[,FORMAT]", help=text)
    text = "whose reservation, such as 'vllm 0.11' or 'llama.cpp b6500 -c 8192 -ctk q8_0'; "
    add("--engine", metavar="NAME", help=text + "without it what the tokens need")
    gpus = {"dest": "tensor_parallel", "help": "GPUs that share a layer (%(default)s)"}
    add("--tp", type=_count, default=1, metavar="GPUS", **gpus)
    add("--beams", type=_count, default=1, dest="num_beams", help="(%(default)s)")
    text = "positions that cross-attention holds, where the config does not say"
    add("--encoder-len", type=_count, metavar="TOKENS", help=text)
    add("--draft", metavar="CONFIG", help="of a draft model with its own cache")
    text = "of recurrent states: float32, bfloat16, … (the engine's own)"
    add("--state-dtype", metavar="DTYPE", help=text)
    add("--format", choices=("table", "json"), default="table")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def _number(rule: str, allowed: Callable[[float], bool], text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not allowed(value):
        raise argparse.ArgumentTypeError(f"must be {rule}; got {text!r}")
    return value


_points = partial(_number, "above 0 and below 100 points", lambda points: 0 < points < 100)
_share = partial(_number, "a number above 0 and at most 1", lambda share: 0 < share <= 1)
