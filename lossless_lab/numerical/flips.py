"""Token flips: how likely the baseline's own noise makes one, and how soon a first one is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy import stats

from ..results import Result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlipRisk(Result):
    """Risk that harmless re-orderings alone flip a greedy token, position by position.

    Parameters
    ----------
    frame : DataFrame
        One row per position: prompt_id, position, margin (top-2 logit difference of the
        reference), tie (margin exactly 0), flip_probability.
    noise : array [n_variants · positions]
        Changes of the top-2 difference that the variants showed, in logits.
    n_variants : int
    """

    frame: pd.DataFrame
    noise: np.ndarray
    n_variants: int

    @property
    def tie_share(self) -> float:
        """Share of positions whose two best tokens have exactly equal logits."""
        return float(self.frame["tie"].mean())

    @property
    def expected_tokens(self) -> float:
        """Tokens to the first flip at the mean rate, 1 / mean probability."""
        mean = float(self.frame["flip_probability"].mean())
        return 1 / mean if mean else np.inf

    def survival(self, *, confidence: float = 0.95) -> pd.DataFrame:
        """Share of prompts expected to be still equal after each token, with its band.

        Prompts are independent: S(t) is the mean over prompts of Π (1 − p), and the band holds the
        number of survivors, a sum of independent Bernoulli variables with those probabilities.

        Returns
        -------
        DataFrame
            n_tokens, n_prompts (that are so long), expected_share, low, high (shares).
        """
        columns = {
            name: np.cumprod(1 - group["flip_probability"].to_numpy())
            for name, group in self.frame.groupby("prompt_id", sort=False)
        }
        rows = []
        for t in range(max(map(len, columns.values()))):
            alive = np.array([s[t] for s in columns.values() if len(s) > t])
            count = stats.poisson_binom(alive)
            tail = (1 - confidence) / 2
            limits = count.ppf(tail) / len(alive), count.ppf(1 - tail) / len(alive)
            rows.append((t + 1, len(alive), float(alive.mean()), *map(float, limits)))
        return pd.DataFrame(
            rows, columns=["n_tokens", "n_prompts", "expected_share", "low", "high"]
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per position."""
        return self.frame

    def __str__(self) -> str:
        risk = self.frame["flip_probability"]
        return (
            f"{len(self.frame)} positions: flip probability {risk.mean():.3g} on average (largest "
            f"{risk.max():.3g}), exact ties at {self.tie_share:.1%}, first flip expected after "
            f"{self.expected_tokens:.3g} tokens ({self.n_variants} variants)"
        )


def top_two(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the two largest logits and their difference, per position.

    Parameters
    ----------
    logits : [positions, vocab_size]

    Returns
    -------
    ids [positions, 2] int64; margin [positions] float64, in logits, 0 at an exact tie

    Examples
    --------
    >>> ids, margin = top_two(torch.tensor([[1.0, 4.0, 3.5]]))
    >>> ids.tolist(), margin.tolist()
    ([[1, 2]], [0.5])
    """
    values, ids = logits.topk(2, dim=-1)
    return ids, (values[:, 0].double() - values[:, 1].double())


def top_two_change(
    ids: torch.Tensor, margin: torch.Tensor, variant_logits: torch.Tensor
) -> np.ndarray:
    """Change of the top-2 difference in a variant: (l[first] − l[second]) − margin.

    Parameters
    ----------
    ids, margin : of the reference, as from `top_two`
    variant_logits : [positions, vocab_size] along the same ids

    Examples
    --------
    >>> ids, margin = top_two(torch.tensor([[1.0, 4.0, 3.5]]))
    >>> top_two_change(ids, margin, torch.tensor([[1.0, 3.9, 3.6]])).round(3).tolist()
    [-0.2]
    """
    both = variant_logits.gather(-1, ids.to(variant_logits.device)).double().cpu()
    return (both[:, 0] - both[:, 1] - margin.cpu()).numpy()


def flip_risk(
    margins: Mapping[str, np.ndarray], changes: Sequence[Mapping[str, np.ndarray]]
) -> FlipRisk:
    """P(flip) = P(noise < −margin) + ½ P(noise = −margin), over all changes that variants showed.

    The noise is the empirical one, pooled over positions: its tails are heavier than a Gaussian's
    of the same variance, which would promise too few flips. A change that makes an exact tie is
    counted half, since the order of ids decides there. At an exact tie of the reference itself
    the same rule holds.

    Parameters
    ----------
    margins : prompt id -> [positions], the reference's top-2 differences, in logits
    changes : one mapping per harmless variant, prompt id -> [positions], from `top_two_change`;
        none of them may be the candidate that is judged.

    Raises
    ------
    ValueError
        For no variants, unequal lengths, or values that are not finite.

    Examples
    --------
    >>> risk = flip_risk({"p": np.array([0.5, 9.0])}, [{"p": np.array([-1.0, 0.0])}])
    >>> risk.frame["flip_probability"].tolist()
    [0.5, 0.0]
    """
    if not changes:
        raise ValueError("`changes` must hold at least one harmless variant; got none")
    noise = np.concatenate([_checked(margins, given) for given in changes])
    sorted_noise = np.sort(noise)
    rows = []
    for prompt_id, margin in margins.items():
        below = np.searchsorted(sorted_noise, -margin, side="left")
        upto = np.searchsorted(sorted_noise, -margin, side="right")
        probability = (below + upto) / (2 * len(noise))
        for position, values in enumerate(zip(margin, probability, strict=True)):
            rows.append((prompt_id, position, float(values[0]), float(values[1])))
    frame = pd.DataFrame(rows, columns=["prompt_id", "position", "margin", "flip_probability"])
    frame.insert(3, "tie", frame["margin"] == 0)
    return FlipRisk(frame=frame, noise=noise, n_variants=len(changes))


def _checked(margins: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]) -> np.ndarray:
    for prompt_id, margin in margins.items():
        if prompt_id not in given or len(given[prompt_id]) != len(margin):
            raise ValueError(
                f"`changes` must hold {len(margin)} positions of prompt {prompt_id!r}; got "
                f"{len(given.get(prompt_id, ()))}"
            )
    values = np.concatenate([np.asarray(given[name], dtype=float) for name in margins])
    if not np.isfinite(values).all():
        raise ValueError(f"`changes` must be finite; {int((~np.isfinite(values)).sum())} are not")
    return values
