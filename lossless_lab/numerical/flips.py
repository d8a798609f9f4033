"""Token flips: how likely the baseline's own noise makes one, and how soon a first one is due."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats

from ..results import Result

_WEIGHT = 2  # of the noise of all positions, in variants


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlipRisk(Result):
    """Risk that harmless re-orderings alone flip a greedy token, position by position.

    Parameters
    ----------
    frame : DataFrame
        One row per position: prompt_id, position, margin (top-2 logit difference of the
        reference), noise (RMS change of that difference over the variants, there), tie (margin
        exactly 0), flip_probability.
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

    def prompts_differing(self, *, confidence: float = 0.95) -> tuple[float, float, float]:
        """Prompts that noise alone makes differ by their end: expected number, and its band."""
        risks = self.frame["flip_probability"].groupby(self.frame["prompt_id"], sort=False)
        count = stats.poisson_binom(risks.agg(lambda p: 1 - np.prod(1 - p)).to_numpy())
        tail = (1 - confidence) / 2
        return float(count.mean()), float(count.ppf(tail)), float(count.ppf(1 - tail))

    def at(self, places: pd.DataFrame) -> pd.DataFrame:
        """The rows of `frame` at given places: columns prompt_id and position."""
        return places.merge(self.frame, on=["prompt_id", "position"])

    def survival(
        self, *, confidence: float = 0.95, parted: Mapping[str, int] | None = None
    ) -> pd.DataFrame:
        """Share of prompts expected to be still equal after each token, with its band.

        Prompts are independent: S(t) is the mean over prompts of Π (1 − p), and the band holds the
        number of survivors, a sum of independent Bernoulli variables with those probabilities.

        Parameters
        ----------
        parted : prompt id -> position of its first divergence, for those that had one.

        Returns
        -------
        DataFrame
            n_tokens, n_prompts (that are so long), expected_share, low, high (shares), and
            observed_share where `parted` is given.
        """
        curves = {
            name: np.cumprod(1 - group["flip_probability"].to_numpy())
            for name, group in self.frame.groupby("prompt_id", sort=False)
        }
        rows = []
        for t in range(max(map(len, curves.values()))):
            names = [name for name, s in curves.items() if len(s) > t]
            alive = np.array([curves[name][t] for name in names])
            count = stats.poisson_binom(alive)
            tail = (1 - confidence) / 2
            limits = count.ppf(tail) / len(alive), count.ppf(1 - tail) / len(alive)
            row = [t + 1, len(alive), float(alive.mean()), *map(float, limits)]
            if parted is not None:
                row.append(float(np.mean([parted.get(name, np.inf) > t for name in names])))
            rows.append(row)
        columns = ["n_tokens", "n_prompts", "expected_share", "low", "high", "observed_share"]
        return pd.DataFrame(rows, columns=columns[: len(rows[0])])

    def __str__(self) -> str:
        risk = self.frame["flip_probability"]
        return (
            f"{len(self.frame)} positions: flip probability {risk.mean():.3g} on average (largest "
            f"{risk.max():.3g}), exact ties at {self.tie_share:.1%}, first flip expected after "
            f"{self.expected_tokens:.3g} tokens ({self.n_variants} variants)"
        )


class TopTwo(NamedTuple):
    """The greedy token and its best rival, per position.

    Parameters
    ----------
    ids : [positions, 2] int64; the first is the argmax, the lowest id at a tie
    margin : [positions] float64, difference of their logits; 0 at an exact tie
    """

    ids: np.ndarray
    margin: np.ndarray

    def change(self, logits: torch.Tensor) -> np.ndarray:
        """What another run adds to the margin: (l[first] − l[second]) − margin, [positions]."""
        ids = torch.as_tensor(self.ids, device=logits.device)
        both = logits.gather(-1, ids).double().cpu().numpy()
        return both[:, 0] - both[:, 1] - self.margin

    def flipped(self, change: np.ndarray) -> np.ndarray:
        """Whether the rival wins after `change`; at a tie the lower id does, as argmax has it."""
        return (change < -self.margin) | ((change == -self.margin) & self._rival_wins_ties)

    @property
    def _rival_wins_ties(self) -> np.ndarray:
        return self.ids[:, 1] < self.ids[:, 0]


def top_two(logits: torch.Tensor) -> TopTwo:
    """The two largest logits of each position.

    Parameters
    ----------
    logits : [positions, vocab_size]

    Examples
    --------
    >>> found = top_two(torch.tensor([[1.0, 4.0, 3.5]]))
    >>> found.ids.tolist(), found.margin.tolist()
    ([[1, 2]], [0.5])
    >>> found.change(torch.tensor([[1.0, 3.9, 3.6]])).round(3).tolist()
    [-0.2]
    """
    logits = logits.detach()
    values, ids = logits.topk(2, dim=-1)
    first = logits.argmax(-1, keepdim=True)
    second = torch.where(ids[:, :1] == first, ids[:, 1:], ids[:, :1])
    values = values.double().cpu().numpy()
    return TopTwo(torch.cat([first, second], 1).cpu().numpy(), values[:, 0] - values[:, 1])


def flip_risk(
    reference: Mapping[str, TopTwo], changes: Sequence[Mapping[str, np.ndarray]]
) -> FlipRisk:
    """P(flip) = (k + 2 p) / (n + 2): k of n harmless variants flip there, p = P(noise < −margin).

    Positions differ in how much noise they have, and the reference's own rounding has part in the
    margin; so the variants that flip at a position are counted there. The noise of all positions
    together tells what so few variants cannot: it counts as two more. It is the empirical one, its
    tails heavier than those of a Gaussian of the same variance, which would promise too few flips.
    A change that makes an exact tie is a flip where the rival has the lower id.

    Parameters
    ----------
    reference : prompt id -> the reference's two best tokens
    changes : one mapping per harmless variant, prompt id -> [positions], from `TopTwo.change`;
        none of them may be the candidate that is judged.

    Raises
    ------
    ValueError
        For no variants, unequal lengths, or values that are not finite.

    Examples
    --------
    One of one variant flips the first token; half of all changes pass its margin: (1 + 2/2) / 3.

    >>> reference = {"p": TopTwo(np.array([[1, 2], [1, 2]]), np.array([0.5, 9.0]))}
    >>> risk = flip_risk(reference, [{"p": np.array([-1.0, 0.0])}])
    >>> risk.frame["flip_probability"].round(3).tolist()
    [0.667, 0.0]
    """
    if not changes:
        raise ValueError("`changes` must hold at least one harmless variant; got none")
    moved = np.stack([_checked(reference, given) for given in changes])
    noise, n, frames, start = np.sort(moved, axis=None), len(moved), [], 0
    for prompt_id, top in reference.items():
        here = moved[:, start : (start := start + len(top.margin))]
        below = np.searchsorted(noise, -top.margin, side="left")
        upto = np.searchsorted(noise, -top.margin, side="right")
        anywhere = np.where(top._rival_wins_ties, upto, below) / len(noise)
        flips = top.flipped(here).sum(0)
        frames.append(
            pd.DataFrame(
                {
                    "prompt_id": prompt_id,
                    "position": range(len(flips)),
                    "margin": top.margin,
                    "noise": np.sqrt(np.mean(here**2, axis=0)),
                    "tie": top.margin == 0,
                    "flip_probability": (flips + _WEIGHT * anywhere) / (n + _WEIGHT),
                }
            )
        )
    frame = pd.concat(frames, ignore_index=True)
    return FlipRisk(frame=frame, noise=noise, n_variants=n)


def _checked(reference: Mapping[str, TopTwo], given: Mapping[str, np.ndarray]) -> np.ndarray:
    for prompt_id, top in reference.items():
        if prompt_id not in given or len(given[prompt_id]) != len(top.margin):
            raise ValueError(
                f"`changes` must hold {len(top.margin)} positions of prompt {prompt_id!r}; got "
                f"{len(given.get(prompt_id, ()))}"
            )
    values = np.concatenate([np.asarray(given[name], dtype=float) for name in reference])
    if not np.isfinite(values).all():
        raise ValueError(f"`changes` must be finite; {int((~np.isfinite(values)).sum())} are not")
    return values
