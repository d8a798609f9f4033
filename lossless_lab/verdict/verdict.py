"""The answers of one comparison together, and how they are told: sentence, table, JSON, HTML."""

from __future__ import annotations

import html
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from lossless_lab.verdict.answer import (
    LEVELS,
    MARGIN_UNITS,
    REQUIREMENTS,
    UNITS_JUDGED,
    UNTESTED,
    Answer,
    percent,
    rounded,
)

NOT_WITNESSED = "not witnessed"
PROPORTIONS = ("exact share", "mean text similarity")
LEFT = "style='text-align: left'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answers for one candidate against one reference, with cause and supporting evidence.

    Parameters
    ----------
    reference, candidate : names of the two sides.
    answers : one per level, in the order of LEVELS.
    cause : why the outputs differ, or why nothing could be judged; "" where there is no need.
    witness : what proves that the optimisation ran, or "not witnessed" and why.
    differences : configuration differences, rows of (field, reference, candidate, kind).
    supporting : evidence that decides nothing (text similarity, exercised positions).
    evidence : the frames that the answers were computed from, by name.
    """

    reference: str
    candidate: str
    answers: tuple[Answer, ...]
    cause: str = ""
    witness: str = NOT_WITNESSED
    differences: tuple[tuple[str, str, str, str], ...] = ()
    supporting: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, pd.DataFrame] = field(default_factory=dict, repr=False)

    def __getitem__(self, level: str) -> Answer:
        """The answer at `level`, or at a requirement's level ("numerical" is 1b)."""
        level = REQUIREMENTS.get(level, level)
        for answer in self.answers:
            if answer.level == level:
                return answer
        allowed = ", ".join((*LEVELS, *REQUIREMENTS))
        raise KeyError(f"`level` must be one of {allowed}; got {level!r}")

    @property
    def sentence(self) -> str:
        """Answer, size with interval, and what was not shown: one paragraph to copy."""
        return f"{self._title}: {self._found}{self._reason}{self._hidden}"

    @property
    def supporting_line(self) -> str:
        """The figures that decide nothing, on one line; "" where there are none."""
        said = _supporting(self.supporting)
        return f"Supporting, decides nothing: {said}." if said else ""

    @property
    def _title(self) -> str:
        return f"{self.candidate} against {self.reference}"

    @property
    def _found(self) -> str:
        words = {answer.word for answer in self.answers}
        if len(words) == 1:
            return f"{words.pop()} at every level."
        return "; ".join(str(a) for a in self.answers if a.word not in UNTESTED) + "."

    @property
    def _reason(self) -> str:
        return f" Cause: {self.cause}." if self.cause else ""

    @property
    def _hidden(self) -> str:
        """What this evidence could not have seen; nothing was seen at all where it is void."""
        if {a.word for a in self.answers} <= {"INVALID", "VACUOUS"}:
            return ""
        skipped: dict[str, list[str]] = {}
        for answer in self.answers:
            if answer.word in UNTESTED:
                reason = answer.not_shown or answer.word.lower()
                skipped.setdefault(reason, []).append(answer.level)
        hidden = [
            f"{'level' if len(levels) == 1 else 'levels'} {_listed(levels)} ({reason})"
            for reason, levels in skipped.items()
        ]
        seen = [a.not_shown for a in self.answers if a.word not in UNTESTED]
        hidden += dict.fromkeys(filter(None, seen))
        hidden += filter(None, [self.witness.partition("WARNING: ")[2]])
        if self.witness.startswith(NOT_WITNESSED):
            why = self.witness.removeprefix(NOT_WITNESSED)
            hidden.append(f"no witness shows that the optimisation ran{why}")
        return f" Not shown: {'; '.join(hidden)}." if hidden else ""

    def to_frame(self) -> pd.DataFrame:
        """One row per level; columns are Answer's fields and the level's claim and unit."""
        rows = [
            {"claim": LEVELS[a.level], **asdict(a), "unit": MARGIN_UNITS[a.level]}
            for a in self.answers
        ]
        return pd.DataFrame(rows).set_index("level")

    def rounded(self) -> pd.DataFrame:
        """The table of answers as it is printed."""
        rows = []
        for a in self.answers:
            numbers = (a.estimate, a.margin, a.minimum_detectable_effect)
            estimate, margin, detectable = ("" if x is None else a.shown([x])[0] for x in numbers)
            limits = " to ".join(a.shown(a.confidence_interval or ()))
            unit = MARGIN_UNITS[a.level] if estimate else ""
            judged = f"{a.n} {UNITS_JUDGED[a.level]}" if a.n else ""
            rows.append((a.level, LEVELS[a.level], a.word, estimate, unit, limits, margin, judged,
                         detectable))  # fmt: skip
        columns = ["level", "claim", "answer", "estimate", "unit", "95 % limits", "margin"]
        return pd.DataFrame(rows, columns=[*columns, "judged", "detectable from"])

    def to_markdown(self) -> str:
        """The table of answers, numbers rounded."""
        return self.rounded().to_markdown(index=False, disable_numparse=True)

    def to_latex(self) -> str:
        """The same table as a LaTeX tabular (booktabs)."""
        return self.rounded().to_latex(index=False, escape=True)

    def to_json(self) -> str:
        """Strict JSON of everything but the frames; non-finite numbers become strings."""
        record = {name: getattr(self, name) for name in self.__slots__ if name != "evidence"}
        record["answers"] = [asdict(answer) for answer in self.answers]
        return json.dumps(_jsonable(record), ensure_ascii=False, indent=1, allow_nan=False)

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        """The table, then cause, witness and what was not shown, a line each."""
        table = self.rounded()
        filled = [name for name in table if table[name].astype(bool).any()]
        said = {
            "Cause": self._reason.removeprefix(" Cause: "),
            "Witness": self.witness,
            "Not shown": self._hidden.removeprefix(" Not shown: "),
            "Supporting, decides nothing": _supporting(self.supporting),
        }
        lines = [f"<b>{name}</b>: {html.escape(text)}" for name, text in said.items() if text]
        # pandas escapes the cells; the class keeps a $ in a name from being read as mathematics
        cells = table[filled].to_html(index=False, border=0, justify="left")
        return (
            f"<div class='lossless-verdict tex2jax_ignore'><b>{html.escape(self._title)}</b>"
            f"{cells.replace('<td>', f'<td {LEFT}>')}"
            f"<p style='max-width: 60em'>{'<br>'.join(lines)}</p></div>"
        )


def uniform(word: str, cause: str, *, reference: str, candidate: str, **fields: Any) -> Verdict:
    """A verdict that gives every level the same word, because nothing could be judged."""
    answers = tuple(Answer(level=level, word=word) for level in LEVELS)
    return Verdict(reference=reference, candidate=candidate, answers=answers, cause=cause, **fields)


def _listed(words: list[str]) -> str:
    """'1a', '1a and 1c' or '1a, 1c and 3'."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _supporting(figures: dict[str, Any]) -> str:
    def said(name: str, value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return percent(value) if name in PROPORTIONS else rounded(value)

    return ", ".join(f"{name} {said(name, value)}" for name, value in figures.items())


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
