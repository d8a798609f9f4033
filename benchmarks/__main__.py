"""`python -m benchmarks bench|calibrate [room …]`: runs the rooms' functions of that name."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import platform
from importlib.metadata import version
from pathlib import Path

import pandas as pd

import benchmarks

FOLDER = Path(__file__).parent


def rooms(names: list[str], function: str):
    """The modules of this folder, or the named ones, that have the function."""
    found = sorted(m.name for m in pkgutil.iter_modules([str(FOLDER)]) if m.name[0] != "_")
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise SystemExit(f"no benchmark {unknown[0]!r}; there are {', '.join(found) or 'none'}")
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names or found]
    return [module for module in modules if hasattr(module, function)]


def machine() -> str:
    """What the figures were measured on."""
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"torch {version('torch')}, transformers {version('transformers')}"
    )


def bench(names: list[str]) -> int:
    """Measure, print and keep a table; the exit status says whether every limit holds."""
    rows = []
    for module in rooms(names, "bench"):
        for m in module.bench():
            room = module.__name__.split(".")[1]
            rows.append(
                {
                    "room": room,
                    "measured": m.name,
                    "seconds": m.seconds,
                    "alternative": m.alternative,
                    "ratio": m.ratio,
                    "limit": m.limit,
                    "holds": "-" if m.limit is None else "yes" if m.within else "NO",
                }
            )
            print(f"{room}: {m.name}: {m.seconds:.4g} s", flush=True)
    if not rows:
        print("nothing to measure")
        return 0
    table = pd.DataFrame(rows).to_markdown(index=False, floatfmt=".4g")
    text = f"# Times\n\nMedians of interleaved runs on {machine()}.\n\n{table}\n"
    if not names:
        (FOLDER / "results.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    return int(any(row["holds"] == "NO" for row in rows))


def calibrate(names: list[str]) -> int:
    """Simulate the stated error rates at full length; each room keeps its own committed table."""
    modules = rooms(names, "calibrate")
    for module in modules:
        print(module.calibrate().to_markdown(index=False), flush=True)
    if not modules:
        print("no room states a simulated error rate yet")
    return 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("action", choices=("bench", "calibrate"))
    parser.add_argument("rooms", nargs="*")
    options = parser.parse_args()
    return {"bench": bench, "calibrate": calibrate}[options.action](options.rooms)


if __name__ == "__main__":
    raise SystemExit(main())
