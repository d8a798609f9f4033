"""The same work without a browser: the `lossless-lab` command, its options and exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lossless_lab.cli import options

__all__ = ["main"]

_ROOMS = {"run": "recording", "answer": "answering", "compare": "comparing", "report": "comparing"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 PROVEN or EQUIVALENT, 1 DIFFERENT, 2 INCONCLUSIVE, NOT EXERCISED, VACUOUS or NOT TESTED,
    3 INVALID, NOT APPLICABLE or wrong usage, 130 interrupted.
    """
    arguments = options.parse(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _say_warning
        try:
            code = _command(arguments.command)(arguments) or 0
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # the reader (`| head`) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (ValueError, KeyError, OSError, MemoryError) as error:
            _say(error.args[0] if isinstance(error, KeyError) and error.args else error)
            return options.USAGE
        except KeyboardInterrupt:
            _say("interrupted; what a run had written is kept, the same command goes on from there")
            return 130


def _command(name: str) -> Callable[[argparse.Namespace], int | None]:
    """A command's function; its room is imported only now, so that --help is quick."""
    room = importlib.import_module(f"lossless_lab.cli.{_ROOMS.get(name, 'listing')}")
    return getattr(room, name.replace("-", "_"))


def _say(message: Any) -> None:
    print(f"lossless-lab: {message}", file=sys.stderr)


def _say_warning(message: Warning | str, category: type[Warning], *where: Any, **also: Any) -> None:
    if issubclass(category, UserWarning):  # what libraries deprecate is no news to a user
        _say(message)
