"""The values that one element of a number format can take, and rounding to the nearest of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values that one element can take, positive and negative alike, or a table of them.

    Between two powers of two the values are 2^(e − mantissa) apart; below 2^emin, 2^(emin −
    mantissa). Integers are a grid that never leaves that lowest range.
    """

    name: str
    bits: int  # stored for one element
    mantissa: int = 0  # explicit bits of the mantissa
    emin: int = 0  # exponent of the smallest normal value
    max: float = 1.0  # largest finite value; what is beyond saturates there
    values: tuple[float, ...] = ()  # the table, ascending, where there is one

    @property
    def smallest_normal(self) -> float:
        """2^emin: from here on a value has all its bits."""
        return 2.0**self.emin

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value, 2^(emin − mantissa)."""
        return 2.0 ** (self.emin - self.mantissa)

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest value of the grid, ties to even; float32.

        >>> INT4.nearest(torch.tensor([0.5, 1.5, -9.0])).tolist()
        [0.0, 2.0, -7.0]
        """
        if self.values:
            table = x.new_tensor(self.values)
            return table[torch.bucketize(x.contiguous(), (table[1:] + table[:-1]) / 2)]
        step = self.smallest_subnormal
        if self.max >= 2 * self.smallest_normal:
            exponent = torch.frexp(x).exponent.sub(1).clamp(min=self.emin)
            step = torch.ldexp(torch.ones_like(x), exponent - self.mantissa)
        return (x / step).round().mul(step).clamp(-self.max, self.max)


def integers(bits: int) -> Grid:
    """Signed integers −(2^(bits − 1) − 1) … 2^(bits − 1) − 1: symmetric, one code unused."""
    top = bits - 1
    return Grid(name=f"int{bits}", bits=bits, mantissa=top, emin=top, max=2.0**top - 1)


INT8, INT4, INT3, INT2 = (integers(bits) for bits in (8, 4, 3, 2))
FP16 = Grid(name="float16", bits=16, mantissa=10, emin=-14, max=65504.0)
BF16 = Grid(name="bfloat16", bits=16, mantissa=7, emin=-126, max=torch.finfo(torch.bfloat16).max)
# OCP 8-bit Floating Point Specification (OFP8) 1.0: E4M3 without inf, E5M2 with.
E4M3 = Grid(name="e4m3", bits=8, mantissa=3, emin=-6, max=448.0)
E5M2 = Grid(name="e5m2", bits=8, mantissa=2, emin=-14, max=57344.0)
# OCP Microscaling Formats (MX) 1.0, section 5.3.
E3M2 = Grid(name="e3m2", bits=6, mantissa=2, emin=-2, max=28.0)
E2M3 = Grid(name="e2m3", bits=6, mantissa=3, emin=0, max=7.5)
E2M1 = Grid(name="e2m1", bits=4, mantissa=1, emin=0, max=6.0)
# Powers of two, as scales alone: MX 1.0 section 5.4. Chosen by `Format.scales`, never rounded to.
E8M0 = Grid(name="e8m0", bits=8, mantissa=0, emin=-127, max=2.0**127)
# QLoRA (arXiv 2305.14314), appendix E; bitsandbytes, functional.py.
NF4 = Grid(
    name="nf4",
    bits=4,
    values=(
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip
