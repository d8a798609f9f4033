"""What the package itself costs: importing it."""

import subprocess
import sys

from benchmarks import Measurement, interleaved


def bench() -> list[Measurement]:
    """A fresh process that imports lossless_lab, less one that imports nothing."""
    calls = {
        statement: lambda s=statement: subprocess.run([sys.executable, "-c", s], check=True)
        for statement in ("import lossless_lab", "pass")
    }
    took = interleaved(calls)
    seconds = took["import lossless_lab"] - took["pass"]
    return [Measurement(name="import lossless_lab", seconds=seconds, limit=0.3)]
