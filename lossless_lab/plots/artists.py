"""Artists by name: drawing twice under one name on one Axes moves the artist instead of adding one.

That is what lets a panel keep its figure and call the same chart again at every slider move.
"""

import functools

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from .theme import COLOURS, axes, style

ABOVE = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}  # where a legend stands


def chart(*columns: str, above: bool = True, anew: str = "", **look):
    """Decorator of a chart: checks the frame, sets the style, makes axes, adds the legend.

    What it decorates draws on the axes that it is handed; the chart returns them.

    Parameters
    ----------
    columns : what the frame must have.
    above : whether the legend stands above the axes; there is none where nothing has a label.
    anew : "texts", "collections" or "containers" if those are drawn anew each time.
    look : of the legend.
    """

    def decorate(draw):
        @functools.wraps(draw)
        def wrapper(frame: pd.DataFrame, *, ax: Axes | None = None, **options) -> Axes:
            missing = [name for name in columns if name not in frame]
            if missing:
                raise ValueError(
                    f"`frame` of {draw.__name__} lacks {missing}; it has {list(frame.columns)}"
                )
            if not len(frame):
                raise ValueError(f"`frame` of {draw.__name__} must have rows; it has none")
            with style():
                ax = axes() if ax is None else ax
                for artist in list(getattr(ax, anew, ())):
                    artist.remove()
                draw(frame, ax=ax, **options)
                legend(ax, **(ABOVE if above else {}) | look)
            return ax

        return wrapper

    return decorate


def _named(ax: Axes) -> dict:
    return ax.__dict__.setdefault("_lossless_lab_artists", {})


def line(ax: Axes, name: str, x, y, **options):
    """The line called `name` with new data; made on its first use."""
    artist = _named(ax).get(name)
    if artist is None or artist.axes is not ax:
        (artist,) = ax.plot(x, y, **options)
        _named(ax)[name] = artist
    artist.set_data(x, y)
    return artist


def bars(ax: Axes, name: str, y, width, left: float, **options):
    """Horizontal bars called `name` from `left`, moved in place while their number stays."""
    container = _named(ax).get(name)
    if container is not None and (len(container) != len(y) or container[0].axes is not ax):
        container.remove()
        container = None
    if container is None:
        container = _named(ax)[name] = ax.barh(y, width, left=left, **options)
    for rectangle, size in zip(container, width, strict=True):
        rectangle.set(x=left, width=size)
    return container


def band(ax: Axes, name: str, x, low, high, **options) -> None:
    """A filled band called `name`, drawn anew."""
    if name in _named(ax) and _named(ax)[name].axes is ax:
        _named(ax)[name].remove()
    _named(ax)[name] = ax.fill_between(x, low, high, **options)


def mark(ax: Axes, x: float) -> None:
    """A vertical guide line at `x`: the place that a panel's slider points at."""
    look = {"color": COLOURS["guide"], "linewidth": 1.4, "linestyle": ":", "label": "_mark"}
    line(ax, "mark", [x, x], [0, 1], transform=ax.get_xaxis_transform(), **look)


def logarithmic(ax: Axes, name: str, x, y, **options):
    """A line on a log axis that loses no value: zeros at the bottom, NaN and inf at the top."""
    x, y = np.asarray(x), np.asarray(y, dtype=float)
    finite = np.isfinite(y)
    if ax.get_yscale() != "log":
        ax.set_yscale("log")
    drawn = line(ax, name, x, np.where(finite & (y > 0), y, np.nan), **options)
    look = {"color": drawn.get_color(), "linestyle": "", "markerfacecolor": "none"}
    edges = (
        ("0, below the scale", finite & (y <= 0), 0.02, "v"),
        ("infinite or NaN", ~finite, 0.98, "x"),
    )
    for label, mask, height, marker in edges:
        at_edge = {"transform": ax.get_xaxis_transform(), "marker": marker, "clip_on": False}
        heights = np.full(mask.sum(), height)
        beyond = line(ax, f"{name}: {label}", x[mask], heights, **at_edge, **look)
        beyond.set_label(label if mask.any() else "_none")
    return drawn


def fit_log_axis(ax: Axes) -> None:
    """Limits of whole decades around every line drawn by `logarithmic`; x to the data."""
    on_data = [a for a in ax.lines if a.get_transform() == ax.transData]
    values = np.concatenate([np.asarray(a.get_ydata(), dtype=float) for a in on_data])
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if len(values) else (1e-8, 1.0)
    ax.set_ylim(10 ** np.floor(np.log10(low / 1.3)), 10 ** np.ceil(np.log10(high * 1.3)))
    ax.relim()
    ax.autoscale_view(scaley=False)


def legend(ax: Axes, **options) -> None:
    """The legend, each label once, rebuilt only when its entries change."""
    entries = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    shown = [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []
    if shown != list(entries):
        ax.legend(entries.values(), entries.keys(), **options)
