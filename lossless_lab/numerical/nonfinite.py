"""NaN and infinities: counted and located on both sides, before anything is averaged."""

from dataclasses import dataclass

import numpy as np
import torch

from ..results import Result

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonfinite(Result):
    """Where two tensors of one shape are not finite.

    Parameters
    ----------
    reference, candidate : dict
        Counts by kind: "nan", "+inf", "-inf".
    only_reference, only_candidate : int
        Elements that are not finite (or another kind of not finite) on one side alone.
    first : tuple of int or None
        Index of the first element that differs in kind; None when there is none.
    size : int
        Elements per side.
    """

    reference: dict[str, int]
    candidate: dict[str, int]
    only_reference: int
    only_candidate: int
    first: Index | None
    size: int

    @property
    def total(self) -> int:
        """Elements that are not finite, both sides together."""
        return sum(self.reference.values()) + sum(self.candidate.values())

    @property
    def summary(self) -> str:
        """ "none", "same positions on both sides", or the sides that stand alone."""
        if not self.total:
            return "none"
        if self.first is None:
            return "same positions on both sides"
        alone = {"reference": self.only_reference, "candidate": self.only_candidate}
        return "only " + " and ".join(side for side, n in alone.items() if n)

    def __str__(self) -> str:
        if not self.total:
            return f"all {self.size} elements finite on both sides"
        place = "" if self.first is None else f", first at {self.first}"
        sides = f"reference {_counts(self.reference)}, candidate {_counts(self.candidate)}"
        return f"non-finite: {self.summary}{place} ({sides}; {self.size} elements)"


def count_nonfinite(reference: torch.Tensor, candidate: torch.Tensor) -> Nonfinite:
    """Count NaN, +inf and -inf of each side, and find the first place where the kinds differ.

    Parameters
    ----------
    reference, candidate : tensors or arrays of one shape, any unit.

    Raises
    ------
    ValueError
        When the shapes differ.

    Examples
    --------
    >>> print(count_nonfinite(torch.tensor([1., float("nan")]), torch.tensor([1., 2.])))
    non-finite: only reference, first at (1,) (reference 1 nan, candidate none; 2 elements)
    """
    x, y = torch.as_tensor(reference), torch.as_tensor(candidate)
    if x.shape != y.shape:
        raise ValueError(
            f"`candidate` must have the shape of `reference`, {tuple(x.shape)}; "
            f"got {tuple(y.shape)}"
        )
    x, y = (z.bfloat16() if z.is_floating_point() and z.itemsize == 1 else z for z in (x, y))
    if torch.isfinite(x).all() and torch.isfinite(y).all():
        return Nonfinite(
            reference={}, candidate={}, only_reference=0, only_candidate=0, first=None,
            size=x.numel(),
        )  # fmt: skip
    kind_x, kind_y = _kind(x), _kind(y.to(x.device))
    differs = kind_x != kind_y
    places = differs.nonzero()
    return Nonfinite(
        reference=_by_kind(kind_x),
        candidate=_by_kind(kind_y),
        only_reference=int((differs & (kind_x > 0)).sum()),
        only_candidate=int((differs & (kind_y > 0)).sum()),
        first=tuple(places[0].tolist()) if len(places) else None,
        size=x.numel(),
    )


def largest(values: np.ndarray | list[float]) -> float:
    """max, or NaN when any value is NaN wherever it stands; raises on no values.

    Examples
    --------
    >>> max([0.1, float("nan")]), largest([0.1, float("nan")]), largest([float("nan"), 0.1])
    (0.1, nan, nan)
    """
    return float(np.max(np.asarray(values, dtype=np.float64)))


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """One shape and dtype, and the same bits but for kinds of NaN."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    equal = ((x == y) & (x.signbit() == y.signbit())) | ((x != x) & (y != y))
    return bool(equal.all())


_KINDS = ("nan", "+inf", "-inf")


def _kind(x: torch.Tensor) -> torch.Tensor:
    """0 finite, else 1 + index into _KINDS."""
    return torch.isnan(x) * 1 + torch.isposinf(x) * 2 + torch.isneginf(x) * 3


def _by_kind(kind: torch.Tensor) -> dict[str, int]:
    counts = torch.bincount(kind.flatten(), minlength=4)[1:].tolist()
    return {name: n for name, n in zip(_KINDS, counts, strict=True) if n}


def _counts(by_kind: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in by_kind.items()) or "none"
