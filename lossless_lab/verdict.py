"""What follows from the evidence: one answer per level, what was seen and what was not.

The levels are a vector, not a ladder: each is answered from its own evidence, and only bitwise
equal logits answer the others on the inputs tried.
"""

from __future__ import annotations

import html
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

LEVELS = {
    "1a": "logits bitwise equal",
    "1b": "same token ids",
    "1c": "difference within the noise floor",
    "2": "same sampling distribution",
    "3": "same task quality",
}
REQUIREMENTS = {"numerical": "1b", "statistical": "2", "semantic": "3"}
EXIT_CODES = {
    "PROVEN": 0,
    "EQUIVALENT": 0,
    "DIFFERENT": 1,
    "INCONCLUSIVE": 2,
    "NOT EXERCISED": 2,
    "VACUOUS": 2,
    "NOT TESTED": 2,
    "INVALID": 3,
    "NOT APPLICABLE": 3,
}
MARGIN_UNITS = {
    "1a": "share of positions",
    "1b": "share of prompts",
    "1c": "multiples of the floor",
    "2": "mean total variation",
    "3": "task points",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One level's answer: a word, and the numbers that it rests on.

    Parameters
    ----------
    level : one of LEVELS.
    word : one of EXIT_CODES.
    estimate, confidence_interval, margin, minimum_detectable_effect
        In the level's unit (MARGIN_UNITS); None where the word needs no number. The interval's
        two limits are each one-sided at 95 %.
    n : number of independent units judged (prompts for 1b and 2, positions for 1a and 1c).
    not_shown : what this evidence could not have seen.

    Raises
    ------
    ValueError
        For an unknown level or word, or a word of equivalence without its margin.

    >>> Answer(level="1b", word="EQUIVALENT", n=59, estimate=0.0, margin=0.05).exit_code
    0
    """

    level: str
    word: str
    estimate: float | None = None
    confidence_interval: tuple[float, float] | None = None
    margin: float | None = None
    n: int = 0
    minimum_detectable_effect: float | None = None
    not_shown: str = ""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("level", self.level, LEVELS),
            ("word", self.word, EXIT_CODES),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}; got {value!r}")
        if self.word == "EQUIVALENT" and self.margin is None:
            raise ValueError(f"level {self.level}: EQUIVALENT needs a `margin`; got None")

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    def __str__(self) -> str:
        parts = [f"{self.level} ({LEVELS[self.level]}): {self.word}"]
        if self.estimate is not None:
            parts.append(f"{MARGIN_UNITS[self.level]} {_number(self.estimate)}")
        if self.confidence_interval is not None:
            low, high = map(_number, self.confidence_interval)
            parts.append(f"limits [{low}, {high}]")
        if self.margin is not None:
            parts.append(f"margin {_number(self.margin)}")
        if self.n:
            parts.append(f"n={self.n}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answers for one candidate against one reference, with cause and supporting evidence.

    Parameters
    ----------
    reference, candidate : names of the two sides.
    answers : one per level, in the order of LEVELS.
    cause : why the outputs differ, or why nothing could be judged; "" where there is no need.
    witness : what proves that the optimisation ran, or "not witnessed".
    differences : configuration differences, rows of (field, reference, candidate, kind).
    supporting : evidence that decides nothing (text similarity, speed, exercised positions).
    evidence : the frames that the answers were computed from, by name.
    """

    reference: str
    candidate: str
    answers: tuple[Answer, ...]
    cause: str = ""
    witness: str = "not witnessed"
    differences: tuple[tuple[str, str, str, str], ...] = ()
    supporting: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, pd.DataFrame] = field(default_factory=dict, repr=False)

    def __getitem__(self, level: str) -> Answer:
        """The answer at `level`, or at a requirement's level ("numerical" is 1b)."""
        level = REQUIREMENTS.get(level, level)
        for answer in self.answers:
            if answer.level == level:
                return answer
        raise KeyError(f"`level` must be one of {', '.join(LEVELS)}; got {level!r}")

    @property
    def sentence(self) -> str:
        """Answer, size with interval, and what was not shown: one paragraph to copy."""
        tested = [a for a in self.answers if a.word not in ("NOT TESTED", "NOT APPLICABLE")]
        text = f"{self.candidate} against {self.reference}: " + "; ".join(map(str, tested)) + "."
        if self.cause:
            text += f" Cause: {self.cause}."
        untested = [a.level for a in self.answers if a not in tested]
        hidden = [f"level {level} was not tested" for level in untested]
        hidden += dict.fromkeys(a.not_shown for a in tested if a.not_shown)
        if self.witness == "not witnessed":
            hidden.append("no witness shows that the optimisation ran")
        return text + (f" Not shown: {'; '.join(hidden)}." if hidden else "")

    def to_frame(self) -> pd.DataFrame:
        """One row per level; columns are Answer's fields and the level's claim and unit."""
        rows = [
            {"claim": LEVELS[a.level], **asdict(a), "unit": MARGIN_UNITS[a.level]}
            for a in self.answers
        ]
        return pd.DataFrame(rows).set_index("level")

    def to_markdown(self) -> str:
        return _printed(self).to_markdown(index=False)

    def to_latex(self) -> str:
        return _printed(self).to_latex(index=False, escape=True)

    def to_json(self) -> str:
        """Strict JSON of everything but the frames; non-finite numbers become strings."""
        record = {name: getattr(self, name) for name in self.__slots__ if name != "evidence"}
        record["answers"] = [asdict(answer) for answer in self.answers]
        return json.dumps(_jsonable(record), ensure_ascii=False, indent=1, allow_nan=False)

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
            for row in _printed(self).itertuples(index=False)
        )
        head = "".join(f"<th>{html.escape(c)}</th>" for c in _printed(self).columns)
        title = f"{html.escape(self.candidate)} against {html.escape(self.reference)}"
        return (
            f"<div class='lossless-verdict'><b>{title}</b><table><tr>{head}</tr>{rows}</table>"
            f"<p>Witness: {html.escape(self.witness)}</p><p>{html.escape(self.sentence)}</p></div>"
        )


def uniform(word: str, cause: str, *, reference: str, candidate: str, **fields: Any) -> Verdict:
    """A verdict that gives every level the same word, because nothing could be judged."""
    answers = tuple(Answer(level=level, word=word) for level in LEVELS)
    return Verdict(reference=reference, candidate=candidate, answers=answers, cause=cause, **fields)


def _printed(verdict: Verdict) -> pd.DataFrame:
    frame = verdict.to_frame().reset_index()
    interval = frame["confidence_interval"].map(
        lambda ci: "" if ci is None else f"[{_number(ci[0])}, {_number(ci[1])}]"
    )
    numbers = {
        name: frame[name].map(lambda x: "" if x is None or pd.isna(x) else _number(x))
        for name in ("estimate", "margin", "minimum_detectable_effect")
    }
    return pd.DataFrame(
        {
            "level": frame["level"],
            "claim": frame["claim"],
            "answer": frame["word"],
            "estimate": numbers["estimate"],
            "limits": interval,
            "margin": numbers["margin"],
            "unit": frame["unit"],
            "n": frame["n"],
            "smallest effect seen": numbers["minimum_detectable_effect"],
        }
    )


def _number(x: float) -> str:
    return f"{x:.3g}"


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
