"""Number formats for weights: one descriptor each, rounding to it, and the bits that it takes.

Nothing is packed here: `round_to` gives the values that unpacking would give.
"""

from __future__ import annotations

from difflib import get_close_matches
from itertools import product

import torch

from lossless_lab.number_formats.formats import Format, GgufFormat
from lossless_lab.number_formats.grids import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FP16,
    INT2,
    INT3,
    INT4,
    INT8,
    NF4,
    Grid,
)


def _integer(grid: Grid, group: int | str, zero_point: bool) -> Format:
    """Scales in float32 for a row, where they cost next to nothing; else in float16."""
    by_row = group == "channel"
    name = f"{grid.name}-{group if by_row else f'group{group}'}{'-asym' if zero_point else ''}"
    scale = None if by_row else FP16
    return Format(name=name, grid=grid, group=group, scale=scale, zero_point=zero_point)


def _mx(name: str, grid: Grid) -> Format:
    return Format(name=name, grid=grid, group=32, scale=E8M0, fixed=True)


FLOATS = (E4M3, E5M2, E3M2, E2M3, E2M1)
FORMATS: dict[str, Format | GgufFormat] = {
    fmt.name: fmt
    for fmt in (
        *(
            _integer(*which)
            for which in product((INT8, INT4, INT3, INT2), ("channel", 128, 64, 32), (False, True))
        ),
        *(Format(name=f"fp{g.bits}-{g.name}", grid=g, group="tensor") for g in FLOATS),
        *(Format(name=f"fp{g.bits}-{g.name}-channel", grid=g) for g in FLOATS),
        _mx("mxfp8-e4m3", E4M3),
        _mx("mxfp8-e5m2", E5M2),
        _mx("mxfp6-e3m2", E3M2),
        _mx("mxfp6-e2m3", E2M3),
        _mx("mxfp4", E2M1),
        Format(name="nvfp4", grid=E2M1, group=16, scale=E4M3, tensor_scale=True, fixed=True),
        Format(name="nf4", grid=NF4, group=64, fixed=True),
        Format(name="nf4-double", grid=NF4, group=64, scale_group=256, fixed=True),
        *(
            GgufFormat(name=n.lower(), type_name=n)
            for n in ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1")
        ),
    )
}


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
        When groups do not divide the rows, or x holds NaN or inf; with how many and where.

    Examples
    --------
    >>> round_to(torch.tensor([[7.0, 2.4, -0.6]]), "int4-channel").tolist()   # scale 1
    [[7.0, 2.0, -1.0]]
    """
    fmt, width = number_format(fmt), x.shape[-1]
    if (fits := fmt.fitted(width)) != fmt:
        raise ValueError(
            f"`fmt` {fmt.name} has groups of {fmt.group} weights, which do not divide a row of "
            f"{width}; {fits.name} would"
        )
    x = x.detach().float()
    if not (finite := x.isfinite()).all():
        first = tuple(torch.nonzero(~finite)[0].tolist())
        n = int((~finite).sum())
        raise ValueError(f"`x` must be finite; {n} of {x.numel()} values are not, first {first}")
    return fmt.round(x)
