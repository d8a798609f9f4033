"""A verdict as JUnit XML, the form in which CI systems show tests."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from lossless_lab.verdict.answer import LEVELS
from lossless_lab.verdict.verdict import Verdict

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(verdict: Verdict, *, require: str) -> str:
    """One test case per level; the required one fails where its exit code is above 0.

    Another level is passed or skipped, never failed; what it answered stands in its output.

    Parameters
    ----------
    require : "1a" … "3", or "numerical", "statistical", "semantic".

    Examples
    --------
    >>> from lossless_lab.verdict import Answer, uniform
    >>> void = uniform("VACUOUS", "nothing ran", reference="a", candidate="b")
    >>> junit(void, require="1b").count("<failure"), junit(void, require="1b").count("<skipped")
    (1, 4)
    """
    required = verdict[require]
    failed = int(required.exit_code > 0)
    suite = ElementTree.Element("testsuite", name=_clean(f"{verdict.candidate} is lossless"))
    for answer in verdict.answers:
        name = f"level {answer.level}: {LEVELS[answer.level]}"
        case = ElementTree.SubElement(suite, "testcase", classname="lossless_lab", name=name)
        if answer is required and failed:
            ElementTree.SubElement(case, "failure", message=answer.word).text = _clean(str(verdict))
        elif answer is not required and answer.exit_code:
            ElementTree.SubElement(case, "skipped", message=f"{answer.word}, not required")
        ElementTree.SubElement(case, "system-out").text = _clean(str(answer))
    skipped = len(suite.findall("*/skipped"))
    for key, value in (("tests", len(verdict.answers)), ("failures", failed), ("skipped", skipped)):
        suite.set(key, str(value))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, "unicode")


def _clean(text: str) -> str:
    """Without the control characters that XML has no way to write."""
    return _NO_XML.sub("\ufffd", text)
