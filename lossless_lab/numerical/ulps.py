"""Distance in rounding steps: how many values of one dtype lie between two numbers."""

import math

import numpy as np
import pandas as pd
import torch

_CHUNK = 1 << 18  # elements per chunk in int64: 2 MiB
_NEAR_ZERO = 2.0**-6  # of the reference's RMS: below it, ULP say more about zero than about error
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RANKED = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
Dtype = str | torch.dtype | None


def ulp_distance(
    reference: torch.Tensor, candidate: torch.Tensor, *, dtype: Dtype = None
) -> torch.Tensor:
    """Steps from one value to the other, |rank(x) − rank(y)|, both rounded to `dtype` first.

    +0 and −0 are one value, inf follows the largest finite one, and −1 stands where either is NaN
    (float8_e4m3fn has no inf: what rounds beyond 448 is NaN here, though some casts saturate).
    Saturates at 2⁶³ − 1.

    Parameters
    ----------
    reference, candidate : one shape
    dtype : float64, float32, bfloat16, float16, float8_e4m3fn or float8_e5m2; the coarser of the
        two dtypes by default.

    Returns
    -------
    int64 tensor of the same shape. Never quote its maximum where values lie near zero: between
    1e-30 and −1e-30 stand more than 200 million float32 values.

    Raises
    ------
    ValueError
        When the shapes differ, there is no element, or the dtype is another.

    Examples
    --------
    >>> ulp_distance(torch.tensor([1.0, 0.0]), torch.tensor([1 + 2**-7, -0.0]), dtype="bfloat16")
    tensor([1, 0])
    """
    x, y = paired(reference, candidate)
    return _distance(x, y, _ranked(dtype, x, y))


def ulp_histogram(
    reference: torch.Tensor, candidate: torch.Tensor, *, dtype: Dtype = None
) -> pd.DataFrame:
    """Share of pairs by ULP distance, in bins 0, 1, 2–3, 4–7, … doubling; NaN apart, last.

    Parameters
    ----------
    reference, candidate, dtype : as for `ulp_distance`

    Returns
    -------
    DataFrame with columns bin, ulp_min, ulp_max (inclusive; NaN in the row "NaN"), count, share
    (of all pairs), near_zero (count of the bin's pairs with |reference| < 1/64 of its RMS).

    Examples
    --------
    >>> ulp_histogram(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1 + 2**-21]))["bin"].tolist()
    ['0', '1', '2–3', '4–7']
    """
    x, y = paired(reference, candidate)
    counts, nans = _counts(x, y, _ranked(dtype, x, y))
    octaves = np.column_stack([counts[:, 0], counts[:, 1:].reshape(2, 64, 128).sum(2)])
    total = octaves.sum(0)
    used = int(np.flatnonzero(total).max(initial=-1)) + 1
    rows = [
        (0 if i == 0 else 1 << (i - 1), 0 if i == 0 else (1 << i) - 1, total[i], octaves[1, i])
        for i in range(used)
    ]
    named = [(f"{a}" if a == b else f"{a}–{b}", float(a), float(b), *c) for a, b, *c in rows]
    if nans.any():
        named.append(("NaN", math.nan, math.nan, nans.sum(), nans[1]))
    frame = pd.DataFrame(named, columns=["bin", "ulp_min", "ulp_max", "count", "near_zero"])
    frame.insert(4, "share", frame["count"] / x.numel())
    return frame


def ulp_quantiles(
    reference: torch.Tensor, candidate: torch.Tensor, *, dtype: Dtype = None
) -> dict[float, float]:
    """Quantiles .5, .9, .99 and 1 of the ULP distance over pairs that are not near zero.

    Returns
    -------
    dict quantile -> smallest distance that this share of the pairs does not exceed; exact up to
    256, above it rounded down by at most .8 %. NaN where every pair is near zero or NaN.

    Examples
    --------
    >>> ulp_quantiles(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1 + 2**-21]))
    {0.5: 0.0, 0.9: 4.0, 0.99: 4.0, 1.0: 4.0}
    """
    x, y = paired(reference, candidate)
    cumulative = _counts(x, y, _ranked(dtype, x, y))[0][0].cumsum()
    quantiles, n = (0.5, 0.9, 0.99, 1.0), cumulative[-1]
    if not n:
        return dict.fromkeys(quantiles, math.nan)
    bins = [int(np.searchsorted(cumulative, math.ceil(q * n))) for q in quantiles]
    values = [math.ldexp(1 + (b - 1) % 128 / 128, (b - 1) // 128) if b else 0.0 for b in bins]
    return dict(zip(quantiles, values, strict=True))


def paired(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as tensors on the reference's device, of one shape and not empty."""
    x, y = torch.as_tensor(reference).detach(), torch.as_tensor(candidate).detach()
    if x.shape != y.shape or not x.numel() or x.is_complex() or y.is_complex():
        raise ValueError(
            "`reference` and `candidate` must be real, of one shape and with an element or more; "
            f"got {tuple(x.shape)} of {x.dtype} and {tuple(y.shape)} of {y.dtype}"
        )
    return x, y.to(x.device)


def _ranked(dtype: Dtype, x: torch.Tensor, y: torch.Tensor) -> torch.dtype:
    """The dtype that is asked for, else the coarser one of the two tensors."""
    if dtype is None:
        dtype = max(
            (z.dtype if z.is_floating_point() else torch.float64 for z in (x, y)),
            key=lambda d: torch.finfo(d).eps,
        )
    name = str(dtype).removeprefix("torch.")
    if name not in _RANKED:
        raise ValueError(f"`dtype` must be one of {', '.join(_RANKED)}; got {name!r}")
    return getattr(torch, name)


def _counts(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Pairs by distance, 128 bins an octave, and NaN pairs; row 0 as usual, row 1 near zero."""
    n_bins = 1 + 64 * 128
    counts, nans = np.zeros((2, n_bins), dtype=np.int64), np.zeros(2, dtype=np.int64)
    pieces = [z.reshape(-1).split(_CHUNK) for z in (x, y)]
    squares, n = 0.0, 0
    for a in pieces[0]:
        a = a.double()
        finite = a.isfinite()
        squares += float(a.where(finite, 0.0).square().sum())
        n += int(finite.sum())
    near = _NEAR_ZERO * math.sqrt(squares / max(1, n))
    for a, b in zip(*pieces, strict=True):
        distance = _distance(a, b, dtype)
        bits = distance.double().view(torch.int64) >> 45  # exponent and 7 bits of the fraction
        bins = torch.where(distance > 0, bits - (1023 << 7) + 1, 0)
        small = (a.double().abs() < near).long()
        known = distance >= 0
        found = torch.bincount((bins + n_bins * small)[known], minlength=2 * n_bins)
        counts += found.reshape(2, n_bins).cpu().numpy()
        nans += torch.bincount(small[~known], minlength=2).cpu().numpy()
    return counts, nans


def _distance(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, y = _rounded(x, dtype), _rounded(y, dtype)
    nan = x.double().isnan() | y.double().isnan()
    a, b = _rank(x), _rank(y)
    d = (a - b).abs()
    d = torch.where((a < 0) == (b < 0), d, a.abs() + b.abs())
    return torch.where(nan, -1, torch.where(d < 0, torch.iinfo(torch.int64).max, d))


def _rank(x: torch.Tensor) -> torch.Tensor:
    """Signed count of values from zero: the bits without the sign, negated where it is set."""
    width = 8 * x.dtype.itemsize
    bits = x.contiguous().view(_INTEGERS[x.dtype.itemsize]).long()
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where((bits >> (width - 1)) & 1 == 1, -magnitude, magnitude)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the nearest value, ties to even; by way of float32 rounded to odd, so never twice."""
    if x.dtype == dtype:
        return x
    if dtype == torch.float8_e4m3fn:  # 464 is the midpoint of 448 and of what would follow it
        x = x.where(x.double().abs() <= 464, torch.nan)
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16) or dtype == torch.float64:
        return x.to(dtype)
    x = x.double()
    single = x.float()
    if dtype == torch.float32:
        return single
    bits = single.view(torch.int32) - (single.double().abs() > x.abs()).int()
    inexact = x.isfinite() & (single.double() != x)
    return torch.where(inexact, bits | 1, bits).view(torch.float32).to(dtype)
