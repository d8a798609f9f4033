"""Which layer makes the difference: layers of one model run inside the other."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats

from ..results import Result
from ..stats.multiplicity import pvalue_text
from .capture import model_inputs
from .local import local_error as local_error
from .noise import centred_rms
from .parts import decoder_layers
from .replay import Run, record, swapped

_ALPHA, _RESAMPLES = 0.05, 9999


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attribution(Result):
    """What each layer does to the logits, seen from both sides.

    Parameters
    ----------
    frame : DataFrame
        layer; into_logit_rms, the effect of the candidate's layer in the reference;
        back_logit_rms, the whole drift minus the drift with the reference's layer put back
        (negative where the drift grows); interaction_logit_rms = back − into.
    whole : float
        Centred RMS of the candidate's logits minus the reference's.
    remainder_into, remainder_back : float
        RMS of what the layers' own differences of the logits, added up, leave of the whole one.
    rank_correlation, pvalue : float
        Spearman's, between the two views over the layers that change anything, one-sided.
    n_positions : int
    """

    frame: pd.DataFrame
    whole: float
    remainder_into: float
    remainder_back: float
    rank_correlation: float
    pvalue: float
    n_positions: int

    @property
    def ranking(self) -> tuple[int, ...] | None:
        """Layers by both effects added, largest first; None where the two views do not agree.

        They agree where one layer alone changes anything, or where the rank correlation is
        positive at 5 % and both name the same layer first.
        """
        changed = _changed(self.frame)
        views = changed[["into_logit_rms", "back_logit_rms"]]
        if changed.empty or not np.isfinite(views.to_numpy()).all():
            return None
        one_first = views["into_logit_rms"].idxmax() == views["back_logit_rms"].idxmax()
        if len(changed) > 1 and not (one_first and self.pvalue < _ALPHA):
            return None
        order = views.sum(axis=1).sort_values(ascending=False, kind="stable").index
        return tuple(int(layer) for layer in changed.loc[order, "layer"])

    def __str__(self) -> str:
        p = pvalue_text(self.pvalue, least=1 / (1 + _RESAMPLES))
        views = f"rank correlation {self.rank_correlation:.2g}, {p}"
        if _changed(self.frame).empty:
            text = "no ranking: no layer changes the logits"
            text += "; what changed lies outside the layers" if self.whole else ""
        elif not math.isfinite(self.whole):
            text = "no ranking: logits are not finite; `compare_layers` says where that starts"
        elif self.ranking is None and 1 / math.factorial(len(_changed(self.frame))) > _ALPHA:
            text = f"no ranking: too few layers change to tell agreement from chance ({views})"
        elif self.ranking is None:
            text = f"no ranking: the two views disagree ({views})"
        elif len(self.ranking) == 1:
            text = f"layer {self.ranking[0]} alone changes the logits"
        else:
            first = ", ".join(map(str, self.ranking[:5]))
            text = f"layers by effect on the logits: {first}{', …'[: 3 * (len(self.ranking) > 5)]}"
            text += f" ({views})"
        return (
            f"{text}; whole drift {self.whole:.3g} logit RMS, interaction leaves "
            f"{self.remainder_into:.3g} (into) and {self.remainder_back:.3g} (back)"
        )


def attribution(
    reference: Any,
    candidate: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
) -> Attribution:
    """Effect on the logits of each candidate layer taken into the reference, and of each put back.

    Neither effect is the layer's own: layers interact. On real models the two correlate by rank
    only .3 to .45, so there is a ranking only where they agree (`Attribution.ranking`). What has
    no layers (another batch size, the dtype of the whole model) has no attribution.

    Parameters
    ----------
    reference, candidate : decoder-only Hugging Face models of one architecture and dtype in eval
        mode, or results of `load`; both are left as they were.
    input_ids, attention_mask : [batch_size, seq_len]

    Returns
    -------
    Attribution, effects in centred logit RMS (root mean square over positions). Costs two plain
    forwards and, for L layers, 2 L that start at the swapped layer; holds the streams of every
    layer of one model and four sets of logits.

    Raises
    ------
    ValueError
        When layer counts, sizes or vocabularies differ (naming both), or every layer's dtype does.
    HooksNeverFired
        When a model (a compiled one) does not call its hooks.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)).eval()
    >>> print(attribution(model, model, torch.tensor([[1, 5]])).ranking)
    None
    """
    networks = [getattr(m, "network", m) for m in (reference, candidate)]
    inputs = model_inputs(input_ids, attention_mask)
    runs = [record(m, inputs, n) for m, n in zip(networks, ("reference", "candidate"), strict=True)]
    _require_swappable(*runs)
    (base, end), layers = (run.logits for run in runs), [decoder_layers(m) for m in networks]
    whole, effects, remainders = _rms(base, end), [], []
    for side in (0, 1):
        rest = (end - base).float() if end.itemsize < 4 else end - base
        effects.append([])
        for i, other in enumerate(layers[1 - side]):
            logits = swapped(networks[side], inputs, runs[side].outputs, i, other)
            effects[side].append(_rms(base, logits) if side == 0 else whole - _rms(base, logits))
            rest -= logits - base if side == 0 else end - logits
        remainders.append(_rms(torch.zeros(()).to(rest).expand_as(rest), rest))
    frame = pd.DataFrame(
        {
            "layer": range(1, len(layers[0]) + 1),
            "into_logit_rms": effects[0],
            "back_logit_rms": effects[1],
            "interaction_logit_rms": np.subtract(effects[1], effects[0]),
        }
    )
    correlation, pvalue = _agreement(_changed(frame))
    return Attribution(
        frame=frame,
        whole=whole,
        remainder_into=remainders[0],
        remainder_back=remainders[1],
        rank_correlation=correlation,
        pvalue=pvalue,
        n_positions=len(base),
    )


def _require_swappable(reference: Run, candidate: Run) -> None:
    """Same layers, sizes and vocabulary, and not another dtype throughout."""
    streams = [[o if isinstance(o, torch.Tensor) else o[0] for o in run.outputs]
               for run in (reference, candidate)]  # fmt: skip
    for what, sizes in (
        ("layers", [len(s) for s in streams]),
        ("features in the residual stream", [s[0].shape[-1] for s in streams]),
        ("tokens in the vocabulary", [r.logits.shape[-1] for r in (reference, candidate)]),
    ):
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"`candidate` has {sizes[1]} {what} and `reference` {sizes[0]}; layers can be "
                "swapped between equals only"
            )
    if all(x.dtype != y.dtype for x, y in zip(*streams, strict=True)):
        raise ValueError(
            f"no attribution by layer: every layer of `candidate` runs in {streams[1][0].dtype} "
            f"and of `reference` in {streams[0][0].dtype}; a change of the whole model has no "
            "layers (`local_error` tells what each one makes of it)"
        )


def _rms(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    return float(np.sqrt(np.mean(centred_rms(reference, candidate) ** 2)))


def _changed(frame: pd.DataFrame) -> pd.DataFrame:
    """The layers that change anything, NaN included."""
    return frame[(frame["into_logit_rms"] != 0) | (frame["back_logit_rms"] != 0)]


def _agreement(changed: pd.DataFrame) -> tuple[float, float]:
    """Spearman's correlation of the two views with its one-sided permutation p (exact to 7)."""
    views = changed[["into_logit_rms", "back_logit_rms"]].to_numpy().T
    if views.shape[1] < 2 or not np.isfinite(views).all():
        return math.nan, math.nan
    x, y = stats.rankdata(views, axis=1)
    test = stats.permutation_test(
        (x,), lambda ranks, axis: (ranks * y).sum(axis), permutation_type="pairings",
        alternative="greater", n_resamples=_RESAMPLES, rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(stats.spearmanr(x, y).statistic), float(test.pvalue)
