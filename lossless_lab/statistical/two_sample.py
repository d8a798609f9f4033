"""Do two samples follow one law, whatever it is? Of tokens by counts, of sequences by MMD."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse, stats

from .goodness_of_fit import FitTest, check_resamples, checked_pair, pool

_CELLS = 1 << 21  # permuted counts at a time


def chi_square_two_samples(counts_x: ArrayLike, counts_y: ArrayLike) -> FitTest:
    """Chi-square of the 2 × vocabulary table; tokens expected less than 5 times as one.

    Parameters
    ----------
    counts_x, counts_y : same shape, draws of each token.

    Notes
    -----
    Source: scipy.stats.chi2_contingency, without Yates' correction.

    >>> fit = chi_square_two_samples([30, 10], [20, 20])
    >>> round(fit.statistic, 4), round(fit.pvalue, 4)
    (5.3333, 0.0209)
    """
    table = np.stack(checked_pair(counts_x, counts_y))
    table = table[:, table.any(0)]
    rarer = table.sum(0) * (min(table.sum(1)) / max(table.sum(), 1))
    pooled, _, n_pooled = pool(table, rarer)
    statistic, pvalue = 0.0, np.nan
    if pooled.shape[1] > 1 and pooled.sum(1).all():
        found = stats.chi2_contingency(pooled, correction=False)
        statistic, pvalue = float(found.statistic), max(found.pvalue, np.finfo(float).tiny)
    return FitTest(
        test="chi-square of two samples",
        statistic=statistic,
        pvalue=float(pvalue),
        n=int(table.sum()),
        n_pooled=n_pooled,
    )


def mmd_test(
    x: ArrayLike, y: ArrayLike, *, n_resamples: int = 999, rng: np.random.Generator
) -> FitTest:
    """mean k(x, x′) − 2 mean k(x, y) + mean k(y, y′), k the share of equal tokens; by permutation.

    Summed over pairs, k is Σ a·b over (position, token) of how often each sample has it there.
    So all permutations need one sparse product of counts, and no pair of sequences is looked at.

    Parameters
    ----------
    x, y : [n_x, n_tokens], [n_y, n_tokens], token ids; pad short ones with an id of its own (−1).

    Raises
    ------
    ValueError
        When they are not two tables of one width, or hold fewer than two sequences, or
        `n_resamples` is not a whole number of at least 1.

    Notes
    -----
    Source: Gretton et al. 2012; statistic of model-equality-testing 0.0.2 (Gao et al. 2024), whose
    p-value k/n can be 0.

    >>> x, y = [[1, 2]] * 4, [[1, 3]] * 4
    >>> mmd_test(x, y, n_resamples=99, rng=np.random.default_rng(0)).statistic
    1.0
    """
    x, y = np.asarray(x), np.asarray(y)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(
            f"`x` and `y` must be [sequences, n_tokens] with one width and two sequences or more; "
            f"got {x.shape} and {y.shape}"
        )
    check_resamples(n_resamples)
    tokens, n, m = np.concatenate([x, y]), len(x), len(y)
    _, ids = np.unique(tokens, return_inverse=True)
    ids = ids.reshape(tokens.shape) * tokens.shape[1] + np.arange(tokens.shape[1])
    _, cells = np.unique(ids, return_inverse=True)
    rows = np.repeat(np.arange(n + m), tokens.shape[1])
    has = sparse.csr_array((np.ones(len(rows), np.float32), (cells.ravel(), rows)))
    total = has.sum(1)

    def statistic(of_x: np.ndarray) -> np.ndarray:
        """For columns of 0 and 1 [n + m, permutations], which sequences are in x."""
        a = (has @ of_x).astype(np.float64)
        aa = np.einsum("cp,cp->p", a, a)
        ac = total @ a
        ab, bb = ac - aa, total @ total - 2 * ac + aa
        n_tokens = tokens.shape[1]
        within = (aa / n_tokens - n) / (n * (n - 1)) + (bb / n_tokens - m) / (m * (m - 1))
        return within - 2 * ab / (n_tokens * n * m)

    chunk = max(1, _CELLS // has.shape[0])
    first = (np.arange(n + m) < n).astype(np.float32)[:, None]
    observed = float(statistic(first)[0])
    k = 0
    for start in range(0, n_resamples, chunk):
        size = min(chunk, n_resamples - start)
        k += int((statistic(rng.permuted(np.repeat(first.T, size, 0), axis=1).T) >= observed).sum())
    pvalue, least = (1 + k) / (1 + n_resamples), 1 / (1 + n_resamples)
    return FitTest(test="MMD", statistic=observed, pvalue=pvalue, n=n + m, least=least)
