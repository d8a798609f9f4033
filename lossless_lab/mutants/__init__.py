"""Broken implementations, each with its dose: what the checks themselves are checked by."""

from __future__ import annotations

from lossless_lab.mutants.mutant import Mutant, NotApplicable
from lossless_lab.mutants.numerical import MUTANTS

__all__ = ["MUTANTS", "Mutant", "NotApplicable"]
