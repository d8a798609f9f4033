"""The panel of notebook 02: what fills a GPU for a model, a length and a batch, and what fits."""

import functools

import ipywidgets
import pandas as pd
from matplotlib.figure import Figure

from lossless_lab import kv_cache
from lossless_lab.kv_cache.sizing import binary
from lossless_lab.plots.kv_cache import KINDS, kv_cache_growth, kv_cache_memory

from .base import Content, Panel, control, offer

GIB = 2**30
CONTEXTS = tuple(2**n for n in range(9, 21))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "fp8", "nvfp4", "q8_0", "q4_0", "int4-g64", "float32")
WEIGHTS = ("bfloat16", "fp8", "int4-g64", "float32")
ENGINES = ("vllm", "llama.cpp", "sglang", "transformers", "what the tokens need")
MEMORY = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
BESIDE = ("llama-3.1-8b", "gemma-3-27b", "deepseek-r1", "qwen3.5-27b")


def kv_cache_sizing(*, model: str = "llama-3.1-8b", beside: tuple[str, ...] = BESIDE) -> Panel:
    """Panel over `fit`: one bundled model in a GPU's memory, its growth beside other models'."""
    choice = functools.partial(control, width=(110, 460))
    slider, menu = ipywidgets.SelectionSlider, ipywidgets.Dropdown
    lengths = [(f"{n:,}", n) for n in CONTEXTS]
    controls = {
        "model": choice(menu, "model", options=sorted(kv_cache.models().model), value=model),
        "context": choice(slider, "context (tokens)", options=lengths, value=8192),
        "batch": choice(slider, "requests", options=BATCHES, value=4),
        "dtype": choice(menu, "cache format", options=DTYPES, value="bfloat16"),
        "weights": choice(menu, "weight format", options=WEIGHTS, value="bfloat16"),
        "engine": choice(menu, "engine", options=ENGINES, value="vllm"),
        "n_gpus": choice(slider, "GPUs (TP)", options=(1, 2, 4, 8), value=1),
        "memory": choice(slider, "GiB per GPU", options=MEMORY, value=80),
    }
    return Panel(
        controls=controls,
        adapt=_offer_formats,
        compute=functools.partial(fit, beside=beside),
        draw=_draw,
        figure=Figure(figsize=(7.6, 4.6), dpi=100, layout="constrained"),
    )


def _offer_formats(controls) -> None:
    """Only the formats that the chosen engine can keep."""
    menu, rules = controls["dtype"], kv_cache.ENGINES.get(controls["engine"].value)
    known = rules.formats.split() if rules else DTYPES
    offered = tuple(name for name in DTYPES if name in known)
    offer(menu, offered)


def fit(
    *,
    model: str,
    context: int,
    batch: int,
    dtype: str,
    weights: str,
    engine: str,
    n_gpus: int,
    memory: int,
    beside: tuple[str, ...] = (),
) -> Content:
    """What fills one GPU, what still fits, and what one more token or request costs.

    Raises
    ------
    ValueError where the model, format and number of GPUs do not go together.
    """
    rules = None if engine == ENGINES[-1] else engine
    shared = {"dtype": dtype, "engine": rules, "tensor_parallel": n_gpus, "encoder_len": 1500}
    if kv_cache.geometry(model).outline.encoder_len:
        del shared["encoder_len"]
    size = kv_cache.kv_cache_bytes(model, seq_len=context, batch_size=batch, **shared)
    asked = {"memory_bytes": memory * GIB, "seq_len": context, "batch_size": batch}
    room = kv_cache.capacity(model, weights_dtype=weights, **asked, **shared)
    rows = [("weights", room.weights_bytes), ("overhead", room.overhead_bytes)]
    rows += [(part.kind, part.bytes) for part in size.parts]
    rows += [("headroom", max(room.headroom_bytes, 0)), ("memory", room.memory_bytes)]
    grid = {"seq_lens": CONTEXTS, "batch_sizes": [batch], "dtypes": [dtype]}
    growth = kv_cache.sweep(
        list(dict.fromkeys((*beside, model))),  # so that each keeps its colour
        engine_name=rules,
        tensor_parallel=n_gpus,
        encoder_len=1500,
        **grid,
    )
    return Content(
        text=_told(size, room, batch, kv_cache.geometry(model).outline.context_limit),
        table=_table(size),
        frames={
            "memory": pd.DataFrame(rows, columns=["part", "bytes"]),
            "growth": growth.assign(available_bytes=room.available_bytes),
        },
    )


def _table(size) -> pd.DataFrame:
    """Each kind of layer with its formula; bytes twice, to read and to check."""
    rows = [
        (KINDS.get(part.kind, part.kind), part.n_layers, part.formula, binary(part.bytes),
         f"{part.bytes:,}")
        for part in size.parts
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["kind", "layers", "formula", "size", "bytes"])


def _told(size, room, batch, limit):
    """Whether it fits, what else would, and the price of a token and of a request."""
    fits, used = room.headroom_bytes >= 0, room.memory_bytes - room.available_bytes
    said = f"{'Fits' if fits else 'Does not fit'}: the cache takes {binary(size.bytes)} of"
    said += f" {binary(room.available_bytes)} beside weights and overhead"
    said += f" ({binary(abs(room.headroom_bytes))} {'free' if fits else 'missing'}).\n"
    if room.available_bytes <= 0:
        said = f"Does not fit: weights and overhead alone take {binary(used)} of"
        said += f" {binary(room.memory_bytes)}; the cache would take {binary(size.bytes)} more.\n"
    else:
        longest = "any length" if room.max_seq_len is None else f"{room.max_seq_len:,} tokens"
        said += f"Room for {_counted(room.max_requests, 'request')} of this length;"
        said += f" {_counted(batch, 'request')} may have {longest}{' each' * (batch > 1)}.\n"
    said += f"One more token of one request: {binary(size.bytes_per_token)}; fixed per request:"
    said += f" {binary(size.fixed_bytes / size.n_sequences)}."
    if limit:
        beyond = ", less than asked here" if size.seq_len > limit else ""
        said += f"\nThe model itself was made for at most {limit:,} tokens{beyond}."
    if size.of_kind("sliding", "chunked") and size.engine == "vllm":
        said += "\nvLLM reserves a window and 8,192 tokens of one batch for each request, so a"
        said += " windowed layer grows up to there, and only then stops."
    return said


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def _draw(figure: Figure, content: Content, state: dict) -> None:
    if not figure.axes:
        figure.subplots(2, 1, height_ratios=(1, 4))
    above, below = figure.axes
    kv_cache_memory(content.frames["memory"], ax=above)
    growth = content.frames["growth"]
    available = growth["available_bytes"].iloc[0]
    chosen = {"chosen": state["model"], "context": state["context"]}
    kv_cache_growth(growth, ax=below, available_bytes=available, **chosen)
