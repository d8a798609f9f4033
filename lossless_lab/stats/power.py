"""What a test of a sampler's law could have seen: the smallest TV at n draws, the n for a TV."""

from __future__ import annotations

import math

from scipy import optimize, stats


def check_fractions(**named: float) -> None:
    """Refuses, by its name, what is not above 0 and below 1.

    >>> check_fractions(alpha=0.05)
    """
    for name, value in named.items():
        if not 0 < value < 1:
            raise ValueError(f"`{name}` must be above 0 and below 1; got {value}")


def smallest_tv_detectable(
    n: int, *, n_tokens: int, alpha: float = 0.05, power: float = 0.8
) -> float:
    """√(δ/4n): TV that the chi-square test of a law of `n_tokens` finds with that power.

    δ is the non-centrality where χ²(n_tokens − 1) passes its critical value with probability
    `power`; a bias in proportion to every token's share has n·Σ(p − q)²/q = 4n TV², and no other
    bias of that TV has less.

    Parameters
    ----------
    n : draws.
    n_tokens : cells, after pooling.

    Returns
    -------
    NaN where not even a TV of 1 is found.

    Raises
    ------
    ValueError
        When n < 1, n_tokens < 2, or not 0 < alpha < power < 1.

    Notes
    -----
    Source: Cohen 1988, chapter 7; equal to statsmodels' GofChisquarePower with effect size 2 TV.

    >>> round(smallest_tv_detectable(10_000, n_tokens=16), 4)
    0.0217
    """
    _check_draws(n)
    return _possible(math.sqrt(_noncentrality(n_tokens, alpha, power) / (4 * n)))


def n_for_tv(tv: float, *, n_tokens: int, alpha: float = 0.05, power: float = 0.8) -> int:
    """⌈δ / 4 TV²⌉: draws with which `smallest_tv_detectable` is `tv`.

    >>> n_for_tv(0.01, n_tokens=16)
    47028
    """
    check_fractions(tv=tv)
    return math.ceil(_noncentrality(n_tokens, alpha, power) / (4 * tv**2))


def smallest_share_change(
    n: int, share: float, *, n_tests: int = 1, alpha: float = 0.05, power: float = 0.8
) -> float:
    """(z(α / 2 n_tests) + z(1 − power))·√(share(1 − share)/n): of one token, two-sided, by Holm.

    Parameters
    ----------
    n_tests : tokens that are tested with it.

    >>> round(smallest_share_change(10_000, 0.05, n_tests=16), 5)
    0.00827
    """
    if not n_tests >= 1:
        raise ValueError(f"`n_tests` must be at least 1; got {n_tests}")
    return _normal_limit(n, share, alpha, power, 2 * n_tests)


def neyman_pearson_limit(
    n: int, *, share: float = 0.5, alpha: float = 0.05, power: float = 0.8
) -> float:
    """(z(α) + z(1 − power))·√(share(1 − share)/n): no test can find a smaller TV.

    The most powerful test is told the bias: tokens of that `share` in all gain what the others
    lose in proportion; ½ for a bias in proportion to every token's share.

    Notes
    -----
    Source: Neyman and Pearson 1933, for n so large that the likelihood ratio is normal.

    >>> round(neyman_pearson_limit(10_000), 4), round(neyman_pearson_limit(10_000, share=0.05), 4)
    (0.0124, 0.0054)
    """
    return _normal_limit(n, share, alpha, power, 1)


def _normal_limit(n: int, share: float, alpha: float, power: float, n_tails: int) -> float:
    _check_draws(n)
    _check_power(alpha, power)
    check_fractions(share=share)
    z = stats.norm.isf(alpha / n_tails) + stats.norm.isf(1 - power)
    return _possible(float(z * math.sqrt(share * (1 - share) / n)))


def _possible(tv: float) -> float:
    return tv if tv <= 1 else math.nan


def _check_draws(n: int) -> None:
    if not n >= 1:
        raise ValueError(f"`n` must be at least 1; got {n}")


def _check_power(alpha: float, power: float) -> None:
    check_fractions(alpha=alpha, power=power)
    if alpha >= power:
        raise ValueError(f"`power` must be above `alpha` ({alpha}); got {power}")


def _noncentrality(n_tokens: int, alpha: float, power: float) -> float:
    _check_power(alpha, power)
    if n_tokens < 2:
        raise ValueError(f"`n_tokens` must be at least 2; got {n_tokens}")
    df = n_tokens - 1
    critical = stats.chi2.isf(alpha, df)
    high = critical + 100 + 40 * math.sqrt(df)
    return optimize.brentq(lambda nc: stats.ncx2.sf(critical, df, nc) - power, 1e-9, high)
