"""Two runs token by token: where outputs first part, by what margin, and what kind of parting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..results import Result
from .noise import ulp_of

KINDS = ("equal", "content", "length", "stop_set", "whitespace", "text_only")
_OF_LOGITS = ("reference_margin", "margin_steps", "logit_difference", "teacher_forced_agreement")
Key = tuple[str, int]
Laws = Callable[[Key], tuple[torch.Tensor, torch.Tensor] | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenComparison(Result):
    """How the outputs of two runs compare, pair by pair.

    Parameters
    ----------
    frame : DataFrame
        One row per (prompt_id, sample_index); columns are listed under `compare_tokens`.
    dtype : compute dtype whose rounding steps margins are counted in.
    reference_stop_ids, candidate_stop_ids : the end ids of either side, None where unknown.
    """

    frame: pd.DataFrame
    dtype: str
    reference_stop_ids: tuple[int, ...] | None
    candidate_stop_ids: tuple[int, ...] | None

    @property
    def n_prompts(self) -> int:
        """Prompts compared: the independent units."""
        return int(self.frame["prompt_id"].nunique())

    @property
    def n_prompts_differing(self) -> int:
        """Prompts of which at least one sample differs in its ids (its text, where no ids are)."""
        return int(self.frame.loc[~self.frame["ids_equal"], "prompt_id"].nunique())

    @property
    def exact_share(self) -> float:
        """Share of pairs with equal ids (equal texts, where no ids are)."""
        return float(self.frame["ids_equal"].mean())

    @property
    def of_texts(self) -> bool:
        """Whether some pair had no ids, so that texts alone were compared."""
        return bool(self.frame["n_reference"].isna().any())

    @property
    def text_share(self) -> float:
        """Share of pairs with equal texts."""
        return float(self.frame["text_equal"].mean())

    @property
    def divergences(self) -> pd.DataFrame:
        """The pairs that differ, earliest divergence first."""
        return self.frame[~self.frame["ids_equal"]].sort_values("first_divergence")

    def __str__(self) -> str:
        ids = "" if self.of_texts else f"ids equal in {self.exact_share:.1%}, "
        text = f"{len(self.frame)} pairs of {self.n_prompts} prompts: {ids}"
        text += f"text equal in {self.text_share:.1%}"
        kinds = self.frame["kind"].value_counts()
        differing = [f"{n} {kind}" for kind, n in kinds.items() if kind != "equal"]
        text += f" ({', '.join(differing)})" if differing else ""
        differing = self.divergences
        if differing["first_divergence"].notna().any():
            text += f"; first divergence at token {self._parting(differing.iloc[0])}"
        if (self.frame["kind"] == "stop_set").any():
            text += (
                f"; stop sets differ: {_ids(self.reference_stop_ids)} and "
                f"{_ids(self.candidate_stop_ids)}, outputs agree up to the stop"
            )
        return text

    def _parting(self, row: pd.Series) -> str:
        sides = (row["reference_token_id"], row["candidate_token_id"])
        ids = " -> ".join("end" if pd.isna(i) else str(i) for i in sides)
        text = f"{row['first_divergence']} of prompt {row['prompt_id']!r} ({ids}"
        if not pd.isna(row["reference_margin"]):
            text += (
                f", top-2 margin {row['reference_margin']:.3g} = {row['margin_steps']:.3g} "
                f"{self.dtype} steps"
            )
        return text + ")"


def compare_tokens(
    reference: Sequence[Any],
    candidate: Sequence[Any],
    *,
    laws: Laws | None = None,
    dtype: str = "float32",
    reference_stop_ids: Sequence[int] | None = None,
    candidate_stop_ids: Sequence[int] | None = None,
) -> TokenComparison:
    """Compare two runs pair by pair; pairs are matched by (prompt_id, sample_index).

    Parameters
    ----------
    reference, candidate : records with prompt_id, sample_index, prompt_ids, output_ids, text and
        finish_reason. `output_ids` may be None on both sides: then texts are compared.
    laws : key -> (reference_logits, candidate_logits), each [positions, vocab_size], or None
        Raw logits along the reference's ids; adds margins at the first divergence.
    dtype : compute dtype whose rounding step margins are quoted in.
    reference_stop_ids, candidate_stop_ids : end ids of either side, where known.

    Returns
    -------
    TokenComparison
        with columns prompt_id, sample_index, n_reference, n_candidate (tokens), ids_equal,
        text_equal, whitespace_only, first_divergence (index into the output, NA where none),
        reference_token_id, candidate_token_id, reference_margin (the reference's top-2 logit
        difference there), margin_steps (the same in rounding steps of `dtype` at its top logit),
        logit_difference (largest |candidate − reference| of the two tokens' logits there),
        teacher_forced_agreement (share of the reference's later positions where both sides' top
        tokens agree once the candidate is fed the reference's ids; NaN where no law is at hand)
        and kind (KINDS). The kind stop_set: the shorter side ended at an id that does not end the
        other, and the outputs agree up to it.

    Raises
    ------
    ValueError
        For pairs that are missing on a side or doubled, and for prompts whose ids differ, which
        makes any comparison of outputs meaningless.

    Examples
    --------
    >>> from types import SimpleNamespace as Record
    >>> a = Record(prompt_id="p", sample_index=0, prompt_ids=(1,), output_ids=(5, 6), text="x",
    ...            finish_reason="length")
    >>> b = Record(**{**vars(a), "output_ids": (5, 7), "text": "y"})
    >>> int(compare_tokens([a], [b]).frame["first_divergence"][0])
    1
    """
    left, right = _by_key(reference, "reference"), _by_key(candidate, "candidate")
    _same_keys(left, right)
    stops = [None if s is None else tuple(s) for s in (reference_stop_ids, candidate_stop_ids)]
    rows = []
    for key, a in left.items():
        b = right[key]
        _same_prompt(key, a, b)
        row = _pair(key, a, b, stops)
        if laws is not None and row["first_divergence"] is not None:
            row |= _margins(row, laws(key), dtype)
        rows.append(row)
    frame = pd.DataFrame(rows)
    for name in ("first_divergence", "reference_token_id", "candidate_token_id"):
        frame[name] = pd.array(frame[name], dtype="Int64")
    return TokenComparison(
        frame=frame, dtype=dtype, reference_stop_ids=stops[0], candidate_stop_ids=stops[1]
    )


def first_divergence(reference: Sequence[int], candidate: Sequence[int]) -> int | None:
    """Index of the first differing token; the shorter length where one ends early; None if equal.

    Examples
    --------
    >>> first_divergence([1, 2, 3], [1, 9, 3]), first_divergence([1], [1, 2])
    (1, 1)
    """
    if reference == candidate:
        return None
    n = min(len(reference), len(candidate))
    a, b = np.asarray(reference[:n]), np.asarray(candidate[:n])
    unequal = np.flatnonzero(a != b)
    return int(unequal[0]) if len(unequal) else n


def _pair(key: Key, a: Any, b: Any, stops: Sequence[tuple[int, ...] | None]) -> dict[str, Any]:
    text_equal = a.text == b.text
    spaces = not text_equal and "".join(a.text.split()) == "".join(b.text.split())
    row = {
        "prompt_id": key[0],
        "sample_index": key[1],
        **dict.fromkeys(("n_reference", "n_candidate")),
        "ids_equal": text_equal,
        "text_equal": text_equal,
        "whitespace_only": spaces,
        **dict.fromkeys(("first_divergence", "reference_token_id", "candidate_token_id")),
        **dict.fromkeys(_OF_LOGITS, np.nan),
        "kind": "equal" if text_equal else "whitespace" if spaces else "text_only",
    }
    if a.output_ids is None or b.output_ids is None:
        return row
    x, y = tuple(a.output_ids), tuple(b.output_ids)
    at = first_divergence(x, y)
    row |= {"n_reference": len(x), "n_candidate": len(y), "ids_equal": at is None, "kind": "equal"}
    if at is None:
        return row
    row["first_divergence"] = at
    row["reference_token_id"] = x[at] if at < len(x) else None
    row["candidate_token_id"] = y[at] if at < len(y) else None
    if at < min(len(x), len(y)):
        row["kind"] = "whitespace" if spaces else "content"
    else:
        shorter, own, other = (a, *stops) if len(x) < len(y) else (b, *stops[::-1])
        last = (shorter.output_ids or (None,))[-1]
        stopped = shorter.finish_reason == "stop" and None not in (own, other)
        row["kind"] = "stop_set" if stopped and last in own and last not in other else "length"
    return row


def _margins(
    row: Mapping[str, Any], laws: tuple[torch.Tensor, torch.Tensor] | None, dtype: str
) -> dict[str, float]:
    """The columns of one differing pair that need logits; none where they do not reach so far."""
    at = row["first_divergence"]
    if laws is None or at >= min(map(len, laws)):
        return {}
    x, y = (side[at].double() for side in laws)
    top = x.topk(min(2, len(x))).values.tolist()
    n = min(map(len, laws))
    tops = [side[at + 1 : n].argmax(-1) for side in laws]
    found = {
        "reference_margin": top[0] - top[-1],
        "margin_steps": (top[0] - top[-1]) / float(ulp_of(top[0], dtype)),
        "teacher_forced_agreement": float((tops[0] == tops[1].to(tops[0].device)).double().mean()),
    }
    pair = [row["reference_token_id"], row["candidate_token_id"]]
    if None not in pair:
        found["logit_difference"] = float((y[pair].to(x.device) - x[pair]).abs().max())
    return found


def _by_key(records: Sequence[Any], side: str) -> Mapping[Key, Any]:
    found: dict[Key, Any] = {}
    for record in records:
        key = (record.prompt_id, record.sample_index)
        if key in found:
            raise ValueError(f"`{side}` holds prompt {key[0]!r}, sample {key[1]} more than once")
        found[key] = record
    if not found:
        raise ValueError(f"`{side}` must hold at least one record; got none")
    return found


def _same_keys(left: Mapping[Key, Any], right: Mapping[Key, Any]) -> None:
    for side, missing in (("candidate", left.keys() - right), ("reference", right.keys() - left)):
        if missing:
            shown = ", ".join(f"{name!r} sample {i}" for name, i in sorted(missing)[:5])
            raise ValueError(f"`{side}` lacks {len(missing)} of the other side's pairs: {shown}")


def _same_prompt(key: Key, a: Any, b: Any) -> None:
    x, y = tuple(a.prompt_ids or ()), tuple(b.prompt_ids or ())
    if x == y or not x or not y:  # a side that tells no prompt ids cannot be compared in them
        return
    at = first_divergence(x, y)
    longer, shorter = sorted((x, y), key=len, reverse=True)
    extra = len(longer) == len(shorter) + 1 and longer[1:] == shorter and longer[0] == longer[1]
    why = "extra BOS" if extra else f"{len(x)} and {len(y)} tokens"
    raise ValueError(f"prompt {key[0]!r}: prompts differ at position {at} ({why})")


def _ids(ids: tuple[int, ...] | None) -> str:
    return "unknown" if ids is None else "{" + ", ".join(map(str, ids)) + "}"
