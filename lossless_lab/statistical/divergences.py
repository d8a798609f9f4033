"""How far apart two models' next-token laws are, position by position, from their raw logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..results import Result
from .distances import LOGITS, LOGPROBS, MEASURES, MORE, distances, likeliest
from .laws import (
    Law,
    chunks,
    from_logits,
    from_probs,
    js_divergence,
    kl_divergence,
    paired,
    positive,
    total_variation,
    why_undefined,
    wide,
)
from .one_position import distribution

__all__ = [
    "MEASURES", "TOP_K", "Divergences", "Law", "by_prompt", "distribution", "divergences",
    "from_logits", "from_probs", "js_divergence", "kl_divergence", "total_variation",
]  # fmt: skip
TOP_K = 10  # of the overlap of both sides' likeliest tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divergences(Result):
    """Distances at each position of one prompt, and what kept any of them from being a number.

    Parameters
    ----------
    frame : DataFrame
        One row per position; the columns are listed under `divergences`.
    vocab_size : int
    temperature : float
        Temperature of the laws; margins and logit_rms are of the raw logits.
    undefined : tuple of (position, side, reason)
        Logits that define no law ("n NaN", "n +inf", "all -inf"). Their distances are NaN.
    infinite : tuple of (position, direction, token_id)
        Where a KL is +inf, and the likeliest token that the second law cannot produce.
    """

    frame: pd.DataFrame
    vocab_size: int
    temperature: float
    undefined: tuple[tuple[int, str, str], ...]
    infinite: tuple[tuple[int, str, int], ...]

    def mean(self, measure: str) -> float:
        """Mean over positions of one column; NaN or inf if any position is, or there is none."""
        values = self.frame[measure].to_numpy(np.float64)
        return float(np.mean(values)) if len(values) else math.nan

    def to_frame(self) -> pd.DataFrame:
        """One row per position."""
        return self.frame

    def __str__(self) -> str:
        text = (
            f"{len(self.frame)} positions: mean KL(reference‖candidate) "
            f"{self.mean(MEASURES[0]):.3g} nats, mean TV {self.mean('total_variation'):.3g}, "
            f"top token differs at {int((~self.frame['top1_agree']).sum())}"
        )
        if self.undefined:
            position, side, reason = self.undefined[0]
            places = len({row[0] for row in self.undefined})
            text += f"; undefined at {places} positions, first {position} ({side}: {reason})"
        if self.infinite:
            position, direction, token = self.infinite[0]
            text += (
                f"; infinite {len(self.infinite)} times, first KL({direction}) at position "
                f"{position}: token {token} is unreachable"
            )
        return text


def divergences(
    reference_logits: torch.Tensor,
    candidate_logits: torch.Tensor,
    *,
    prompt_id: str = "",
    token_ids: Sequence[int] | None = None,
    correct_ids: Sequence[int] | None = None,
    temperature: float = 1.0,
) -> Divergences:
    """KL both ways, JS, TV, Hellinger of softmax(logits / temperature) at each position.

    In small chunks, precise to 1e-4 from float32 and below; formulas: `distances.distances`.
    Means over positions are per-token figures: a sequence of T tokens has TV up to T times that.

    Parameters
    ----------
    reference_logits, candidate_logits : [positions, vocab_size], raw logits
        −inf means impossible; on both sides such a token adds nothing.
    token_ids : [positions], optional
        The id that each row's law was for (or was followed by); a label.
    correct_ids : [positions], optional
        The id that did follow, within the vocabulary; adds reference_logprob and
        candidate_logprob of it, and is the token_id where none is given.
    temperature : > 0

    Returns
    -------
    Divergences
        with columns prompt_id, position, token_id, kl_reference_candidate_nats,
        kl_candidate_reference_nats, js_nats, total_variation, top1_agree, reference_top_id,
        candidate_top_id, hellinger, reference_entropy_nats, candidate_entropy_nats,
        top10_overlap (share of the reference's 10 likeliest that are the candidate's too),
        reference_margin (reference's top-2 logit difference), logit_rms and
        logit_peak (RMS and largest absolute value over the vocabulary of the centred logit
        difference). Ties go to `argmax`'s choice.

    Raises
    ------
    ValueError
        When shapes differ (vocabularies too), or temperature is not above 0.

    Examples
    --------
    >>> print(divergences(torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 2.0]])))
    1 positions: mean KL(reference‖candidate) 0.462 nats, mean TV 0.462, top token differs at 1
    """
    x, y = paired(reference_logits, candidate_logits)
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"`reference_logits` must be [positions, vocab_size]; got shape {tuple(x.shape)}"
        )
    for name, given in (("token_ids", token_ids), ("correct_ids", correct_ids)):
        if given is not None and len(given) != len(x):
            raise ValueError(f"`{name}` must hold one id per position, {len(x)}; got {len(given)}")
    t, correct = positive(temperature), _inside(correct_ids, x)
    token_ids = correct_ids if token_ids is None else token_ids
    given, pieces, room = list(chunks(x, y)) or [(0, x, y)], [], None
    for i, *sides in given:
        room = room or [torch.empty(sides[0].shape, device=x.device) for _ in range(6)]
        now = None if correct is None else correct[i : i + len(sides[0])]
        pieces.append(_measured(*sides, t, now, room))
    ids = [pd.NA] * len(x) if token_ids is None else [int(i) for i in token_ids]
    columns = {name: torch.cat([p[name] for p in pieces]).numpy() for name in pieces[0]}
    frame = pd.DataFrame(
        {
            "prompt_id": pd.Series([prompt_id] * len(x), dtype=object),
            "position": np.arange(len(x)),
            "token_id": pd.array(ids, dtype="Int64"),
            **columns,
        }
    )
    undefined = _undefined(x, y, frame)
    return Divergences(
        frame=frame,
        vocab_size=x.shape[1],
        temperature=t,
        undefined=undefined,
        infinite=_infinite(x, y, frame),
    )


def by_prompt(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean and largest of each distance by prompt or document; no NaN or inf is averaged away.

    Examples
    --------
    >>> frame = divergences(torch.zeros(2, 3), torch.zeros(2, 3), prompt_id="a").frame
    >>> by_prompt(frame)[["prompt_id", "n_positions", "mean_total_variation"]].values.tolist()
    [['a', 2, 0.0]]
    """
    rows = []
    by = "document" if "document" in frame else "prompt_id"
    for prompt_id, part in frame.groupby(by, sort=False):
        row: dict[str, Any] = {by: prompt_id, "n_positions": len(part)}
        for measure in MEASURES:
            values = part[measure].to_numpy(np.float64)
            row |= {f"mean_{measure}": np.mean(values), f"max_{measure}": np.max(values)}
        rows.append(row | {"top1_agreement": part["top1_agree"].mean()})
    return pd.DataFrame(rows)


def _measured(
    x: torch.Tensor,
    y: torch.Tensor,
    temperature: float,
    correct: torch.Tensor | None,
    room: list[torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Every numeric column of one chunk."""
    a, b = wide(x, y)
    scaled = (a, b) if temperature == 1 else (a.double() / temperature, b.double() / temperature)
    laws = distances(*scaled, correct, room=[z[: len(a)] for z in room])
    rest = {name: laws.pop(name) for name in (*MORE, *LOGITS, *LOGPROBS) if name in laws}
    k = min(TOP_K, a.shape[-1])
    (best, top, mine), (other, peak, theirs) = (likeliest(z, k) for z in (a, b))
    shared = (mine[:, :, None] == theirs[:, None]).any(-1).sum(-1).double() / k
    bad = ~(torch.isfinite(top[:, 0]) & torch.isfinite(peak[:, 0]))
    margin = top[:, 0].double() - top[:, min(1, k - 1)].double()
    raw = {name: rest.pop(name) * temperature for name in LOGITS}
    rest = {"top10_overlap": shared, "reference_margin": margin, **raw} | rest
    columns = {name: value.masked_fill(bad, math.nan) for name, value in (laws | rest).items()}
    tops = {"reference_top_id": best, "candidate_top_id": other}
    agree = {"top1_agree": (best == other) & ~bad}
    laws, rest = ({name: columns[name] for name in part} for part in (laws, rest))
    return {name: value.cpu() for name, value in (laws | agree | tops | rest).items()}


def _inside(ids: Sequence[int] | None, logits: torch.Tensor) -> torch.Tensor | None:
    """The ids as a tensor beside the logits; ValueError for one outside the vocabulary."""
    if ids is None:
        return None
    found = torch.as_tensor(np.asarray(ids, dtype=np.int64), device=logits.device)
    if len(wrong := torch.nonzero((found < 0) | (found >= logits.shape[1]))):
        i = int(wrong[0])
        raise ValueError(
            f"`correct_ids` must be below {logits.shape[1]}; got {int(found[i])} at position {i}"
        )
    return found


def _undefined(
    x: torch.Tensor, y: torch.Tensor, frame: pd.DataFrame
) -> tuple[tuple[int, str, str], ...]:
    positions = np.flatnonzero(frame["js_nats"].isna())
    sides = (("reference", x), ("candidate", y))
    reasons = ((int(i), side, why_undefined(z[i])) for i in positions for side, z in sides)
    return tuple(row for row in reasons if row[2])


def _infinite(
    x: torch.Tensor, y: torch.Tensor, frame: pd.DataFrame
) -> tuple[tuple[int, str, int], ...]:
    found = []
    for measure, direction, first, second in (
        (MEASURES[0], "reference‖candidate", x, y),
        (MEASURES[1], "candidate‖reference", y, x),
    ):
        for i in np.flatnonzero(np.isposinf(frame[measure])).tolist():
            lost = first[i].masked_fill(~torch.isneginf(second[i].to(first.device)), -math.inf)
            found.append((i, direction, int(lost.argmax())))
    return tuple(sorted(found))
