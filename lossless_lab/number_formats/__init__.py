"""Number formats for weights: one descriptor each, rounding to it, and the bits that it takes.

Nothing is packed here: `round_to` gives the values that unpacking would give.
"""

import json
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import product
from pathlib import Path

import torch

from lossless_lab.number_formats.formats import GRIDS, Format, GgufFormat


def _integer(bits: int, group: int | str, zero_point: bool) -> Format:
    """Scales in float32 for a row, where they cost next to nothing; else in float16."""
    by_row = group == "channel"
    name = f"int{bits}-{group if by_row else f'group{group}'}{'-asym' if zero_point else ''}"
    scale, grid = None if by_row else GRIDS["float16"], GRIDS[f"int{bits}"]
    return Format(name=name, grid=grid, group=group, scale=scale, zero_point=zero_point)


def _catalogue() -> Iterator[Format | GgufFormat]:
    """Integers for every size of group, the formats of formats.json, and llama.cpp's blocks."""
    for which in product((8, 4, 3, 2), ("channel", 128, 64, 32), (False, True)):
        yield _integer(*which)
    for row in json.loads(Path(__file__).with_name("formats.json").read_text("utf-8")):
        by_name = {"grid": GRIDS[row["grid"]], "scale": GRIDS.get(row.get("scale"))}
        yield Format(**row | by_name)
    for name in ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"):
        yield GgufFormat(name=name.lower(), type_name=name)


FORMATS: dict[str, Format | GgufFormat] = {fmt.name: fmt for fmt in _catalogue()}


def number_format(fmt: str | Format | GgufFormat) -> Format | GgufFormat:
    """The format of that name; a format stays as it is.

    Raises
    ------
    KeyError
        For an unknown name, with the nearest known one.

    >>> number_format("mxfp4").bits_per_weight((1, 32))   # 4 + 8 / 32
    4.25
    """
    if not isinstance(fmt, str):
        return fmt
    if fmt not in FORMATS:
        nearest = get_close_matches(fmt.lower(), FORMATS, n=1, cutoff=0.3)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise KeyError(f"`fmt` {fmt!r} is unknown{hint}; known are {', '.join(FORMATS)}")
    return FORMATS[fmt]


def round_to(x: torch.Tensor, fmt: str | Format | GgufFormat) -> torch.Tensor:
    """scale · nearest(x / scale): x as it comes back from `fmt`, nearest, ties to even; float32.

    Ties follow the format: to even, but upwards in magnitude in llama.cpp's blocks.

    Parameters
    ----------
    x : [..., width], any unit; the last axis is one row of weights, which groups divide.
    fmt : name in FORMATS, or a format of your own.

    Returns
    -------
    Tensor of x's shape in float32. What lies beyond a grid saturates.

    Raises
    ------
    ValueError
        When groups do not divide the rows, or x holds NaN or inf, or more than a block's scale
        can hold (float16, of llama.cpp's blocks); with how many and where.

    Examples
    --------
    >>> round_to(torch.tensor([[7.0, 2.4, -0.6]]), "int4-channel").tolist()   # scale 1
    [[7.0, 2.0, -1.0]]
    """
    if not (isinstance(x, torch.Tensor) and x.ndim and x.numel()):
        raise ValueError(f"`x` must be a tensor [..., width] of one value or more; got {x!r:.80}")
    fmt, x, width = number_format(fmt), x.detach().float(), x.shape[-1]
    if (fits := fmt.fitted(width)) != fmt:
        raise ValueError(
            f"`fmt` {fmt.name} has groups of {fmt.group} weights, which do not divide a row of "
            f"{width}; {fits.name} would"
        )
    rounded = fmt.round(x) if x.isfinite().all() else x
    if not (finite := rounded.isfinite()).all():
        first, n = tuple(torch.nonzero(~finite)[0].tolist()), int((~finite).sum())
        made = "finite" if rounded is x else f"within what scales of {fmt.name} can hold"
        raise ValueError(f"`x` must be {made}; {n} of {x.numel()} values are not, first {first}")
    return rounded
