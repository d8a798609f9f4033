"""What this machine has, and what is missing, with the line that mends it."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

import pandas as pd

from lossless_lab import models

CPU_TORCH = "choose CPU in the selector at pytorch.org/get-started/locally"


def report() -> pd.DataFrame:
    """One row per item: item, found, advice ("" where nothing is to be done).

    Nothing of the environment is read but versions, devices and memory.
    """
    import psutil
    import torch

    rows = [
        ("Python", platform.python_version(), _python()),
        ("system", f"{platform.system()} {platform.machine()}", ""),
        ("memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB", ""),
        ("torch", torch.__version__, _torch(torch)),
        ("transformers", importlib.metadata.version("transformers"), ""),
        *_devices(torch),
        ("C++ compiler (torch.compile)", *_compiler()),
        ("smollm2", *_smollm2()),
        ("Chromium (browser tests)", shutil.which("chromium") or "none", ""),
    ]
    return pd.DataFrame(rows, columns=["item", "found", "advice"])


def _python() -> str:
    return "" if sys.version_info >= (3, 10) else "install Python 3.10 or newer (3.11 is tested)"


def _torch(torch: object) -> str:
    driver = Path("/proc/driver/nvidia/version").exists()
    if driver and torch.version.cuda is None:
        return "an NVIDIA driver is here, but torch is a CPU build: pip install torch"
    if not driver and torch.version.cuda is not None:
        return f"a CUDA build without a driver; to save space, {CPU_TORCH}"
    return ""


def _devices(torch: object) -> list[tuple[str, str, str]]:
    if not torch.cuda.is_available():
        return [("GPU", "none", "")]
    rows = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found = f"{torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}, "
        rows.append(
            (f"GPU {index}", f"{found}{free / 2**30:.1f} of {total / 2**30:.1f} GiB free", "")
        )
    return rows


def _compiler() -> tuple[str, str]:
    compiler = shutil.which("g++") or shutil.which("clang++")
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    if compiler is None:
        return "none", "install g++; without it torch.compile cannot run on a CPU"
    return Path(compiler).name, "" if headers else "install Python's headers (python3-dev)"


def _smollm2() -> tuple[str, str]:
    if models.is_present("smollm2"):
        return "ready", ""
    return "not fetched", "lossless-lab models fetch smollm2"
