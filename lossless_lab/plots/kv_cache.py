"""Charts of memory: what fills a GPU, and how caches grow with the context."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator

from .artists import bars, chart, line
from .theme import COLOURS, PALETTE

GIB = 2**30
MEMORY, KINDS = PALETTE["memory"], PALETTE["kinds"]  # what fills memory, from the left
MARKERS = ("o", "s", "^", "D", "v", "P")  # so that colour is not the only difference
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


@chart("part", "bytes", ncols=7)
def kv_cache_memory(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """One stacked bar: weights, overhead, cache by kind of layer, headroom.

    Parameters
    ----------
    frame : columns `part` (a name in MEMORY, or "memory" for the GPU's limit) and `bytes`.

    Returns
    -------
    Axes in GiB; a dotted line marks the memory, what lies right of it does not fit.
    """
    sizes = frame.groupby("part", sort=False)["bytes"].sum() / GIB
    left = 0.0
    for part, colour in MEMORY.items():
        size = max(float(sizes.get(part, 0.0)), 0.0)
        look = {"color": colour, "edgecolor": COLOURS["guide"], "linewidth": 0.4, "height": 0.6}
        drawn = bars(ax, part, [0], [size], left, **look)
        drawn.set_label(KINDS.get(part, part) if size else f"_{part}")
        left += size
    limit = float(sizes.get("memory", left))
    look = {"color": COLOURS["guide"], "linewidth": 1.4, "linestyle": ":"}
    line(ax, "memory", [limit, limit], [-0.5, 0.5], label="memory of the GPU", **look)
    ax.set(xlim=(0, 1.05 * max(left, limit)), ylim=(-0.5, 0.5), yticks=[], xlabel="memory (GiB)")


@chart("model", "seq_len", "cache_bytes", above=False, loc="upper left", ncols=2)
def kv_cache_growth(
    frame: pd.DataFrame,
    *,
    ax: Axes | None = None,
    available_bytes: float | None = None,
    chosen: str | None = None,
    context: int | None = None,
) -> Axes:
    """Cache against context, one line per model, both axes logarithmic.

    Parameters
    ----------
    frame : columns `model`, `seq_len` (tokens), `cache_bytes`.
    available_bytes : room for the cache; drawn as a dashed line.
    chosen : the model whose line is drawn stronger.
    context : tokens; drawn as a dotted line.
    """
    ax.set(xscale="log", yscale="log")
    groups = list(frame.groupby("model", sort=False, observed=True))
    for number, (colour, sign) in enumerate(zip(LINES, MARKERS, strict=True)):
        model, rows = groups[number] if number < len(groups) else (f"_{number}", frame[:0])
        drawn = line(ax, f"model {number}", rows["seq_len"], rows["cache_bytes"] / GIB,
                     color=colour, marker=sign, markersize=4)  # fmt: skip
        drawn.set(label=str(model), linewidth=2.4 if model == chosen else 1.2)
    x, y = frame["seq_len"], frame["cache_bytes"] / GIB
    room = np.nan if available_bytes is None or available_bytes <= 0 else available_bytes / GIB
    top = np.nanmax([y.max(), room])
    ax.set(xlim=(x.min() / 1.1, x.max() * 1.1), ylim=(y[y > 0].min() / 1.5, top * 1.5))
    look = {"color": COLOURS["guide"], "linewidth": 1.4}
    guide = line(ax, "room", ax.get_xlim(), [room, room], linestyle="--", **look)
    guide.set_label("_room" if np.isnan(room) else "room for the cache")
    place = np.nan if context is None else context
    guide = line(ax, "context", [place, place], ax.get_ylim(), linestyle=":", **look)
    guide.set_label("_context" if context is None else "chosen context")
    ax.xaxis.set_major_locator(LogLocator(base=4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
    ax.minorticks_off()
    ax.set(xlabel="context (tokens, k = 1,024, log scale)", ylabel="KV cache (GiB, log scale)")


@chart("batch_size", "part", "bytes", "measured_bytes", anew="containers", ncols=3)
def memory_ramp(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """What each part is expected to add at every batch size, and the memory that was measured.

    Parameters
    ----------
    frame : columns `batch_size`, `part` (a name in MEMORY, from the bottom up), `bytes`, and
        `measured_bytes`, the same in all rows of one batch size.
    """
    bottom = pd.Series(0.0, index=frame["batch_size"].unique())
    places = np.arange(len(bottom))
    for part, rows in frame.groupby("part", sort=False):
        heights = rows.set_index("batch_size")["bytes"].reindex(bottom.index) / GIB
        look = {"color": MEMORY[part], "label": KINDS.get(part, part), "width": 0.7}
        ax.bar(places, heights, bottom=bottom, **look)
        bottom += heights
    measured = frame.groupby("batch_size", sort=False)["measured_bytes"].first() / GIB
    look = {"color": "black", "marker": "D", "linestyle": "", "markersize": 4}
    line(ax, "measured", places, measured, label="measured peak", **look)
    ax.set_xticks(places, [str(n) for n in bottom.index])
    ax.set(xlabel="requests in the batch", ylabel="process memory (GiB)")
