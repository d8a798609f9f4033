"""The unit of every difference: the rounding step, and the baseline's own noise in its logits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from ..results import Result
from .nonfinite import largest

_CHUNK = 1 << 20  # logits per chunk in float64: 8 MiB
# What stands for the difference of a variant whose logits are no law, as keywords of nan_to_num.
NO_LAW = dict.fromkeys(("nan", "posinf"), float(np.finfo(np.float64).max))
_UNLIKE = 30  # times the others' difference: no re-ordering of the same function


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseFloor(Result):
    """How far harmless re-orderings of the reference move its own logits.

    Parameters
    ----------
    level : float
        Maximum over variants and positions of the centred logit RMS.
    variants : dict
        Name of each variant that sets the level -> its maximum over positions.
    self_difference : float or None
        The same maximum for the reference run twice unchanged (A/A); never part of the level.
    ulp : float
        Largest rounding step of the reference's top logits in the compute dtype.
    dtype : str
    n_positions : int
        Positions of the shortest variant; the candidate must be judged on as many.
    peaks : dict
        Name of each variant -> its largest centred difference at a single token; may be empty.
    n_distinct : int
        Variants whose differences are not all the same, position by position, as another's.
    """

    level: float
    variants: dict[str, float]
    self_difference: float | None
    ulp: float
    dtype: str
    n_positions: int
    peaks: dict[str, float] = field(default_factory=dict)
    n_distinct: int

    @property
    def peak(self) -> float | None:
        """Largest difference at a single token over all variants; None where none was measured."""
        return largest([*self.peaks.values()]) if self.peaks else None

    @property
    def not_invariant(self) -> tuple[str, ...]:
        """Variants that moved the logits over 30 times as far as the median of those below them.

        The reference does not compute the same function there, so they are no measure of noise.
        Taken from the smallest up, since they may be in the majority; what moved nothing does not
        count, what moved less than 1 ULP counts as 1 ULP, and at least two must be below.
        """
        found, below = [], []
        for name, value in sorted(self.variants.items(), key=lambda item: item[1]):
            far = len(below) > 1 and value / _UNLIKE > np.median(below)
            if far or value == NO_LAW["nan"]:
                found.append(name)
            elif value > 0:
                below.append(max(value, self.ulp))
        return tuple(found)

    @property
    def unit(self) -> float:
        """max(level, 1 ULP): what differences are quoted against."""
        return max(self.level, self.ulp)

    @property
    def rate(self) -> float:
        """1 / (m + 1), m distinct variants: how often one more of their kind passes by chance."""
        return 1 / (self.n_distinct + 1)

    @property
    def deterministic(self) -> bool:
        """No variant moved anything: a floor of zero, so the ULP is the unit."""
        return self.level == 0

    def to_frame(self) -> pd.DataFrame:
        """Columns variant, role ("floor" or "A/A"), max_logit_rms, max_logit_peak (NaN where it was
        not measured), multiples_of_unit."""
        rows = [(name, "floor", value) for name, value in self.variants.items()]
        if self.self_difference is not None:
            rows.append(("unchanged", "A/A", self.self_difference))
        frame = pd.DataFrame(rows, columns=["variant", "role", "max_logit_rms"])
        frame["max_logit_peak"] = frame["variant"].map(self.peaks).astype(float)
        return frame.assign(multiples_of_unit=frame["max_logit_rms"] / self.unit)

    def __str__(self) -> str:
        found = "deterministic here" if self.deterministic else f"logit RMS up to {self.level:.3g}"
        again = "not run" if self.self_difference is None else f"{self.self_difference:.3g}"
        return (
            f"noise floor: {found} over {len(self.variants)} harmless variants, "
            f"{self.n_distinct} of them distinct (rate "
            f"{self.rate:.3g}), A/A {again}, 1 ULP {self.ulp:.3g} in {self.dtype}, "
            f"unit {self.unit:.3g}"
        )


def noise_floor(
    variants: Mapping[str, np.ndarray],
    *,
    top_logits: np.ndarray | float,
    dtype: str | torch.dtype,
    self_rms: np.ndarray | None = None,
) -> NoiseFloor:
    """Floor from the centred RMS of harmless variants: max over variants of max over positions.

    Parameters
    ----------
    variants : mapping of name -> array [positions]
        `centred_rms` of the reference against each variant. None of them may also be judged.
    top_logits : array [positions] or float
        The reference's largest logit at each position.
    dtype : compute dtype, whose rounding step is 1 ULP.
    self_rms : array [positions], optional
        The same for two unchanged runs (A/A).

    Raises
    ------
    ValueError
        When there is no variant, or one is empty or holds NaN or inf (with its position).

    Examples
    --------
    >>> floor = noise_floor({"batch 8": [1e-5, 3e-5]}, top_logits=3.0, dtype="float32")
    >>> floor.level, floor.rate, floor.ulp == 2 ** -22
    (3e-05, 0.5, True)
    """
    if not variants:
        raise ValueError("`variants` must hold at least one harmless variant; got none")
    named = {name: _finite(f"variants[{name!r}]", rms) for name, rms in variants.items()}
    again = None if self_rms is None else _finite("self_rms", self_rms)
    return NoiseFloor(
        level=largest([largest(rms) for rms in named.values()]),
        variants={name: largest(rms) for name, rms in named.items()},
        self_difference=None if again is None else largest(again),
        ulp=largest(ulp_of(_finite("top_logits", np.atleast_1d(top_logits)), dtype)),
        dtype=str(_dtype(dtype)).removeprefix("torch."),
        n_positions=min(len(rms) for rms in named.values()),
        n_distinct=len({rms.tobytes() for rms in named.values()}),
    )


def centred_rms(reference_logits: torch.Tensor, candidate_logits: torch.Tensor) -> np.ndarray:
    """RMS over the vocabulary of d − mean(d), d = candidate − reference logits.

    A constant added to all logits changes no law, hence the centring. Tokens that are −inf on
    both sides are left out; one that is −inf on one side gives inf; NaN or +inf gives NaN.

    Parameters
    ----------
    reference_logits, candidate_logits : [positions, vocab_size], logits

    Returns
    -------
    array [positions], float64, in the unit of the logits

    Examples
    --------
    >>> centred_rms(torch.zeros(1, 2), torch.tensor([[5.0, 7.0]])).tolist()
    [1.0]
    """
    x, y = torch.as_tensor(reference_logits), torch.as_tensor(candidate_logits)
    if x.ndim != 2 or x.shape != y.shape:
        raise ValueError(
            "`reference_logits` and `candidate_logits` must both be [positions, vocab_size]; "
            f"got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    rows = max(1, _CHUNK // max(1, x.shape[1]))
    pieces = [
        _centred_rms(a.double(), b.to(a.device).double())
        for a, b in zip(x.split(rows), y.split(rows), strict=True)
    ]
    return torch.cat(pieces).cpu().numpy() if len(x) else np.empty(0)


def centred_peak(reference_logits: torch.Tensor, candidate_logits: torch.Tensor) -> np.ndarray:
    """Largest |d − mean(d)| over the vocabulary, of the same d as in `centred_rms`.

    An RMS over 49,152 tokens hides one that moved; this does not.

    Parameters
    ----------
    reference_logits, candidate_logits : [positions, vocab_size], logits

    Returns
    -------
    array [positions], float64, in the unit of the logits

    Examples
    --------
    >>> centred_peak(torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, 4.0]])).tolist()
    [3.0]
    """
    x, y = torch.as_tensor(reference_logits), torch.as_tensor(candidate_logits)
    rows = max(1, _CHUNK // max(1, x.shape[1]))
    pieces = [
        _centred(a.double(), b.to(a.device).double())[0].abs().amax(-1)
        for a, b in zip(x.split(rows), y.split(rows), strict=True)
    ]
    return torch.cat(pieces).cpu().numpy() if len(x) else np.empty(0)


def _centred_rms(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    centred, n = _centred(x, y)
    return (centred.square().sum(-1) / n).sqrt()


def _centred(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d − mean(d) [rows, vocab_size] and the tokens counted; rows of inf or NaN as documented."""
    d = y - x
    masked = torch.isneginf(x) & torch.isneginf(y)
    n = (~masked).sum(-1)
    d = torch.where(masked, 0.0, d)
    centred = torch.where(masked, 0.0, d - (d.sum(-1) / n)[:, None])
    one_sided = (torch.isneginf(x) ^ torch.isneginf(y)).any(-1)
    undefined = (torch.isnan(x) | torch.isnan(y) | torch.isposinf(x) | torch.isposinf(y)).any(-1)
    centred = torch.where(one_sided[:, None], torch.inf, centred)
    return torch.where((undefined | (n == 0))[:, None], torch.nan, centred), n


def ulp_of(x: np.ndarray | float, dtype: str | torch.dtype) -> np.ndarray:
    """Rounding step of `dtype` at |x|: eps · 2^floor(log2 |x|), at least the smallest subnormal.

    Parameters
    ----------
    x : values, any shape; rounded to nothing first, so a value just under a power of two
        keeps the smaller step.
    dtype : torch dtype or its name, such as "bfloat16".

    Returns
    -------
    float64 array of x's shape; NaN where x is not finite

    Examples
    --------
    >>> float(ulp_of(2.5, "bfloat16")), float(ulp_of(1.0, "float32")) == 2 ** -23
    (0.015625, True)
    """
    info = torch.finfo(_dtype(dtype))
    x = np.abs(np.asarray(x, dtype=np.float64))
    exponent = np.frexp(np.where(np.isfinite(x), np.maximum(x, info.smallest_normal), 1.0))[1] - 1
    return np.where(np.isfinite(x), np.ldexp(info.eps, exponent), np.nan)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"`dtype` must name a torch floating dtype; got {dtype!r}")
    return found


def _finite(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if values.size == 0 or bad.size:
        found = f"{values[bad[0]]} at position {bad[0]}" if bad.size else "no positions"
        raise ValueError(f"`{name}` must be finite at one or more positions; got {found}")
    return values
