"""The same work without a browser: the `lossless-lab` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lossless_lab import __version__, paths

USAGE = 3


class _Parser(argparse.ArgumentParser):
    """Wrong usage exits with 3; argparse's own 2 would read as INCONCLUSIVE."""

    def error(self, message: str) -> Any:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 PROVEN or EQUIVALENT, 1 DIFFERENT, 2 INCONCLUSIVE, NOT EXERCISED, VACUOUS or NOT TESTED,
    3 INVALID, NOT APPLICABLE or wrong usage.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments) or 0
    except (ValueError, KeyError, OSError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"lossless-lab: {text}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lossless-lab", description="Is an LLM inference optimisation lossless?")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    models = commands.add_parser("models", help="list models, or fetch one")
    models.add_argument("action", choices=("list", "fetch"))
    models.add_argument("name", nargs="?", help="model to fetch, such as smollm2")
    models.set_defaults(command=_models)

    run = commands.add_parser("run", help="run prompts through a model and keep the outputs")
    run.add_argument("folder", type=Path, help="run folder; an unfinished one is resumed")
    run.add_argument("--model", default="tiny-target", help="name, Hub id or folder")
    run.add_argument("--dtype", default="float32")
    run.add_argument("--device", default="cpu")
    run.add_argument("--attention", default="sdpa", help="sdpa or eager")
    run.add_argument("--optimization", default="none", help="catalogue entry, such as batch-8")
    run.add_argument("--batch-size", type=int, help="rows per batch (1, or what the entry sets)")
    run.add_argument("--save-logits", action="store_true", help="keep the full logits as well")
    run.add_argument("--top-logprobs", type=int, default=0)
    _add_prompts(run)
    _add_decoding(run)
    run.set_defaults(command=_run)

    listed = commands.add_parser("runs", help="list all runs side by side")
    listed.add_argument("--root", type=Path, default=paths.RUNS)
    listed.add_argument("--write", type=Path, metavar="FILE.md", help="keep the table in this file")
    listed.set_defaults(command=_runs)

    compare = commands.add_parser(
        "compare",
        help="compare two run folders, files of logits or text files",
        description="Exit code: 0 PROVEN or EQUIVALENT, 1 DIFFERENT, 2 undecided, 3 INVALID.",
    )
    compare.add_argument("reference", type=Path)
    compare.add_argument("candidate", type=Path)
    compare.add_argument("--require", default="numerical", help="numerical, statistical, semantic")
    compare.add_argument("--margin-prompts", type=float, help="share of prompts that may differ")
    compare.add_argument("--margin-tv", type=float, help="mean total variation that counts as same")
    compare.add_argument(
        "--under-test", nargs="*", default=[], help="manifest fields that may differ"
    )
    compare.add_argument("--format", choices=("text", "markdown", "latex", "json"), default="text")
    compare.add_argument("--out", type=Path, help="folder for metrics.json and verdict.json")
    compare.set_defaults(command=_compare)

    doctor = commands.add_parser("doctor", help="what this machine has, and what is missing")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, help="JSONL prompt file (data/prompts/README.md)")
    parser.add_argument("--limit", type=int, help="only the first so many prompts")


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 means greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n-samples", type=int, default=1)


def _models(arguments: argparse.Namespace) -> None:
    from lossless_lab import models

    if arguments.action == "list":
        print(models.available().to_string(index=False))
    elif arguments.name is None:
        raise ValueError("`models fetch` needs a name, such as smollm2")
    else:
        models.fetch(arguments.name)


def _run(arguments: argparse.Namespace) -> None:
    from lossless_lab import models, optimizations, prompts, runs
    from lossless_lab.engines import Decoding, TransformersEngine

    fields = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    fields = (*fields, "seed", "n_samples")
    decoding = Decoding(**{name: getattr(arguments, name) for name in fields})
    entry = None if arguments.optimization == "none" else optimizations.find(arguments.optimization)
    read = prompts.read(arguments.prompts)[: arguments.limit]
    model = models.load(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        attn_implementation=arguments.attention,
    )
    settings: dict[str, Any] = {"top_logprobs": arguments.top_logprobs}
    if entry is not None:
        candidate = entry.apply(model)
        model, settings = candidate.model, settings | candidate.settings
    if arguments.batch_size is not None:
        settings["batch_size"] = arguments.batch_size
    limit = getattr(model.network.config, "max_position_embeddings", None)
    room = None if limit is None else limit - decoding.max_new_tokens
    run = runs.record(
        arguments.folder,
        TransformersEngine(model, keep_logits=arguments.save_logits, **settings),
        prompts.tokenize(read, model, max_prompt_tokens=room),
        decoding,
        optimization=arguments.optimization,
        save_logits=arguments.save_logits,
    )
    print(f"{len(run.records)} outputs in {arguments.folder}")


def _runs(arguments: argparse.Namespace) -> None:
    from lossless_lab import runs

    if arguments.write is not None:
        runs.write_table(arguments.write, root=arguments.root)
        print(f"wrote the table of runs to {arguments.write}")
    else:
        print(runs.table(arguments.root).to_string(index=False))


def _compare(arguments: argparse.Namespace) -> int:
    from lossless_lab.pipeline import check
    from lossless_lab.verdict import REQUIREMENTS

    if arguments.require not in REQUIREMENTS:
        allowed = ", ".join(REQUIREMENTS)
        raise ValueError(f"`--require` must be one of {allowed}; got {arguments.require!r}")
    given = {"1b": arguments.margin_prompts, "2": arguments.margin_tv}
    margins = {level: value for level, value in given.items() if value is not None}
    for side in (arguments.reference, arguments.candidate):
        if not side.exists():
            raise ValueError(f"there is no run folder or file {side}")
    verdict = check(
        arguments.reference,
        arguments.candidate,
        margins=margins,
        under_test=arguments.under_test,
        progress=sys.stderr.isatty(),
    )
    shown = {
        "text": verdict.sentence,
        "markdown": f"{verdict.to_markdown()}\n\n{verdict.sentence}",
        "latex": verdict.to_latex(),
        "json": verdict.to_json(),
    }
    print(shown[arguments.format])
    if arguments.out is not None:
        _write_comparison(arguments.out, verdict)
    return verdict[arguments.require].exit_code


def _write_comparison(folder: Path, verdict: Any) -> None:
    """metrics.json (sample count, exact share, similarity, per-sample rows) and verdict.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "verdict.json").write_text(verdict.to_json(), encoding="utf-8")
    tokens = verdict.evidence.get("tokens")
    rows = [] if tokens is None else json.loads(tokens.to_json(orient="records"))
    metrics = {
        "n_samples": len(rows),
        "exact_share": verdict.supporting.get("exact share"),
        "mean_text_similarity": verdict.supporting.get("mean text similarity"),
        "samples": rows,
    }
    text = json.dumps(metrics, ensure_ascii=False, indent=1, allow_nan=False)
    (folder / "metrics.json").write_text(text, encoding="utf-8")


def _doctor(arguments: argparse.Namespace) -> None:
    from lossless_lab import doctor

    print(doctor.report().to_string(index=False))


if __name__ == "__main__":
    sys.exit(main())
