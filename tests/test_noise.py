"""Rounding steps against numpy's and ml_dtypes' own numbers; the floor's statistic and rule."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from lossless_lab.numerical.noise import centred_peak, centred_rms, noise_floor, ulp_of


@pytest.mark.parametrize(
    "name, kind, bits",
    [("bfloat16", ml_dtypes.bfloat16, np.uint16), ("float16", np.float16, np.uint16)],
)
def test_steps_of_all_16_bit_values(name, kind, bits):
    """The step at x is the distance to the next larger magnitude, for every finite value."""
    top = int(np.array(np.inf, dtype=kind).view(bits))
    values = np.arange(top, dtype=bits).view(kind).astype(np.float64)
    ahead = np.append(values[1:], 2 * values[-1] - values[-2])  # where inf stands
    assert np.array_equal(ulp_of(values, name), ahead - values)
    assert np.array_equal(ulp_of(-values, name), ahead - values)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_steps_equal_numpys_spacing(kind):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(1000) * 10.0 ** rng.integers(-30, 30, 1000)).astype(kind)
    x = np.concatenate([x, np.array([0, 1, 2, 2 - 1e-6, np.finfo(kind).tiny / 8], dtype=kind)])
    assert np.array_equal(ulp_of(x, np.dtype(kind).name), np.spacing(np.abs(x)).astype(np.float64))


def test_steps_of_what_is_no_number():
    assert np.isnan(ulp_of([math.inf, math.nan], torch.float32)).all()
    with pytest.raises(ValueError, match="`dtype` must name a torch floating dtype; got 'int8'"):
        ulp_of(1.0, "int8")


def test_centred_rms_against_numpy():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 7, 50)).astype(np.float32)
    expected = (y.astype(float) - x).std(axis=1)
    assert np.allclose(centred_rms(torch.tensor(x), torch.tensor(y)), expected, rtol=1e-12)
    shifted = torch.tensor(x.astype(np.float64)) + 3
    assert centred_rms(torch.tensor(x).double(), shifted).max() < 1e-15


def test_centred_rms_where_logits_are_not_finite():
    x = torch.tensor([[0.0, 1.0, -math.inf]] * 3)
    y = torch.tensor([[1.0, 4.0, -math.inf], [0.0, 1.0, 2.0], [0.0, math.nan, -math.inf]])
    rms = centred_rms(x, y)
    assert rms[0] == 1.0 and rms[1] == math.inf and math.isnan(rms[2])


def test_the_floor_is_the_maximum_and_leaves_the_unchanged_run_out():
    variants = {"batch": np.array([1e-6, 3e-6]), "padding": np.array([2e-6, 2e-6])}
    floor = noise_floor(variants, top_logits=[1.0, 9.0], dtype="float32", self_rms=[1.0, 2.0])
    assert floor.level == 3e-6 == floor.unit and floor.self_difference == 2.0
    assert floor.rate == pytest.approx(1 / 3)
    assert floor.ulp == np.spacing(np.float32(9))
    assert floor.to_frame()["role"].tolist() == ["floor", "floor", "A/A"]


def test_variants_that_share_their_maximum_are_distinct_all_the_same():
    """In bfloat16 the largest of 19 twins is one of few values: the rate is still 1 in 20."""
    rng = np.random.default_rng(0)
    variants = {str(i): np.append(rng.random(5), 2.0) for i in range(19)}
    again = {"copy": variants["0"].copy()}
    for given in (variants, variants | again):
        floor = noise_floor(given, top_logits=1.0, dtype="bfloat16")
        assert floor.n_distinct == 19 and floor.rate == 1 / 20


def test_a_floor_of_zero_falls_back_to_one_rounding_step():
    floor = noise_floor({"batch": [0.0]}, top_logits=2.5, dtype="bfloat16")
    assert floor.deterministic and floor.unit == 0.015625
    assert "deterministic here" in str(floor)


def test_the_rate_holds_for_exchangeable_variants():
    """One more harmless variant passes the maximum of m at a rate of 1/(m + 1)."""
    rng = np.random.default_rng(0)
    passed = []
    for _ in range(2000):
        *known, fresh = np.abs(rng.standard_normal((5, 6)))
        floor = noise_floor({str(i): x for i, x in enumerate(known)}, top_logits=0, dtype="float64")
        passed.append(fresh.max() > floor.unit)
    assert abs(np.mean(passed) - floor.rate) < 4 * math.sqrt(0.2 * 0.8 / 2000)


def test_a_floor_never_hides_a_nan():
    with pytest.raises(ValueError, match=r"variants\['b'\].*got nan at position 1"):
        noise_floor({"a": [1.0], "b": [1.0, math.nan]}, top_logits=1.0, dtype="float32")
    with pytest.raises(ValueError, match="at least one harmless variant"):
        noise_floor({}, top_logits=1.0, dtype="float32")
    with pytest.raises(ValueError, match="no positions"):
        noise_floor({"a": []}, top_logits=1.0, dtype="float32")


def test_both_rooms_mean_the_same_by_centred_rms():
    from lossless_lab.statistical.divergences import divergences

    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    y = x + 1e-3 * torch.randn(6, 200, generator=torch.Generator().manual_seed(1)) + 2
    x[:, 3:9] = y[:, 3:9] = -math.inf
    frame = divergences(x, y).frame
    assert np.allclose(frame["logit_rms"], centred_rms(x, y), rtol=1e-3)
    assert np.allclose(frame["logit_peak"], centred_peak(x, y), rtol=1e-3)


def test_the_peak_against_numpy_and_where_logits_are_not_finite():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 7, 50)).astype(np.float32)
    d = y.astype(float) - x
    expected = abs(d - d.mean(axis=1, keepdims=True)).max(axis=1)
    assert np.allclose(centred_peak(torch.tensor(x), torch.tensor(y)), expected, rtol=1e-12)
    x = torch.tensor([[0.0, 1.0, -math.inf]] * 3)
    y = torch.tensor([[1.0, 4.0, -math.inf], [0.0, 1.0, 2.0], [0.0, math.nan, -math.inf]])
    peak = centred_peak(x, y)
    assert peak[0] == 1.0 and peak[1] == math.inf and math.isnan(peak[2])


def test_one_token_among_many_shows_in_the_peak_alone():
    x = torch.randn(1, 49152, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[0, 3000] += 12
    assert centred_rms(x, y)[0] == pytest.approx(12 / math.sqrt(49152), rel=1e-3)
    assert centred_peak(x, y)[0] == pytest.approx(12, rel=1e-3)


@pytest.mark.parametrize(
    ("largest", "named"),
    [
        ([1.0, 2.0, 0.5, 22.0], ()),
        ([1.0, 2.0, 0.5, 40.0], ("3",)),
        ([1.0, 2.0, 70.0, 80.0, 90.0, 91.0, 95.0], ("2", "3", "4", "5", "6")),
        ([1e-12, 1e-13, 3e-6], ()),
        ([0.0, 0.0, 1.0], ()),
        ([0.0, 1.0, np.finfo(float).max], ("2",)),
        ([np.finfo(float).max], ("0",)),
    ],
)
def test_variants_that_are_no_reordering_are_named(largest, named):
    variants = {str(i): [value] for i, value in enumerate(largest)}
    floor = noise_floor(variants, top_logits=1.0, dtype="float32")
    assert floor.not_invariant == named
