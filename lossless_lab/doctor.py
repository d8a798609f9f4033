"""What this machine has, and what is missing, with the line that mends it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pandas as pd
from packaging.requirements import Requirement

from lossless_lab import models

FETCH = "lossless-lab models fetch smollm2"
CPU_TORCH = "choose CPU in the selector at pytorch.org/get-started/locally"


def report() -> pd.DataFrame:
    """One row per item: item, found, advice ("" where nothing is to be done).

    Nothing of the environment is read but versions, devices and memory.
    """
    import psutil
    import torch

    there = models.is_present("smollm2")
    rows = [
        ("Python", platform.python_version(), ""),
        ("system", f"{platform.system()} {platform.machine()}", ""),
        ("memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB", ""),
        ("torch", torch.__version__, _torch(torch)),
        ("transformers", importlib.metadata.version("transformers"), ""),
        ("packages", *_packages()),
        ("NVIDIA driver", _driver() or "none", ""),
        *_devices(torch),
        ("C++ compiler (torch.compile)", *_compiler()),
        ("smollm2", "ready" if there else "not fetched", "" if there else FETCH),
        ("Chromium (browser tests)", shutil.which("chromium") or "none", ""),
    ]
    return pd.DataFrame(rows, columns=["item", "found", "advice"])


def _packages(distribution: str = "lossless-lab") -> tuple[str, str]:
    """What the package requires beside its extras, and what of it is not installed."""
    missing = []
    try:
        named = map(Requirement, importlib.metadata.requires(distribution) or ())
    except importlib.metadata.PackageNotFoundError:
        return "unknown: lossless-lab itself is not installed", "pip install -e ."
    for need in named:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            there = need.specifier.contains(importlib.metadata.version(need.name), prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            there = False
        if not there:
            missing.append(f"{need.name}{need.specifier}")
    install = " ".join(f"'{name}'" for name in missing)
    return ("missing: " + ", ".join(missing), f"pip install {install}") if missing else ("all", "")


def _driver() -> str:
    """Version of the NVIDIA driver, "" where there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return told.stdout.split("\n")[0].strip()
    return "found, version unknown" if Path("/proc/driver/nvidia/version").exists() else ""


def _torch(torch: object) -> str:
    driver = _driver()
    if driver and torch.version.cuda is None:
        return "a driver but a CPU build of torch: pip install --force-reinstall torch"
    if not driver and torch.version.cuda is not None:
        return f"a CUDA build without a driver; to save space, {CPU_TORCH}"
    return ""


def _devices(torch: object) -> list[tuple[str, str, str]]:
    if torch.backends.mps.is_available():
        return [("GPU", "Apple, through mps; memory is shared with the system", "")]
    if not torch.cuda.is_available():
        return [("GPU", "none", "")]
    rows = []
    for index in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        found = f"{torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}"
        rows.append((f"GPU {index}", f"{found}, {free:.1f} of {total:.1f} GiB free", ""))
    return rows


def _compiler() -> tuple[str, str]:
    compiler = shutil.which("g++") or shutil.which("clang++")
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    if compiler is None:
        return "none", "install g++; without it torch.compile cannot run on a CPU"
    return Path(compiler).name, "" if headers else "install Python's headers (python3-dev)"
