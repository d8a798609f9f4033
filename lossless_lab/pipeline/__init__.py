"""THE QUESTION, is it lossless?, from subjects through triage and evidence to a verdict."""

from __future__ import annotations

from lossless_lab.pipeline.check import check
from lossless_lab.pipeline.recognition import as_subject
from lossless_lab.pipeline.study import Study
from lossless_lab.pipeline.subjects import EVIDENCE, Live, NotEvidence, Stored

__all__ = ["EVIDENCE", "Live", "NotEvidence", "Stored", "Study", "as_subject", "check"]
