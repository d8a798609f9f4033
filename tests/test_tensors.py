"""Tensor differences against numpy, torchao and exhaustive rankings; noise told from bias."""

import math
import zlib

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from benchmarks import bias
from lossless_lab.numerical import tensors, ulps
from lossless_lab.numerical.bias import bias_test
from lossless_lab.numerical.tensors import error_sums, tensor_difference
from lossless_lab.numerical.ulps import ulp_distance, ulp_histogram


@pytest.fixture
def rng(request):
    """Seeded by the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


NARROW = {
    "bfloat16": (ml_dtypes.bfloat16, np.uint16),
    "float16": (np.float16, np.uint16),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, np.uint8),
    "float8_e5m2": (ml_dtypes.float8_e5m2, np.uint8),
}


def all_values(name):
    """Every bit pattern of a dtype, as the torch tensor and as float64."""
    kind, bits = NARROW[name]
    patterns = np.arange(np.iinfo(bits).max + 1, dtype=bits)
    with np.errstate(all="ignore"):
        values = patterns.view(kind).astype(np.float64)
    signed = patterns.view(f"i{patterns.itemsize}")
    return torch.from_numpy(signed).view(getattr(torch, name)), values


def ranks(values):
    """Position of each value among the distinct ones: equal zeros share one. NaN stays NaN."""
    distinct = np.unique(values[~np.isnan(values)])
    return np.where(np.isnan(values), np.nan, np.searchsorted(distinct, values))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_distances_of_all_16_bit_values_equal_their_ranking(name, rng):
    x, values = all_values(name)
    rank = ranks(values)
    for other in (np.arange(65536)[::-1], np.roll(np.arange(65536), 1), rng.permutation(65536)):
        expected = np.nan_to_num(abs(rank - rank[other]), nan=-1)
        assert np.array_equal(ulp_distance(x, x[other.copy()]).numpy(), expected)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_distances_of_all_pairs_of_8_bit_values_equal_their_ranking(name):
    x, values = all_values(name)
    rank = ranks(values)
    expected = np.nan_to_num(abs(rank[:, None] - rank), nan=-1)
    pairs = x[:, None].expand(256, 256), x.expand(256, 256)
    assert np.array_equal(ulp_distance(*pairs).numpy(), expected)
    wide = (z.double() for z in pairs)
    assert np.array_equal(ulp_distance(*wide, dtype=name).numpy(), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([np.float32, np.float64]).flatmap(
        lambda kind: hnp.arrays(
            kind, 6, elements=st.floats(allow_nan=False, width=8 * kind().itemsize)
        )
    ),
    st.integers(0, 40),
)
def test_walking_n_steps_is_a_distance_of_n(x, steps):
    """numpy's nextafter, through subnormals, zero and up to inf."""
    y = x
    for _ in range(steps):
        y = np.nextafter(y, x.dtype.type(np.inf))
    stuck = np.isposinf(y)  # fewer steps may have been taken
    found = ulp_distance(torch.tensor(x), torch.tensor(y)).numpy()
    assert (found[~stuck] == steps).all() and (found[stuck] <= steps).all()
    assert (ulp_distance(torch.tensor(y), torch.tensor(x)).numpy() == found).all()


def test_zeros_are_one_value_and_nan_stands_apart():
    inf, nan, tiny = math.inf, math.nan, 2.0**-149
    x = torch.tensor([0.0, -tiny, nan, nan, inf, inf, torch.finfo(torch.float32).max])
    y = torch.tensor([-0.0, tiny, nan, 1.0, inf, -inf, inf])
    assert ulp_distance(x, y).tolist() == [0, 2, -1, -1, 0, 2 * 0x7F800000, 1]
    far = torch.tensor([-1e308, -inf], dtype=torch.float64)
    assert ulp_distance(far, -far).tolist() == [2**63 - 1] * 2  # true distances pass 2^63


@pytest.mark.parametrize("name", NARROW)
def test_float64_is_rounded_once(name, rng):
    """Just beside the midpoint of two values, where rounding by way of float32 goes astray."""
    _, values = all_values(name)
    grid = np.unique(values[np.isfinite(values)])
    middle = (grid[:-1] + grid[1:]) / 2
    beside = np.concatenate([middle * (1 + 2.0**-40), middle * (1 - 2.0**-40), middle])
    index = np.searchsorted(grid, beside) - 1
    below, above = beside - grid[index], grid[index + 1] - beside
    even = ranks(values)[np.searchsorted(np.sort(values[np.isfinite(values)]), grid[index])]
    nearer = np.where(below < above, grid[index], grid[index + 1])
    strict = below != above
    found = ulps._rounded(torch.tensor(beside), getattr(torch, name)).double().numpy()
    assert np.array_equal(found[strict], nearer[strict]) and even.size
    bits = ulps._rank(ulps._rounded(torch.tensor(middle), getattr(torch, name)))
    assert (bits % 2 == 0).all()  # ties to even
    twice = torch.tensor(beside).float().to(getattr(torch, name)).double().numpy()
    assert name == "float16" or not np.array_equal(twice[strict], nearer[strict])  # the mutant


def test_the_coarser_dtype_is_the_default(rng):
    x = torch.tensor(rng.standard_normal(500), dtype=torch.float32)
    y = x.bfloat16()
    assert ulp_distance(x, y).max() == 0  # rounded to bfloat16, all are equal
    assert ulp_distance(x, y, dtype="float32").max() > 1000
    assert ulp_distance(y, x.half()).equal(ulp_distance(y, x.half(), dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"`dtype` must be one of float64, .*; got 'int8'"):
        ulp_distance(x, y, dtype="int8")


def test_the_histogram_counts_every_pair_once(rng):
    x = torch.tensor(rng.standard_normal((100, 70)), dtype=torch.float32)
    y = x * (1 + 1e-5 * torch.tensor(rng.standard_normal((100, 70)), dtype=torch.float32))
    x[3, 4], y[5, 6], x[0] = math.nan, math.nan, x[0] * 1e-9
    frame = ulp_histogram(x, y)
    distance = ulp_distance(x, y).numpy().ravel()
    edges = [0, 1, *(2.0 ** np.arange(1, 40))]
    counts = np.histogram(distance[distance >= 0], bins=edges)[0]
    n = len(frame) - 1
    assert frame["bin"].iloc[-1] == "NaN" and frame["count"].iloc[-1] == 2
    assert frame["count"][:n].tolist() == counts[:n].tolist() and counts[n:].sum() == 0
    assert frame["share"].sum() == pytest.approx(1)
    rms = np.sqrt(np.nanmean(x.double().numpy() ** 2))
    assert frame["near_zero"].sum() == (abs(x.double().numpy()) < rms / 64).sum() >= 70
    assert frame["bin"].tolist()[:4] == ["0", "1", "2–3", "4–7"]


def test_ulp_quantiles_leave_values_near_zero_out(rng):
    x = rng.standard_normal((200, 50)).astype(np.float32)
    y = (x + 1e-4 * rng.standard_normal(x.shape)).astype(np.float32)
    found = tensor_difference(torch.tensor(x), torch.tensor(y)).ulps
    distance = ulp_distance(torch.tensor(x), torch.tensor(y)).numpy()
    kept = distance[abs(x) >= np.sqrt(np.mean(x.astype(float) ** 2)) / 64]
    for q, value in found.items():
        exact = np.quantile(kept, q, method="inverted_cdf")
        assert exact * (1 - 2**-7) <= value <= exact
    assert distance.max() > 5 * found[1.0]  # what a headline would have been


def by_numpy(x, y):
    x, y = x.astype(np.longdouble), y.astype(np.longdouble)
    d = y - x
    return {
        "rms_difference": np.sqrt(np.mean(d**2)),
        "rms_reference": np.sqrt(np.mean(x**2)),
        "relative_rms": np.sqrt(np.sum(d**2) / np.sum(x**2)),
        "max_abs_difference": abs(d).max(),
        "cosine": np.sum(x * y) / np.sqrt(np.sum(x * x) * np.sum(y * y)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (40, 30), (2, 9, 11)])
def test_figures_agree_with_numpy(dtype, shape, rng):
    x = torch.tensor(rng.standard_normal(shape)).to(dtype)
    y = (x.double() + 0.1 * torch.tensor(rng.standard_normal(shape))).to(dtype)
    a, b = x.double().numpy(), y.double().numpy()
    expected, found = by_numpy(a, b), tensor_difference(x, y)
    figures = found.sums.figures
    assert all(figures[k] == pytest.approx(float(v), rel=1e-12) for k, v in expected.items())
    assert error_sums(x, y).figures == pytest.approx(figures, rel=1e-12)
    for extreme, size in ((found.max_abs, abs(b - a)), (found.max_rel, abs((b - a) / a))):
        at = np.unravel_index(size.argmax(), shape)
        assert extreme == (pytest.approx(size.max(), rel=1e-12), at)
    assert found.mismatch_share == np.mean(a != b)
    means = (b - a).reshape(-1, shape[-1] if len(shape) > 1 else 1).mean(1)
    expected = stats.ttest_1samp(means, 0)
    assert found.shift.statistic == pytest.approx(expected.statistic, rel=1e-9)
    assert found.shift.pvalue == pytest.approx(expected.pvalue, rel=1e-9)


def test_sqnr_equals_torchaos(rng):
    from torchao.quantization.utils import compute_error

    x = torch.tensor(rng.standard_normal((64, 300)))
    for noise in (1e-9, 1e-4, 0.3, 5.0):
        y = x + noise * torch.tensor(rng.standard_normal(x.shape))
        expected = float(compute_error(x, y))
        assert error_sums(x, y).figures["sqnr_db"] == pytest.approx(expected, rel=1e-9)
        assert tensor_difference(x, y).sums.figures["sqnr_db"] == pytest.approx(expected, rel=1e-9)
        if noise == 0.3:  # a mutant that takes power for amplitude is caught
            assert error_sums(x, y).figures["sqnr_db"] != pytest.approx(expected / 2, rel=1e-3)


def test_extremes_are_those_of_torch_testing(rng):
    x = torch.tensor(rng.standard_normal((20, 30)))
    y = x + 1e-3 * torch.tensor(rng.standard_normal((20, 30)))
    found = tensor_difference(x, y)
    with pytest.raises(AssertionError) as message:
        torch.testing.assert_close(y, x, rtol=0, atol=0)
    text = str(message.value)
    assert f"difference: {found.max_abs.value} at index {found.max_abs.index}" in text
    assert f"difference: {found.max_rel.value} at index {found.max_rel.index}" in text


def test_chunks_change_nothing(rng, monkeypatch):
    x = torch.tensor(rng.standard_normal((13, 37)))
    y = x + 0.01 * torch.tensor(rng.standard_normal((13, 37)))
    x[4, 5] = math.nan
    whole = tensor_difference(x, y).to_frame(), ulp_histogram(x, y)
    for size in (1, 7, 37, 100):
        monkeypatch.setattr(tensors, "_CHUNK", size)
        monkeypatch.setattr(ulps, "_CHUNK", size)
        again = tensor_difference(x, y).to_frame(), ulp_histogram(x, y)
        for a, b in zip(whole, again, strict=True):
            numbers = a.select_dtypes("number").columns
            assert np.allclose(a[numbers], b[numbers], rtol=1e-12, equal_nan=True)
            assert a.drop(columns=numbers).equals(b.drop(columns=numbers))


def test_no_more_than_a_chunk_is_held_in_higher_precision():
    """No single float64 or int64 tensor made on the way passes the chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for z in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(z, torch.Tensor) and z.dtype in (torch.float64, torch.int64):
                    sizes.append(z.numel())
            return out

    x = torch.ones(600, 2000, dtype=torch.bfloat16)
    with Watch():
        tensor_difference(x, x * 2)
        ulp_histogram(x, x * 2)
        error_sums(x, x * 2)
    assert 2000 < max(sizes) <= max(tensors._CHUNK, ulps._CHUNK) < x.numel()


def test_what_is_not_finite_is_counted_first_and_left_out():
    x = torch.tensor([[1.0, math.nan, math.inf], [2.0, 3.0, -math.inf]])
    y = torch.tensor([[1.5, 1.0, math.inf], [2.0, math.nan, -math.inf]])
    found = tensor_difference(x, y)
    assert found.nonfinite.first == (0, 1) and found.nonfinite.total == 6
    assert found.sums.n == 2 and found.max_abs == (0.5, (0, 0)) and found.mismatch_share == 0.5
    assert found.shift.mean == 0.25  # of the means .5 and 0
    assert str(found).startswith("non-finite: only reference and candidate, first at (0, 1)")
    assert math.isnan(error_sums(x, y).figures["rms_difference"])  # the row never loses a NaN
    only = tensor_difference(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert only.sums.n == 0 and math.isnan(only.mismatch_share) and only.nonfinite.total == 1


def test_equal_and_zero_tensors():
    x = torch.ones(4, 5)
    assert tensor_difference(x, x).answer == "equal" and "all equal" in str(tensor_difference(x, x))
    assert tensor_difference(x, x).sums.figures["sqnr_db"] == math.inf
    zero = tensor_difference(x * 0, x)
    assert zero.sums.relative_rms == math.inf == zero.max_rel.value
    assert tensor_difference(x[:1], x[:1] + 1).answer == "undecided"
    assert tensor_difference(x.to(torch.float8_e5m2), x).ulps[1.0] == 0
    for bad in ((x, x[:2]), (x[:0], x[:0])):
        with pytest.raises(ValueError, match="of one shape and with an element or more; got"):
            tensor_difference(*bad)


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float32, (2, 3, 4), elements=st.floats(width=32)))
def test_any_values_at_all(xy):
    """Whatever stands in the tensors: nothing is lost, nothing raises, and sides are told apart."""
    found = tensor_difference(*torch.tensor(xy))
    finite = np.isfinite(xy).all(0)
    assert found.sums.n == finite.sum()
    assert found.nonfinite.total == (~np.isfinite(xy)).sum()
    d = abs(xy[1][finite].astype(float) - xy[0][finite])
    assert found.max_abs.value == d.max(initial=0)
    histogram = ulp_histogram(*torch.tensor(xy))
    assert histogram["count"].sum() == 12
    nans = np.isnan(xy).any(0).sum()
    assert histogram.loc[histogram["bin"] == "NaN", "count"].sum() == nans
    assert isinstance(str(found), str) and len(found.to_frame()) == 1


def test_a_shift_and_a_scale_are_bias_and_rounding_is_noise(rng):
    x = torch.tensor(rng.standard_normal((200, 64)), dtype=torch.float32)
    noise = 1e-3 * torch.tensor(rng.standard_normal((200, 64)), dtype=torch.float32)
    assert tensor_difference(x, x + noise).answer == "no bias found"
    assert tensor_difference(x, x.bfloat16()).answer == "no bias found"
    shifted = tensor_difference(x, x + noise + 1e-4)
    assert shifted.answer == "bias" and shifted.shift.pvalue < 1e-6
    scaled = tensor_difference(x, x * 1.001 + noise)
    assert scaled.answer == "bias" and scaled.scale.mean == pytest.approx(1e-3, rel=0.1)
    assert scaled.shift.pvalue > 1e-3  # which a test of the mean alone does not see
    bits = x.view(torch.int32) & ~0xFFFF  # truncated instead of rounded
    assert tensor_difference(x, bits.view(torch.float32)).answer == "bias"


def test_groups_are_the_units_where_they_are_given():
    d = torch.tensor([[1.0], [3.0], [5.0], [5.0]])
    grouped = bias_test(d, groups=["a", "a", "b", "b"])
    assert grouped.n_units == 2 and grouped.mean == 3.5
    assert grouped.pvalue == pytest.approx(stats.ttest_1samp([2, 5], 0).pvalue)
    assert bias_test(torch.ones(3, 2)).pvalue == 0 and bias_test(torch.zeros(3, 2)).pvalue == 1
    with pytest.raises(ValueError, match="must name 4 positions; got 3"):
        bias_test(d, groups=[1, 2, 3])
    with pytest.raises(ValueError, match=r"finite and .* with 1 values that are not finite"):
        bias_test(torch.tensor([[1.0, math.nan]]))


@pytest.mark.parametrize("case", [c for c, (_, size, _) in bias.CASES.items() if not size])
def test_false_alarms_of_the_bias_test(case, rng):
    unit, _, noise = bias.CASES[case]
    assert bias.holds(bias.rejections(rng, unit, n_repetitions=300, **noise), 300)


def test_false_alarms_of_the_answer(rng):
    """Both tests together, on values rounded to bf16 one by one."""
    found = 0
    for _ in range(300):
        x = torch.tensor(rng.standard_normal((60, 40)) * np.exp(rng.standard_normal((60, 1))))
        found += tensor_difference(x, x.bfloat16()).answer == "bias"
    assert bias.holds(found, 300)


def test_units_that_are_none_raise_false_alarms(rng):
    """The mutants: every element its own unit, and positions where documents go together."""
    assert not bias.holds(bias.rejections(rng, "element", n_repetitions=100), 100)
    found = bias.rejections(rng, "position", n_repetitions=100, together=0.3)
    assert not bias.holds(found, 100)


def test_power_for_a_small_bias(rng):
    """A bias of a fifth of the RMS, 4 % of the squared error, is found in 320 positions."""
    assert bias.rejections(rng, "position", n_repetitions=100, bias=0.2) >= 80
    d = bias.rounding_noise(rng)
    promised = bias_test(torch.from_numpy(d)).minimum_detectable / np.sqrt(np.mean(d**2))
    assert 0.02 < promised < 0.3


def test_the_full_simulation_is_committed_and_holds():
    table = pd.read_csv(bias.TABLE)
    assert set(table["code"]) == {bias.code()}, "run `make calibrate`: the code has changed"
    assert (table["n_repetitions"] >= 2000).all() and "FAILS" not in set(table["claim"])


def test_groups_are_the_units_of_both_bias_tests():
    """Positions of one document share an offset: by position it looks certain, by document not."""
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.standard_normal((240, 64)))
    documents = np.repeat(np.arange(8), 30)
    offset = np.linspace(-0.01, 0.012, 8)[documents][:, None]
    y = x + torch.from_numpy(offset + 1e-3 * rng.standard_normal((240, 64)))
    by_position, by_document = (
        tensor_difference(x, y, groups=groups) for groups in (None, documents)
    )
    assert by_position.shift.pvalue < 0.05 < by_document.shift.pvalue
    means = (y - x).mean(1).numpy().reshape(8, 30).mean(1)
    oracle = stats.ttest_1samp(means, 0)
    assert by_document.shift.pvalue == pytest.approx(oracle.pvalue, rel=1e-9)
    assert by_document.shift.n_units == by_document.scale.n_units == 8
    with pytest.raises(ValueError, match="`groups` must name 240 positions; got 3"):
        tensor_difference(x, y, groups=[0, 1, 2])


def test_what_is_not_finite_on_one_side_is_never_called_equal():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    one, every = x.clone(), torch.full_like(x, math.nan)
    one[0, 1] = math.nan
    assert tensor_difference(x, one).answer == tensor_difference(x, every).answer == "not finite"
    assert tensor_difference(one, one).answer == "equal"
    tiny = torch.tensor([1e-200, 1.0], dtype=torch.float64)
    assert tensor_difference(tiny, tiny * torch.tensor([1.1, 1.0])).answer != "equal"
    with pytest.raises(ValueError, match="integers up to 2"):
        tensor_difference(torch.tensor([2**53 + 1]), torch.tensor([2**53]))
    with pytest.raises(ValueError, match="must be real"):
        tensor_difference(torch.zeros(2), torch.zeros(2, dtype=torch.complex64))


def test_float8_e4m3fn_has_no_inf_so_what_overflows_is_nan_as_in_ml_dtypes():
    values = [448.0, 463.9, 464.0, 464.1, 1e4, math.inf, -math.inf]
    oracle = np.array(values, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn)
    found = ulps.ulp_distance(
        torch.tensor(values), torch.tensor(448.0).expand(7), dtype=torch.float8_e4m3fn
    )
    assert ((found == -1).numpy() == np.isnan(oracle.astype(np.float32))).all()
