"""The bundled documents, their validator, and two models that read them in lockstep."""

import json
import re
from itertools import combinations

import pytest
from rapidfuzz import fuzz

from lossless_lab import paths, prompts
from lossless_lab.prompts import PromptFileError

PARTS = {part: prompts.read_documents(part=part) for part in ("evaluation", "calibration")}
BOTH = [d for part in PARTS.values() for d in part]


def near_duplicates(documents, limit=70):
    """Pairs of ids whose texts are as alike as a copy with some words changed."""
    return [
        (a.id, b.id)
        for a, b in combinations(documents, 2)
        if fuzz.ratio(a.text, b.text, score_cutoff=limit)
    ]


def test_the_corpus_is_large_enough_balanced_and_in_its_languages():
    assert len(PARTS["evaluation"]) >= 150 and len(PARTS["calibration"]) >= 40
    han = re.compile(r"[\u4e00-\u9fff]")
    for documents in PARTS.values():
        first = [d.language for d in documents[:30]]
        assert [first.count(x) for x in ("en", "zh", "code")] == [10, 10, 10]
        assert min(sum(d.language == x for d in documents) for x in ("en", "zh", "code")) >= 10
    for d in BOTH:
        assert bool(han.search(d.text)) == (d.language == "zh"), d.id
        assert 50 <= len(d.text) <= 450, d.id


def test_every_document_is_itself_and_in_one_set_only():
    assert len({d.id for d in BOTH}) == len({d.text for d in BOTH}) == len(BOTH)
    assert near_duplicates(BOTH) == []
    words = BOTH[0].text.split()
    changed = BOTH[0].model_copy(update={"id": "copy", "text": " ".join([*words[2:], "Indeed."])})
    assert near_duplicates([*BOTH, changed]) == [(BOTH[0].id, "copy")]  # the check can fail


def test_the_examples_in_python_are_python():
    for d in BOTH:
        if d.kind == "python":
            compile(d.text, d.id, "exec")
        if d.kind == "json":
            json.loads(d.text)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"language": "fr"}, "`language` must be one of en, zh, code; received 'fr'"),
        ({"kind": "News"}, "`kind` "),
        ({"text": " a text that starts with a blank"}, "`text` "),
        ({"text": "short"}, "`text` string should have at least 20 characters"),
        ({"title": "x"}, "`title` is no field of a document"),
    ],
)
def test_a_bad_document_is_refused_with_its_line(tmp_path, change, message):
    good = BOTH[0].model_dump()
    path = tmp_path / "mine.jsonl"
    lines = [good, {**good, "id": "b"} | change]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with pytest.raises(PromptFileError, match=rf"mine\.jsonl:2: {re.escape(message)}"):
        prompts.read_documents(path)


def test_the_corpus_travels_with_the_package():
    assert (paths.DATA / "corpus" / "README.md").is_file()
    assert "Apache-2.0" in (paths.DATA / "corpus" / "README.md").read_text(encoding="utf-8")
