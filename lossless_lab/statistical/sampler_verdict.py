"""One judgement of a black-box sampler against the law that it should have."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pandas as pd
from numpy.typing import ArrayLike

from ..results import Result
from ..stats.multiplicity import holm, pvalue_text
from ..stats.power import check_fractions
from .equivalence import TVBound, preferred_sets_pvalue, tv_upper_bound
from .goodness_of_fit import chi_square_fit
from .token_shares import token_share_tests


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplerVerdict(Result):
    """One judgement of a sampler by its draws, against the law it should have.

    Parameters
    ----------
    word : EQUIVALENT, DIFFERENT or INCONCLUSIVE, by the limits of TV and the margin; DIFFERENT only
        if `rejected` too.
    margin : of TV.
    bound : the limits.
    pvalue : that the law is right, of the strongest of three tests, Holm over them: chi-square,
        single tokens, and the sets of tokens that the lower limit of TV is from.
    test : which one it was; and whether chi-square had no cells left, as where fewer than two are
        expected 5 times.
    n_impossible : draws of tokens that the law gives no probability; a finding by itself.
    worst_token : the token (flat index) whose share is the least likely, and its p-value by Holm.
    """

    word: str
    margin: float
    bound: TVBound
    pvalue: float
    test: str
    n_impossible: int
    worst_token: int
    worst_token_pvalue: float

    @property
    def n_needed(self) -> int:
        """Draws with which a perfect sampler is called EQUIVALENT about half the time."""
        return self.bound.n_needed(self.margin)

    @property
    def rejected(self) -> bool:
        """An impossible token, or a p-value below 1 − confidence: not the law, by however little.

        A sampler may be rejected and EQUIVALENT: surely different, by less than the margin.
        """
        return self.n_impossible > 0 or self.pvalue < 1 - self.bound.confidence

    def to_frame(self) -> pd.DataFrame:
        """One row, the limits as columns of their own."""
        row = {name: getattr(self, name) for name in self.__slots__ if name != "bound"}
        return pd.DataFrame([row | {"n_needed": self.n_needed}]).join(self.bound.to_frame())

    def __str__(self) -> str:
        impossible = f", {self.n_impossible} draws impossible" if self.n_impossible else ""
        needed = f"; {self.n_needed} draws needed" if self.word == "INCONCLUSIVE" else ""
        return (
            f"{self.word} within {self.margin:g}{needed}: {self.bound}, "
            f"{pvalue_text(self.pvalue)} by {self.test}{impossible}"
        )


def judge_sampler(
    counts: ArrayLike, law: ArrayLike, *, margin: float, confidence: float = 0.95
) -> SamplerVerdict:
    """Bound, tests and impossible tokens of a black-box sampler in one judgement.

    Parameters
    ----------
    counts : [vocab_size] or any shape (of several tokens jointly), draws of each.
    law : same shape, the right law, known exactly; sums to 1.
    margin : TV that is allowed.

    Raises
    ------
    ValueError
        When `law` is no law, the counts are not whole, not there, or of another shape, or margin
        is not in (0, 1) or confidence not in [0.5, 1).

    >>> judge_sampler([510, 490], [0.5, 0.5], margin=0.05).word
    'EQUIVALENT'
    >>> str(judge_sampler([6, 4], [0.5, 0.5], margin=0.05))[:47]
    'INCONCLUSIVE within 0.05; 618 draws needed: TV '
    """
    check_fractions(margin=margin)
    bound = tv_upper_bound(counts, law, confidence=confidence)
    fit, shares = chi_square_fit(counts, law), token_share_tests(counts, law)
    tests = {"chi-square": fit.pvalue, "single tokens": shares.pvalue}
    tests["sets of tokens"] = preferred_sets_pvalue(counts, law)
    missing = "; no cells left for chi-square" if math.isnan(tests["chi-square"]) else ""
    tests = {test: p for test, p in tests.items() if not math.isnan(p)}
    verdict = SamplerVerdict(
        word=bound.word(margin),
        margin=margin,
        bound=bound,
        pvalue=float(holm([*tests.values()]).min()),
        test=min(tests, key=tests.get) + missing,
        n_impossible=fit.n_impossible,
        worst_token=int(shares.pvalues.argmin()),
        worst_token_pvalue=shares.pvalue,
    )
    unsure = verdict.word == "DIFFERENT" and not verdict.rejected
    return replace(verdict, word="INCONCLUSIVE") if unsure else verdict
