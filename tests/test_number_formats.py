"""Every rounding against another implementation: ml_dtypes, torch, torchao, gguf, scipy."""

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lossless_lab import number_formats as room
from lossless_lab.number_formats import FORMATS, number_format, round_to
from lossless_lab.number_formats.formats import GRIDS

ml_dtypes = pytest.importorskip("ml_dtypes")

BY_DTYPE = {
    "float8_e4m3fn": GRIDS["e4m3"],
    "float8_e5m2": GRIDS["e5m2"],
    "float6_e3m2fn": GRIDS["e3m2"],
    "float6_e2m3fn": GRIDS["e2m3"],
    "float4_e2m1fn": GRIDS["e2m1"],
}
SCALED = [name for name, fmt in FORMATS.items() if isinstance(fmt, room.Format)]
INTEGERS = [name for name in SCALED if name.startswith("int")]


@pytest.fixture
def normal(request):
    """Maker of normal data [rows, width], seeded by the test's name."""
    generator = torch.Generator().manual_seed(crc32(request.node.name.encode()))
    return lambda rows=64, width=1024: torch.randn(rows, width, generator=generator)


def all_halves():
    """Every finite float16 value, as float32."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return x[x.isfinite()].float()


def probes(dtype):
    """All values of a narrow dtype, all midpoints between them, and the floats beside each."""
    values = np.arange(1 << ml_dtypes.finfo(dtype).bits, dtype=np.uint8).view(dtype)
    values = np.unique(values.astype(np.float32))
    values = values[np.isfinite(values)]
    x = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    return np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, -np.inf)])


def against_ml_dtypes(nearest, name):
    """Number of probes where a rounding differs from the cast of ml_dtypes."""
    dtype, top = getattr(ml_dtypes, name), BY_DTYPE[name].max
    x = np.concatenate([probes(np.dtype(dtype)), all_halves().numpy()]).astype(np.float32)
    x = x[np.abs(x) <= top]
    return int((nearest(torch.from_numpy(x)).numpy() != x.astype(dtype).astype(np.float32)).sum())


@pytest.mark.parametrize("name", BY_DTYPE)
def test_float_grids_are_those_of_ml_dtypes_exhaustively(name):
    grid, info = BY_DTYPE[name], ml_dtypes.finfo(getattr(ml_dtypes, name))
    assert (grid.bits, grid.mantissa, grid.max) == (info.bits, info.nmant, float(info.max))
    assert grid.smallest_normal == float(info.smallest_normal)
    assert grid.smallest_subnormal == float(info.smallest_subnormal)
    assert against_ml_dtypes(grid.nearest, name) == 0


@pytest.mark.parametrize("name", BY_DTYPE)
@pytest.mark.parametrize("field", ["mantissa", "emin"])
def test_a_grid_off_by_one_is_caught(name, field):
    grid = BY_DTYPE[name]
    assert against_ml_dtypes(replace(grid, **{field: getattr(grid, field) + 1}).nearest, name)


@pytest.mark.parametrize("name", BY_DTYPE)
def test_ties_away_from_zero_and_truncation_are_caught(name):
    grid = BY_DTYPE[name]
    for shift in (1e-6, -0.5):  # of a step, away from zero

        def wrong(x, shift=shift):
            exponent = torch.frexp(x).exponent.sub(1).clamp(min=grid.emin)
            step = torch.ldexp(torch.ones_like(x), exponent - grid.mantissa)
            return grid.nearest(x + shift * step * x.sign())

        assert against_ml_dtypes(wrong, name)


@pytest.mark.parametrize("name", BY_DTYPE)
def test_what_is_beyond_a_grid_saturates(name):
    grid = BY_DTYPE[name]
    x = torch.tensor([grid.max * 1.01, -grid.max * 1000, 3e38])
    assert grid.nearest(x).tolist() == [grid.max, -grid.max, grid.max]


@pytest.mark.parametrize(
    ("grid", "dtype"),
    [(GRIDS["float16"], torch.float16), (GRIDS["bfloat16"], torch.bfloat16),
     (GRIDS["e4m3"], torch.float8_e4m3fn), (GRIDS["e5m2"], torch.float8_e5m2)],
    ids=lambda x: getattr(x, "name", ""),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
@given(bits=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=64))
def test_float_grids_are_the_casts_of_torch_on_any_float32(grid, dtype, bits):
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    x = x[x.abs() <= grid.max]
    assert torch.equal(grid.nearest(x), x.to(dtype).float())


@pytest.mark.parametrize("bits", [2, 4])
def test_integer_grids_are_those_of_ml_dtypes(bits):
    grid, dtype = GRIDS[f"int{bits}"], getattr(ml_dtypes, f"int{bits}")
    x = np.arange(-grid.max, grid.max + 0.01, 0.125, dtype=np.float32)
    expected = np.rint(x).astype(dtype).astype(np.float32)
    assert np.array_equal(grid.nearest(torch.from_numpy(x)).numpy(), expected)
    assert grid.max == float(ml_dtypes.iinfo(dtype).max)  # the lowest code, -8, stays unused


# ---- whole formats -------------------------------------------------------------------------------


def by_torchao(x, fmt, *, shift=0, narrow=0):
    """Round to nearest by torchao's affine primitives: (values, distance of x / scale to a tie).

    `shift` moves the zero point between the two ways, `narrow` clips that many steps early.
    """
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    group = x.shape[1] if fmt.group == "channel" else fmt.group
    block = (1, group)
    top = 2**fmt.bits - 1 if fmt.zero_point else fmt.grid.max
    bottom, mapping = (0, "ASYMMETRIC") if fmt.zero_point else (-top, "SYMMETRIC")
    scale, zero = primitives.choose_qparams_affine(
        x, primitives.MappingType[mapping], block, torch.int32, bottom, top, eps=1e-12,
        scale_dtype=torch.float32,
    )  # fmt: skip
    codes = primitives.quantize_affine(x, block, scale, zero, torch.int32, bottom, top - narrow)
    y = primitives.dequantize_affine(codes, block, scale, zero + shift, torch.int32, bottom, top)
    ratio = x / scale.reshape(len(x), -1).repeat_interleave(group, 1)
    return y, (ratio - ratio.floor() - 0.5).abs()


def wrong_share(ours, theirs, tie):
    """Share of weights, none of them near a tie, where two roundings differ."""
    return float(
        (((ours - theirs).abs() > 1e-5 * theirs.abs().max()) & (tie > 1e-4)).float().mean()
    )


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_agree_with_torchao(normal, name):
    fmt = replace(number_format(name), scale=None)
    for x in (normal(), normal() + 3, -normal().abs(), normal().pow(3)):  # zero is in every range
        assert wrong_share(round_to(x, fmt), *by_torchao(x, fmt)) == 0


@pytest.mark.parametrize(
    ("name", "fault"),
    [("int4-group32", {"narrow": 1}), ("int4-group32-asym", {"shift": 1}),
     ("int8-group64-asym", {"shift": 1})],
)  # fmt: skip
def test_a_clipped_step_and_a_shifted_zero_are_caught(normal, name, fault):
    x, fmt = normal(), replace(number_format(name), scale=None)
    assert wrong_share(round_to(x, fmt), *by_torchao(x, fmt, **fault)) > 0.005


@pytest.mark.parametrize("name", ["int8-channel", "int4-channel-asym", "int4-group32"])
def test_the_wrong_axis_is_caught(normal, name):
    x, fmt = normal(64, 64), replace(number_format(name), scale=None)
    assert wrong_share(round_to(x.T, fmt).T, *by_torchao(x, fmt)) > 0.3


@pytest.mark.parametrize("wrong", [16, 64, "shifted"])
def test_a_wrong_group_boundary_is_caught(normal, wrong):
    x, fmt = normal(), replace(number_format("int4-group32"), scale=None)
    if wrong == "shifted":
        moved = round_to(x.roll(1, 1), fmt).roll(-1, 1)
    else:
        moved = round_to(x, replace(fmt, group=wrong))
    assert wrong_share(moved, *by_torchao(x, fmt)) > 0.05  # only groups that lose their largest


def test_a_scale_stored_in_fp8_is_told_from_float16(normal):
    x, fmt = normal(), number_format("int4-group32")
    grids = GRIDS["float16"], GRIDS["e4m3"]
    good, bad = (round_to(x, replace(fmt, scale=grid)) for grid in grids)
    theirs, _ = by_torchao(x, fmt)
    assert (good - theirs).norm() < 0.1 * (x - theirs).norm()  # a few weights beside a tie
    assert (bad - theirs).norm() > 0.5 * (x - theirs).norm()


@pytest.mark.parametrize(
    ("name", "element"),
    [("mxfp8-e4m3", torch.float8_e4m3fn), ("mxfp8-e5m2", torch.float8_e5m2),
     ("mxfp6-e3m2", "fp6_e3m2"), ("mxfp6-e2m3", "fp6_e2m3"),
     ("mxfp4", getattr(torch, "float4_e2m1fn_x2", None))],
)  # fmt: skip
def test_microscaling_is_that_of_torchao_bit_for_bit(normal, name, element):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = normal() * torch.logspace(-20, 20, 64, base=2)[:, None]
    x[3, 32:64] = 0
    expected = mx.MXTensor.to_mx(x, element, block_size=32).to_dtype(torch.float32)
    assert torch.equal(round_to(x, name), expected)
    wrong = replace(FORMATS[name], group=16)
    assert not torch.equal(round_to(x, wrong), expected)


def test_mxfp4_is_also_that_of_llama_cpp(normal):
    gguf = pytest.importorskip("gguf")
    x, kind = normal(), gguf.GGMLQuantizationType.MXFP4
    theirs = gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), kind), kind)
    assert np.array_equal(round_to(x, "mxfp4").numpy(), theirs)


def test_nvfp4_is_that_of_torchao(normal):
    room_of = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = normal()
    scale = room_of.per_tensor_amax_to_scale(x.abs().max())
    theirs = room_of.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).to_dtype(torch.float32)
    ours = round_to(x, "nvfp4")
    assert (((ours - theirs).abs() > 1e-6).float().mean()) < 1e-4  # x · (1 / s) at ties
    no_second = replace(FORMATS["nvfp4"], tensor_scale=False)
    assert ((round_to(x, no_second) - theirs).abs() > 1e-6).float().mean() > 0.1


def test_the_nf4_table_follows_from_the_normal_quantiles():
    """QLoRA, equation 4 as bitsandbytes computes it: offset .9677083, eight and nine quantiles."""
    from scipy.stats import norm

    offset = 0.9677083
    positive = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    table = np.sort(np.concatenate([positive, [0], negative])) / positive.max()
    assert np.allclose(table, GRIDS["nf4"].values, atol=2e-7)


@pytest.mark.parametrize("name", ["nf4", "nf4-double"])
def test_nf4_is_that_of_torchao(normal, name):
    room_of = pytest.importorskip("torchao.dtypes.nf4tensor")
    x = normal(64, 1024)
    coarse = replace(GRIDS["nf4"], values=tuple(round(v, 4) for v in GRIDS["nf4"].values))
    ours = round_to(x, replace(FORMATS[name], grid=coarse))
    theirs = room_of.NF4Tensor.from_tensor(x, 64, 256)
    if name == "nf4":  # torchao always quantises scales: take its codes and the exact scales
        codes = torch.stack([theirs.quantized_data >> 4, theirs.quantized_data & 15], 1).long()
        scale = x.reshape(-1, 64).abs().amax(1, keepdim=True)
        theirs = (theirs.nf4[codes.flatten()].reshape(-1, 64) * scale).reshape(x.shape)
    else:
        theirs = theirs.get_original_weight()
    assert (ours - theirs).abs().max() < 2e-6


def test_double_quantisation_takes_any_number_of_scales(normal):
    x = normal(3, 64 * 5)
    once, twice = round_to(x, "nf4"), round_to(x, "nf4-double")
    assert 0 < (once - twice).norm() < 0.02 * x.norm()


def blocks_by_hand(x, name):
    """ggml-quants.c's quantize_row_*_ref and dequantize_row_*, element by element."""
    half, single = np.float16, np.float32
    y = np.empty_like(x)
    for row in range(len(x)):
        for start in range(0, x.shape[1], 32):
            block = x[row, start : start + 32]
            if name == "q8_0":
                d = np.abs(block).max() / single(127)
                q = np.array([np.floor(abs(v / d) + 0.5) * np.sign(v) for v in block])
                low = single(0)
            elif name.endswith("0"):
                n = {"q4_0": 8, "q5_0": 16}[name]
                d = block[np.abs(block).argmax()] / single(-n)
                q = np.array([min(2 * n - 1, int(v * (single(1) / d) + single(n + 0.5))) - n
                              for v in block])  # fmt: skip
                low = single(0)
            else:
                n = {"q4_1": 15, "q5_1": 31}[name]
                low, d = block.min(), (block.max() - block.min()) / single(n)
                q = np.array([min(n, int((v - low) * (single(1) / d) + single(0.5)))
                              for v in block])  # fmt: skip
            y[row, start : start + 32] = q * single(half(d)) + single(half(low))
    return y


@pytest.mark.parametrize("name", ["q8_0", "q5_0", "q5_1", "q4_0", "q4_1"])
def test_llama_cpp_blocks_follow_their_c_source(normal, name):
    x = normal(4, 256)
    assert np.array_equal(round_to(x, name).numpy(), blocks_by_hand(x.numpy(), name))


# ---- what holds for all --------------------------------------------------------------------------

EXACT_AGAIN = [n for n in FORMATS if not n.endswith("-asym") and n != "nf4-double"]


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_again_changes_little_or_nothing(normal, name):
    once = round_to(normal(), name)
    again = round_to(once, name)
    off = float((again - once).norm() / once.norm())
    assert off < (1e-6 if name in EXACT_AGAIN else FORMATS[name].resolution / 8)


@pytest.mark.parametrize("name", SCALED)
@settings(max_examples=25, deadline=None)
@given(power=st.integers(-6, 6), seed=st.integers(0, 1 << 20))
def test_powers_of_two_pass_through(name, power, seed):
    """round(2^k x) = 2^k round(x) while no stored scale leaves the normal range of its format."""
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(round_to(x * 2.0**power, name), round_to(x, name) * 2.0**power)


@pytest.mark.parametrize("name", ["int8-channel", "int4-group32", "fp8-e4m3", "mxfp4", "nf4"])
def test_no_value_of_the_grid_is_nearer(normal, name):
    """Against the whole codebook of each group, found by brute force."""
    fmt, x = replace(FORMATS[name], scale=FORMATS[name].scale and GRIDS["e8m0"]), normal(2, 256)
    width = {"channel": 256, "tensor": 512}.get(fmt.group, fmt.group)
    blocks = x.reshape(-1, width)
    codes = fmt.grid.values or fmt.grid.nearest(torch.linspace(-fmt.grid.max, fmt.grid.max, 99999))
    codes = torch.as_tensor(codes).unique()
    y = round_to(x, fmt).reshape(-1, width)
    distance = (codes * fmt.scales(blocks)[..., None] - blocks[..., None]).abs().amin(-1)
    assert ((y - blocks).abs() <= distance * (1 + 1e-5) + 1e-7).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_and_tiny_or_huge_rows_stay_finite(name):
    x = torch.zeros(3, 256)
    assert round_to(x, name).abs().max() == 0
    x[1] = 1e-30 * torch.arange(1, 257)
    x[2] = 1e4 * torch.arange(1, 257) / 256
    assert round_to(x, name).isfinite().all()
    assert torch.equal(round_to(x[2:].bfloat16(), name), round_to(x[2:].bfloat16().float(), name))


@pytest.mark.parametrize(
    ("name", "bits"),
    [("int8-channel", 8 + 32 / 1024), ("int4-group128", 4.125), ("int4-group32", 4.5),
     ("int4-group128-asym", 4 + (16 + 4) / 128), ("fp8-e4m3", 8 + 32 / (64 * 1024)),
     ("mxfp8-e4m3", 8.25), ("mxfp6-e2m3", 6.25), ("mxfp4", 4.25),
     ("nvfp4", 4.5 + 32 / (64 * 1024)), ("nf4", 4.5),
     ("nf4-double", 4 + 8 / 64 + 32 / (64 * 256) + 32 / (64 * 1024)),
     ("q8_0", 8.5), ("q5_0", 5.5), ("q5_1", 6), ("q4_0", 4.5), ("q4_1", 5)],
)  # fmt: skip
def test_bits_per_weight_counted_by_hand(name, bits):
    assert FORMATS[name].bits_per_weight((64, 1024)) == pytest.approx(bits, rel=1e-12)


def decibels(x, y):
    return -20 * float(torch.log10((x - y).norm() / x.norm()))


@pytest.mark.parametrize("name", ["int8-channel", "int8-group128", "int8-group32", "int4-channel"])
def test_the_error_of_integers_is_a_twelfth_of_the_step_squared(normal, name):
    """Error power = mean(scale²) / 12 · (1 − 1 / group): the largest of a group is exact."""
    fmt, x = FORMATS[name], normal(1024, 1024)
    width = 1024 if fmt.group == "channel" else fmt.group
    power = float(fmt.scales(x.reshape(-1, width)).double().square().mean() / 12) * (1 - 1 / width)
    assert float((x - round_to(x, fmt)).double().square().mean()) == pytest.approx(power, rel=0.01)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("int8-channel", 41.5, 42.5), ("q8_0", 45, 46), ("int8-group32", 45, 46),
     ("fp8-e4m3", 31, 32.5), ("fp8-e5m2", 25, 26.5), ("nf4", 20.2, 21.2),
     ("q4_0", 20.8, 21.8), ("mxfp4", 18, 19.5), ("nvfp4", 20, 21)],
)  # fmt: skip
def test_signal_to_noise_of_normal_weights(normal, name, low, high):
    x = normal(1024, 1024)
    assert low < decibels(x, round_to(x, name)) < high


def test_more_bits_and_smaller_groups_err_less(normal):
    x = normal()
    ladder = [decibels(x, round_to(x, f"int{b}-{g}")) for b in (2, 3, 4, 8)
              for g in ("channel", "group128", "group64", "group32")]  # fmt: skip
    assert all(np.diff(ladder)[i] > 0 for i in range(15) if i % 4 != 3)
    assert ladder[0] < ladder[4] < ladder[8] < ladder[12]


# ---- bad input -----------------------------------------------------------------------------------


def test_refusals_name_what_is_wrong():
    x = torch.ones(2, 96)
    with pytest.raises(ValueError, match=r"groups of 64 weights, .* row of 96; int4-group32 would"):
        round_to(x, "int4-group64")
    with pytest.raises(ValueError, match=r"`fmt` nf4 has groups of 64 .* do not divide"):
        round_to(x, "nf4")
    with pytest.raises(ValueError, match=r"`fmt` q4_0 has blocks of 32 .* a row of 40"):
        round_to(torch.ones(2, 40), "q4_0")
    with pytest.raises(ValueError, match=r"a row of 40, nor do smaller ones down to 16"):
        number_format("int4-group128").fitted(40)
    with pytest.raises(KeyError, match="did you mean 'mxfp4'"):
        round_to(x, "MXFP-4")
    x[1, 5], x[1, 7] = torch.nan, torch.inf
    with pytest.raises(ValueError, match=r"2 of 192 values are not, first \(1, 5\)"):
        round_to(x, "int8-channel")


def test_values_beyond_a_stored_scale_are_counted(normal):
    """By what rounding makes of them: all beyond the last value of a group come back as that one.

    Scales in float32 saturate nothing; MX scales are powers of two, at times too small.
    """
    x = normal()
    for name in ("int8-channel", "fp8-e4m3", "nf4"):
        assert number_format(name).saturated(x) == 0, name
    blocks, rounded = (t.reshape(-1, 32) for t in (x, round_to(x, "mxfp4")))
    top = rounded.abs().amax(1, keepdim=True)
    beyond = (blocks.abs() > top) & (rounded.abs() == top)
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(1, keepdim=True))) - 2)
    assert torch.equal(beyond & (top == 6 * scale), blocks.abs() > 6 * scale)
    share = float((blocks.abs() > 6 * scale).float().mean())
    assert number_format("mxfp4").saturated(x) == pytest.approx(share) and 0.003 < share < 0.03
    assert 0 < number_format("int4-group32").saturated(x) < 1 / 32
    assert np.isnan(number_format("q4_0").saturated(x))


def test_groups_shrink_until_they_fit():
    assert number_format("int4-group128").fitted(576).group == 64
    assert number_format("int4-group128").fitted(1536).name == "int4-group128"
    assert number_format("int8-channel").fitted(7) is FORMATS["int8-channel"]
