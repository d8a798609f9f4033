"""THE QUESTION, is it lossless?, from subjects through triage and evidence to a verdict."""

from __future__ import annotations

from lossless_lab.pipeline.check import check
from lossless_lab.pipeline.compile_drift import CompileDrift, compile_drift
from lossless_lab.pipeline.corpus import compare_on
from lossless_lab.pipeline.format_costs import FormatCosts
from lossless_lab.pipeline.inspection import Inspection
from lossless_lab.pipeline.recognition import as_subject
from lossless_lab.pipeline.speed import speed_up
from lossless_lab.pipeline.study import Study
from lossless_lab.pipeline.subjects import Live, NotEvidence, Stored

__all__ = [
    "CompileDrift", "FormatCosts", "Inspection", "Live", "NotEvidence", "Stored", "Study",
    "as_subject", "check", "compare_on", "compile_drift", "speed_up",
]  # fmt: skip
