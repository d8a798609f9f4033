"""How every figure looks: the style file, the palette by name, sizes for print and slides."""

import contextlib
import functools
import json
from pathlib import Path

import matplotlib as mpl

from .labels import drawable, families

# Names of series, kinds of memory and what is written for those; each name has its colour once.
PALETTE = json.loads(Path(__file__).with_name("palette.json").read_text("utf-8"))
COLOURS = PALETTE["series"]
# An optimisation has its colour here too, the default candidate's otherwise.
# Width, height in inches and dots per inch. A slide is drawn small and dense: its text stays large.
PRESETS = {"single": (3.35, 2.4, 300), "double": (6.9, 2.8, 300), "slide": (5.33, 3.0, 360)}


@functools.lru_cache(maxsize=1)
def _file() -> dict:
    path = Path(__file__).with_name("lossless_lab.mplstyle")
    return dict(mpl.rc_params_from_file(path, use_default_template=False))


def style() -> contextlib.AbstractContextManager:
    """Context in which figures get the house style and fonts that have the glyphs."""
    fonts = {"font.family": list(families()), "axes.unicode_minus": drawable("−")}
    return mpl.rc_context({**_file(), **fonts})


def size(preset: str) -> tuple[float, float, int]:
    """Width and height in inches, and dots per inch."""
    if preset not in PRESETS:
        raise ValueError(f"`preset` must be one of {', '.join(PRESETS)}; got {preset!r}")
    return PRESETS[preset]


def axes(n_rows: int = 1, n_columns: int = 1, *, preset: str = "single", height=None):
    """New styled axes (one Axes, or an array of them) at a preset's width; `height` in inches."""
    import matplotlib.pyplot as plt

    width, usual, _ = size(preset)
    with style():
        made = plt.subplots(n_rows, n_columns, figsize=(width, height or usual * n_rows))[1]
        interactive = mpl.is_interactive()
    mpl.interactive(interactive)  # a notebook's first figure turns it on, inside the style
    return made
