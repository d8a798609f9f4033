"""A real llama.cpp server on loopback, from xllamacpp's wheel: start, stop, and what it logged."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

_KV_LINE = re.compile(
    r"llama_kv_cache\w*: size = +(?P<size_mib>[\d.]+) MiB \( *(?P<cells>\d+) cells,"
    r" +(?P<n_layers>\d+) layers, +(?P<seqs>\S+) seqs\),"
    r" K \((?P<k>\w+)\): +(?P<k_mib>[\d.]+) MiB, V \((?P<v>\w+)\): +(?P<v_mib>[\d.]+) MiB"
)
_STATE_LINE = re.compile(
    r"llama_memory_recurrent: size = +(?P<size_mib>[\d.]+) MiB \( *(?P<cells>\d+) cells,"
    r" +(?P<n_layers>\d+) layers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppServer:
    """A running server; a context manager that stops it. The log grows while it runs."""

    address: str  # http://127.0.0.1:port
    version: str  # of the wheel; its last part is llama.cpp's build
    options: dict
    process: subprocess.Popen
    log_path: Path

    def log(self) -> str:
        """Everything that the server wrote so far."""
        return self.log_path.read_text("utf-8", errors="replace")

    def stop(self) -> None:
        """End the server: its end of the pipe closes, and after ten seconds the process ends."""
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.stop()

    def __str__(self):
        return f"llama.cpp (xllamacpp {self.version}) at {self.address}"


def serve(
    gguf,
    *,
    n_ctx: int = 4096,
    n_parallel: int = 1,
    n_ubatch: int = 512,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    flash_attn: str = "auto",
    swa_full: bool = False,
    kv_unified: bool = False,
    threads: int | None = None,
    timeout_s: float = 120.0,
) -> LlamaCppServer:
    """Start a server for one GGUF file on a free port of 127.0.0.1, and wait until it listens.

    Parameters
    ----------
    gguf : path
        The model file; `lossless_lab.models.fetch("smollm2")` leaves one in the cache.
    n_ctx, n_parallel, n_ubatch, cache_type_k, cache_type_v, flash_attn, swa_full, kv_unified
        llama.cpp's own settings, by its own names; flash_attn is "auto", "on" or "off".
    timeout_s : float
        Seconds to wait for the model to load.

    Raises
    ------
    ImportError
        If xllamacpp is not installed.
    RuntimeError
        If the server ended, or did not listen in time; the message ends with its log.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise ImportError("xllamacpp is not installed; `pip install xllamacpp` brings llama.cpp")
    if not Path(gguf).is_file():
        raise FileNotFoundError(f"`gguf` {str(gguf)!r} is not a file")
    options = {
        "n_ctx": n_ctx, "n_parallel": n_parallel, "n_ubatch": n_ubatch, "flash_attn": flash_attn,
        "cache_type_k": cache_type_k, "cache_type_v": cache_type_v, "swa_full": swa_full,
        "kv_unified": kv_unified, "threads": threads,
    }  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="llamacpp-"))
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(gguf), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    server = LlamaCppServer(
        address=_first_line(process, timeout_s),
        version=importlib.metadata.version("xllamacpp"),
        options=options,
        process=process,
        log_path=folder / "server.log",
    )
    if not server.address.startswith("http"):
        server.stop()
        raise RuntimeError(f"llama.cpp did not start: {server.log()[-2000:]}")
    return server


def _first_line(process, timeout_s):
    """The address that the child prints once it listens; empty if it ended or took too long."""
    found = []
    reader = threading.Thread(target=lambda: found.append(process.stdout.readline()), daemon=True)
    reader.start()
    reader.join(timeout_s)
    if not found:
        process.kill()
        reader.join()
    return found[0].decode().strip()


def kv_log(text: str) -> pd.DataFrame:
    """The caches that a llama.cpp log reports: one row per cache, sizes in MiB as printed.

    Examples
    --------
    >>> line = ("llama_kv_cache: size =   22.50 MiB (  1024 cells,  30 layers,  1/1 seqs), "
    ...         "K (f16):   11.25 MiB, V (f16):   11.25 MiB")
    >>> row = kv_log(line).iloc[0]
    >>> int(row.cells), int(row.n_layers), float(row.size_mib)
    (1024, 30, 22.5)
    """
    rows = [{"kind": "kv", **m.groupdict()} for m in _KV_LINE.finditer(text)]
    rows += [{"kind": "state", **m.groupdict()} for m in _STATE_LINE.finditer(text)]
    columns = ["kind", "cells", "n_layers", "seqs", "k", "v", "size_mib", "k_mib", "v_mib"]
    numbers = {"cells": "Int64", "n_layers": "Int64", "size_mib": float, "k_mib": float}
    return pd.DataFrame(rows, columns=columns).astype({**numbers, "v_mib": float})


def _child(gguf, options):
    """Run the server in this process until the parent closes the pipe."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_gpu_layers, params.fit_params, params.warmup = 0, False, False
    params.verbosity = 4  # the level at which the cache's size is logged
    flash = options.pop("flash_attn").upper().replace("ON", "ENABLED").replace("OFF", "DISABLED")
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = getattr(kinds, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    if (threads := options.pop("threads")) is not None:
        params.cpuparams.n_threads = threads
    for name in ("cache_type_k", "cache_type_v"):
        kind = options.pop(name).upper()
        setattr(params, name, getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind}"))
    for name, value in options.items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _child(sys.argv[1], json.loads(sys.argv[2]))
