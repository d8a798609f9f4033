"""What a number format is: the grid of one element, and how weights share scales; gguf's blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter


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
    source: str = ""

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

        >>> GRIDS["int4"].nearest(torch.tensor([0.5, 1.5, -9.0])).tolist()
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


GRIDS = {
    grid.name: grid
    for grid in TypeAdapter(list[Grid]).validate_json(
        Path(__file__).with_name("grids.json").read_bytes()
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Elements on a grid, times a scale that each group of them shares."""

    name: str
    grid: Grid
    group: int | str = "channel"  # weights per scale: a number, a row ("channel"), all ("tensor")
    scale: Grid | None = None  # format of the stored scale; None is float32
    zero_point: bool = False  # asymmetric: codes 0 … 2^bits − 1 less a zero point of as many bits
    tensor_scale: bool = False  # a second scale, float32, for the whole matrix (NVFP4)
    scale_group: int = 0  # scales that share a scale and int8 codes of their own (QLoRA); 0: none
    fixed: bool = False  # whether the group size belongs to the format, and never shrinks

    @property
    def bits(self) -> int:
        """Bits of an element without its share of the scale."""
        return self.grid.bits

    @property
    def resolution(self) -> float:
        """Distance of neighbouring values at the top of the grid, about, relative to the top."""
        return 2.0 ** -(self.grid.mantissa or self.bits - 1)

    def fitted(self, width: int) -> Format:
        """This format with its group halved, down to 16, until it divides a row of `width`.

        Raises
        ------
        ValueError
            When no such group divides the row, or the format's own is fixed and does not.

        >>> from lossless_lab.number_formats import number_format
        >>> number_format("int4-group128").fitted(576).name
        'int4-group64'
        """
        group = self.group
        if isinstance(group, str):
            return self
        while width % group and group > 16 and not self.fixed:
            group //= 2
        if width % group:
            raise ValueError(
                f"`fmt` {self.name} has groups of {self.group} weights; they do not divide a row "
                f"of {width}" + ("" if self.fixed else f", nor do smaller ones down to {group}")
            )
        return replace(self, name=self.name.replace(str(self.group), str(group)), group=group)

    def bits_per_weight(self, shape: Sequence[int]) -> float:
        """Bits for one weight of a [rows, width] matrix, scales and zero points included.

        >>> from lossless_lab.number_formats import number_format
        >>> number_format("int4-group128").bits_per_weight((512, 1024))   # 4 + 16 / 128
        4.125
        """
        n = math.prod(shape)
        per_scale = {"channel": shape[-1], "tensor": n}.get(self.group, self.group)
        scale = 32 if self.scale is None else self.scale.bits
        if self.scale_group:
            scale = 8 + 32 / self.scale_group
        shared = 32 / n * (self.tensor_scale + bool(self.scale_group))
        return self.grid.bits * (1 + self.zero_point / per_scale) + scale / per_scale + shared

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """See `round_to`; x in float32, and its rows whole groups."""
        width = {"channel": x.shape[-1], "tensor": x.numel()}.get(self.group, self.group)
        blocks = x.reshape(-1, width)
        if self.zero_point:
            return self._asymmetric(blocks).reshape(x.shape)
        scale = self.scales(blocks)
        codes = self.grid.nearest(blocks / scale.where(scale > 0, 1.0))
        if self.scale_group:
            scale = _doubly_quantized(scale, self.scale_group)
        return (codes * scale).reshape(x.shape)

    def scales(self, blocks: torch.Tensor) -> torch.Tensor:
        """Scales [n, 1] of blocks [n, width], as stored: the largest |x| lands on grid.max.

        MX 1.0, section 6.3: 2^(⌊log2 largest⌋ − ⌊log2 grid.max⌋), beyond which elements saturate.
        """
        largest = blocks.abs().amax(-1, keepdim=True)
        if self.scale is GRIDS["e8m0"]:
            exponent = torch.frexp(largest).exponent - math.frexp(self.grid.max)[1]
            return torch.ldexp(torch.ones_like(largest), exponent.clamp(-127, 127))
        scale, whole = largest / self.grid.max, 1.0
        if self.tensor_scale:
            whole = (scale.max() / self.scale.max).clamp(min=torch.finfo(torch.float32).tiny)
        return scale if self.scale is None else self.scale.nearest(scale / whole) * whole

    def saturated(self, x: torch.Tensor) -> float:
        """Share of x that lies beyond what its scale can hold, and is cut there.

        None does where scales are float32; a stored scale may be rounded down, and MX scales are.

        >>> from lossless_lab.number_formats import number_format
        >>> number_format("mxfp4").saturated(torch.tensor([[7.0] + [1.0] * 31]))   # up to 6
        0.03125
        """
        width = {"channel": x.shape[-1], "tensor": x.numel()}.get(self.group, self.group)
        blocks = x.float().reshape(-1, width)
        limit = self.scales(blocks) * self.grid.max * (1 + 1e-6)
        return math.nan if self.zero_point else float((blocks.abs() > limit).float().mean())

    def _asymmetric(self, blocks: torch.Tensor) -> torch.Tensor:
        """(code − zero) · scale, code = round(x / scale) + zero; the range always holds zero."""
        top = 2**self.grid.bits - 1
        low = blocks.amin(-1, keepdim=True).clamp(max=0)
        high = blocks.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / top
        if self.scale is not None:
            scale = self.scale.nearest(scale)
        divisor = scale.where(scale > 0, 1.0)
        zero = (-low / divisor).round().clamp(0, top)
        return (((blocks / divisor).round() + zero).clamp(0, top) - zero) * scale


def _doubly_quantized(scale: torch.Tensor, group: int) -> torch.Tensor:
    """Scales less their mean in int8, ⌊128 s / max|s|⌉ ≤ 127, as torchao's NF4Tensor does."""
    mean = scale.mean()
    spare = -len(scale) % group
    blocks = torch.nn.functional.pad(scale[:, 0] - mean, (0, spare)).reshape(-1, group)
    step = blocks.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 128
    codes = (blocks / step).round().clamp(-128, 127)
    return (codes * step).flatten()[: len(scale), None] + mean


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFormat:
    """A block format of llama.cpp, quantised and dequantised by the gguf package."""

    name: str
    type_name: str  # gguf.GGMLQuantizationType's member

    @property
    def bits(self) -> int:
        """Bits of an element without its share of the scale; the digit of its name."""
        return int(self.type_name[1])

    @property
    def resolution(self) -> float:
        """Distance of neighbouring values, about, relative to the largest."""
        return 2.0 ** (1 - self.bits)

    def saturated(self, x: torch.Tensor) -> float:
        """Not known of llama.cpp's blocks."""
        return math.nan

    @property
    def _type(self):
        import gguf

        return gguf.GGMLQuantizationType[self.type_name]

    def fitted(self, width: int) -> GgufFormat:
        """The format itself, where its blocks divide a row of `width`; else a ValueError."""
        import gguf

        block = gguf.GGML_QUANT_SIZES[self._type][0]
        if width % block:
            raise ValueError(
                f"`fmt` {self.name} has blocks of {block} weights; they do not divide a row of "
                f"{width}"
            )
        return self

    def bits_per_weight(self, shape: Sequence[int] = ()) -> float:
        """Bits for one weight, block scales included, whatever the shape."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self._type]
        return 8 * size / block

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """See `round_to`."""
        from gguf import quants

        packed = quants.quantize(x.cpu().contiguous().numpy(), self._type)
        return torch.from_numpy(quants.dequantize(packed, self._type)).to(x.device)
