"""Answers and verdicts: words, exit codes, what is said, and what leaves as JSON, HTML, LaTeX."""

import json
import math
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossless_lab.verdict import EXIT_CODES, LEVELS, REQUIREMENTS, Answer, Verdict, uniform
from lossless_lab.verdict.answer import percent, rounded

HOSTILE = "<script>alert('x')</script> & $\\alpha$ 100 % a_b"


def verdict(**changes):
    answers = (
        Answer(level="1a", word="DIFFERENT", estimate=1.0, n=384),
        Answer(
            level="1b",
            word="INCONCLUSIVE",
            estimate=1 / 12,
            confidence_interval=(0.0043, 0.339),
            margin=0.05,
            n=12,
            minimum_detectable_effect=0.221,
            not_shown="59 identical prompts would be needed",
        ),
        Answer(level="1c", word="NOT TESTED", not_shown="no floor"),
        Answer(level="2", word="EQUIVALENT", estimate=0.0039123, margin=0.05, n=12),
        Answer(level="3", word="NOT TESTED", not_shown="no task items"),
    )
    fields = {"reference": "float32", "candidate": "bfloat16", "answers": answers}
    return Verdict(**fields | changes)


def test_exit_codes_are_those_that_the_command_line_promises():
    promised = {
        0: {"PROVEN", "EQUIVALENT"},
        1: {"DIFFERENT"},
        2: {"INCONCLUSIVE", "NOT EXERCISED", "VACUOUS", "NOT TESTED"},
        3: {"INVALID", "NOT APPLICABLE"},
    }
    assert {w: code for code, words in promised.items() for w in words} == EXIT_CODES
    for word, code in EXIT_CODES.items():
        assert Answer(level="1b", word=word, margin=0.05).exit_code == code


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": "1d", "word": "PROVEN"}, r"`level` must be one of 1a.*got '1d'"),
        ({"level": "1a", "word": "LOSSLESS"}, r"`word` must be one of PROVEN.*got 'LOSSLESS'"),
        ({"level": "2", "word": "EQUIVALENT"}, r"level 2: EQUIVALENT needs a `margin`; got None"),
    ],
)
def test_an_answer_without_its_grounds_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Answer(**fields)


def test_answers_are_found_by_level_and_by_requirement():
    found = verdict()
    assert found["1b"].word == found["numerical"].word == "INCONCLUSIVE"
    assert {name: found[name].level for name in REQUIREMENTS} == REQUIREMENTS
    with pytest.raises(KeyError, match=r"1a, 1b, 1c, 2, 3, numerical, .*got 'numericl'"):
        found["numericl"]


def test_the_sentence_says_answer_size_and_what_was_not_shown():
    said = verdict(cause="near tie", witness="parameters in bfloat16").sentence
    assert said.startswith("bfloat16 against float32: 1a logits bitwise equal: DIFFERENT (")
    assert "384 of 384 positions differ" in said
    assert "1 of 12 prompts differ, 95 % limits 0.43 % to 33.9 %, margin 5 %" in said
    assert "mean total variation 0.00391, 12 prompts, margin 0.05" in said
    assert "Cause: near tie." in said
    hidden = said.partition("Not shown: ")[2]
    assert "level 1c (no floor)" in hidden
    assert "level 3 (no task items)" in hidden
    assert "59 identical prompts" in hidden
    assert "witness" not in said
    assert "\n" not in said
    assert "no witness shows" in verdict().sentence
    assert str(verdict()) == verdict().sentence


def test_levels_skipped_for_one_reason_are_named_together():
    text = uniform("NOT TESTED", "", reference="a", candidate="b").sentence
    assert text.startswith("b against a: NOT TESTED at every level.")
    assert "levels 1a, 1b, 1c, 2 and 3 (not tested)" in text


@pytest.mark.parametrize("word", ["INVALID", "VACUOUS"])
def test_what_is_void_is_said_once(word):
    found = uniform(word, "batch_size is 1 and 2", reference="a", candidate="b")
    assert found.sentence == f"b against a: {word} at every level. Cause: batch_size is 1 and 2."
    assert [a.level for a in found.answers] == list(LEVELS)


@given(st.floats(0, 1))
def test_only_all_is_said_to_be_100_percent_and_only_none_0(share):
    said = percent(share)
    value = float(said.removesuffix(" %"))
    assert value / 100 == pytest.approx(share, rel=6e-3, abs=1e-300)
    if share < 1 - 1e-12:
        assert value < 100
    assert (value == 0) == (share == 0)


@given(st.floats(1e-9, 1e9))
def test_numbers_keep_three_digits(x):
    assert float(rounded(x).replace(",", "")) == pytest.approx(x, rel=5.1e-3)
    assert "e+" not in rounded(x) or x >= 999_999_999


def test_json_is_strict_and_holds_every_answer():
    wild = verdict(
        supporting={"speed-up": math.inf, "share": math.nan, "text": HOSTILE, "n": pd.NA},
        differences=(("dtype", "float32", "bfloat16", "subject"),),
        evidence={"tokens": pd.DataFrame({"a": [1]})},
    )
    record = json.loads(wild.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert [a["level"] for a in record["answers"]] == list(LEVELS)
    assert record["answers"][1]["confidence_interval"] == [0.0043, 0.339]
    assert record["answers"][0]["estimate"] == 1.0
    assert record["supporting"]["speed-up"] == "inf"
    assert record["supporting"]["text"] == HOSTILE
    assert record["differences"] == [["dtype", "float32", "bfloat16", "subject"]]
    assert "evidence" not in record


class Seen(HTMLParser):
    """Tags opened and closed, in order, and the text between."""

    def __init__(self):
        super().__init__()
        self.stack, self.tags, self.text = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.stack += [tag] if tag != "br" else []

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_html_is_well_formed_escaped_and_compact():
    names = dict.fromkeys(("reference", "candidate", "cause", "witness"), HOSTILE)
    seen = Seen()
    page = verdict(**names, supporting={"exact share": 0.99996, HOSTILE: HOSTILE})._repr_html_()
    seen.feed(page)
    assert not seen.stack
    assert "script" not in seen.tags
    assert "".join(seen.text).count(HOSTILE) == 6
    assert "tex2jax_ignore" in page
    assert "99.996 %" in page
    bare = uniform("INVALID", "", reference="a", candidate="b")._repr_html_()
    heads = re.findall(r"<th>(.*?)</th>", bare)
    assert heads == ["level", "claim", "answer"]  # empty columns are left out


def test_tables_agree_with_the_answers_in_markdown_latex_and_frame():
    found = verdict()
    lines = found.to_markdown().splitlines()
    assert len(lines) == 2 + len(LEVELS)
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    for line, answer in zip(lines[2:], found.answers, strict=True):
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[1:4] == [answer.level, LEVELS[answer.level], answer.word]
    assert "8.33 %" in lines[3]
    latex = found.to_latex()
    assert latex.startswith("\\begin{tabular}")
    assert latex.count(r"\\") == 1 + len(LEVELS)
    assert not re.search(r"(?<!\\)%", latex)
    frame = found.to_frame()
    assert list(frame.index) == list(LEVELS)
    assert frame.loc["1b", "estimate"] == 1 / 12


def test_an_undefined_size_is_shown_not_lost():
    nan = Answer(level="2", word="DIFFERENT", estimate=math.nan, margin=0.05, n=3)
    assert "mean total variation nan" in str(nan)
    huge = Answer(level="1c", word="DIFFERENT", estimate=math.inf, margin=1.0, n=3)
    assert "largest difference inf times the floor" in str(huge)
