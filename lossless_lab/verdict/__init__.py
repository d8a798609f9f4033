"""WHAT FOLLOWS from the evidence: one answer per level, what was seen and what was not.

The levels are a vector, not a ladder: each is answered from its own evidence, and only bitwise
equal logits answer the others on the inputs tried.
"""

from lossless_lab.verdict.answer import EXIT_CODES, LEVELS, MARGIN_UNITS, REQUIREMENTS, Answer
from lossless_lab.verdict.verdict import Verdict, uniform

__all__ = [
    "EXIT_CODES", "LEVELS", "MARGIN_UNITS", "REQUIREMENTS", "Answer", "Verdict", "uniform",
]  # fmt: skip
