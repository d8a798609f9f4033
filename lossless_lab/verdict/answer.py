"""One level's answer: its word, the numbers it rests on, and how they are said."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
UNTESTED = ("NOT TESTED", "NOT APPLICABLE")
MARGIN_UNITS = {
    "1a": "share of positions",
    "1b": "share of prompts",
    "1c": "multiples of the floor",
    "2": "mean total variation",
    "3": "task points",
}
UNITS_JUDGED = {"1a": "positions", "1b": "prompts", "1c": "positions", "2": "prompts", "3": "items"}
SHARES = ("1a", "1b")
# Why the word is DIFFERENT where the interval reaches below the margin.
SEEN = {
    "1b": "DIFFERENT because outputs were seen to differ; the margin decides only EQUIVALENT, "
    "which needs the upper limit within it",
    "2": "DIFFERENT by the test of the tokens drawn, not by this interval or its margin",
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

    @property
    def size(self) -> str:
        """How large the effect is, in words; "" where there is no number.

        >>> Answer(level="1b", word="DIFFERENT", n=3, estimate=1 / 3, margin=0.05).size
        '1 of 3 prompts differ, margin 5 %'
        """
        if self.estimate is None:
            return ""
        number = rounded if math.isfinite(self.estimate) else str
        of = UNITS_JUDGED[self.level]
        if self.level in SHARES and self.n:
            parts = [f"{round(self.estimate * self.n)} of {self.n} {of} differ"]
        else:
            unit = MARGIN_UNITS[self.level]
            said = f"largest difference {number(self.estimate)} times the floor"
            parts = [said if self.level == "1c" else f"{unit} {number(self.estimate)}"]
            parts += [f"{self.n} {of}"] if self.n else []
        if self.confidence_interval is not None:
            parts.append("95 % limits {} to {}".format(*self.shown(self.confidence_interval)))
        if self.margin is not None:
            parts.append("margin {}".format(*self.shown([self.margin])))
        low = (self.confidence_interval or (math.nan,))[0]
        why = self.word == "DIFFERENT" and self.margin is not None and low <= self.margin
        return ", ".join(parts) + (f": {SEEN[self.level]}" if why and self.level in SEEN else "")

    def shown(self, numbers: Iterable[float]) -> list[str]:
        """Numbers in the level's unit: shares as percentages."""
        return [percent(x) if self.level in SHARES else rounded(x) for x in numbers]

    def __str__(self) -> str:
        size = f" ({self.size})" if self.size else ""
        return f"{self.level} {LEVELS[self.level]}: {self.word}{size}"


def rounded(x: float) -> str:
    """Three digits, and no exponent for what people write out.

    >>> rounded(0.0039123), rounded(5321.4), rounded(1.0)
    ('0.00391', '5,321', '1')
    """
    return f"{x:,.0f}" if 1000 <= abs(x) < 1e9 else f"{x:.3g}"


def percent(share: float) -> str:
    """Three digits of whichever is smaller, the share or its rest: only all of it is 100 %.

    >>> percent(0.333333), percent(0.99996), percent(1.0), percent(0.05)
    ('33.3 %', '99.996 %', '100 %', '5 %')
    """
    rest = min(share, 1 - share)
    if not rest > 0:
        return f"{100 * share:.3g} %"
    digits = max(0, 2 - math.floor(math.log10(100 * rest)))
    text = f"{100 * share:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + " %"
