"""Text similarity: symmetric, free of junk rules, exact at 1, quick on long texts."""

import difflib
import time

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from lossless_lab.semantic.text import shown, similarity, text_scores

SENTENCE = "the cache keeps every key and value in fp16 so nothing is lost. "
CYCLE = [0, 1, 2, 3, 4] * 60


def lcs_share(a, b):
    """2·LCS/(n + m) by the textbook table."""
    row = [0] * (len(b) + 1)
    for x in a:
        new = [0]
        for j, y in enumerate(b):
            new.append(row[j] + 1 if x == y else max(new[j], row[j + 1]))
        row = new
    return 2 * row[-1] / (len(a) + len(b)) if a or b else 1.0


def changed(sequence, index, item):
    return [*sequence[:index], item, *sequence[index + 1 :]]


@pytest.mark.parametrize(
    "a, b, value",
    [
        ("ab" * 99 + "a", "cb" + "ab" * 98 + "a", 0.9950),  # length 199
        ("ab" * 100, "cb" + "ab" * 99, 0.9950),  # length 200: difflib says 0
        (SENTENCE * 4, "the really " + (SENTENCE * 4)[4:], 0.9865),
        (CYCLE, changed(CYCLE, 150, 99), 0.9967),
        ("缓存保留键值" * 60, "缓存保留键值" * 59 + "缓存保留键名", 0.9972),
        (
            "量化之后输出没有变化。" * 30,
            "量化之后输出有变化。" + "量化之后输出没有变化。" * 29,
            0.9985,
        ),
    ],
)
def test_values_are_those_without_junk(a, b, value):
    assert similarity(a, b) == pytest.approx(value, abs=5e-4)
    plain = difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
    assert similarity(a, b) == pytest.approx(plain, abs=1e-12)


def test_a_word_in_the_middle_costs_what_one_at_the_start_does():
    """difflib takes the longest block first and misses the best fit, even without its junk."""
    b = SENTENCE * 2 + "really " + SENTENCE * 2
    assert similarity(SENTENCE * 4, b) == pytest.approx(0.9865, abs=5e-4)
    assert difflib.SequenceMatcher(None, SENTENCE * 4, b, autojunk=False).ratio() < 0.75


def test_the_junk_rule_would_be_seen():
    a, b = "ab" * 100, "cb" + "ab" * 99
    assert difflib.SequenceMatcher(None, a, b).ratio() == 0.0
    assert difflib.SequenceMatcher(None, CYCLE, changed(CYCLE, 150, 99)).ratio() < 0.6


@given(st.text("abc中", max_size=25), st.text("abc中", max_size=25))
def test_equals_the_textbook_table_both_ways(a, b):
    assert similarity(a, b) == pytest.approx(lcs_share(a, b), abs=1e-12)
    assert similarity(a, b) == similarity(b, a)
    assert (similarity(a, b) == 1.0) == (a == b)


def test_difflib_is_not_symmetric_and_this_is():
    a, b = "tide", "diet"
    ratios = [difflib.SequenceMatcher(None, *pair).ratio() for pair in ((a, b), (b, a))]
    assert ratios[0] != ratios[1]
    assert similarity(a, b) == similarity(b, a) >= max(ratios)


@pytest.mark.parametrize("same", ["", "x", "量化之后输出没有变化。", [], [5, 6, 7]])
def test_equal_is_exactly_one(same):
    assert similarity(same, same[:]) == 1.0


def test_unequal_is_never_shown_as_one():
    a = "x" * 20_000
    value = similarity(a, a[:-1] + "y")
    assert 0.9999 < value < 1 and shown(value) == "0.999" and shown(1.0) == "1.000"


def test_high_similarity_is_no_proof_of_sameness():
    """Two opposite answers; and a shared prompt that hides two disjoint ones."""
    text = "The KV cache of this model takes {} at 4,096 tokens."
    assert similarity(text.format("4.00 GiB"), text.format("1.00 GiB")) > 0.95
    prompt = SENTENCE * 3
    assert similarity(prompt + "yes it can", prompt + "没有任何可能") > 0.9
    assert similarity("yes it can", "没有任何可能") == 0.0


def test_quick_on_20_000_characters():
    a = SENTENCE * 313
    start = time.process_time()
    value = similarity(a, a[1:] + "!")
    assert value > 0.999
    assert time.process_time() - start < 5  # about 10 ms; difflib without junk takes minutes


def test_a_text_is_not_a_list():
    with pytest.raises(TypeError, match="both be texts or both lists"):
        similarity("ab", ["a", "b"])


# Scores that rouge-score 0.1.2 printed for these pairs: F of ROUGE-1, -2, -L.
@pytest.mark.parametrize(
    "a, b, rouge",
    [
        (
            "The cat sat on the mat.",
            "The cat is sitting on the mat, quietly.",
            (0.714286, 0.5, 0.714286),
        ),
        ("KV-cache uses 4.00 GiB", "KV cache uses 1.00 GiB", (0.833333, 0.6, 0.833333)),
        ("a b c d e f", "f e d c b a", (1.0, 0.0, 0.166667)),
    ],
)
def test_rouge_is_that_of_the_reference_implementation(a, b, rouge):
    assert text_scores(a, b).rouge == pytest.approx(rouge, abs=5e-7)


def test_scores_of_chinese():
    scores = text_scores("量化之后输出没有变化。", "量化之后输出有变化。")
    assert scores.rouge == pytest.approx((0.9524, 0.8421, 0.9524), abs=5e-5)
    assert scores.bleu == pytest.approx(71.09, abs=5e-3) and "tok:zh" in scores.signature
    assert scores.edit_distance == 1


@pytest.mark.parametrize(
    "text",
    ["", " ", "四", "yes it is", "量化之后输出没有变化。", "😀", "ответ: да", "...", "한국어"],
)
def test_equal_texts_score_full_in_every_script_and_metric(text):
    scores = text_scores(text, text)
    assert (scores.bleu, scores.chrf, scores.rouge) == (100, 100, (1, 1, 1))
    assert scores.equal and scores.characters == 1 and scores.edit_distance == 0


@given(st.text("ab 中。A.", max_size=12), st.text("ab 中。A.", max_size=12))
def test_unequal_text_never_scores_full_without_a_warning(a, b):
    scores = text_scores(a, b)
    full = max(scores.bleu, scores.chrf) > 99.99 or min(scores.rouge) == 1
    assert scores.equal == (a == b)
    assert bool(scores.note) == (full and a != b)
    for value in (*scores.rouge, scores.bleu / 100, scores.chrf / 100):
        assert 0 <= value <= 1
    back = text_scores(b, a)
    assert (back.rouge, back.edit_distance) == (scores.rouge, scores.edit_distance)


def test_an_empty_side_scores_nothing():
    scores = text_scores("", "an answer")
    assert (scores.bleu, scores.chrf, scores.rouge, scores.characters) == (0, 0, (0, 0, 0), 0)


def test_bleu_and_chrf_are_those_of_sacrebleu():
    a, b = "The quick brown fox jumps over it.", "The quick brown dog jumped over it."
    scores = text_scores(a, b)
    assert scores.bleu == pytest.approx(sacrebleu.sentence_bleu(b, [a]).score)
    assert scores.chrf == pytest.approx(sacrebleu.sentence_chrf(b, [a]).score)
    assert list(scores.to_frame()["rouge_l"]) == [scores.rouge[2]]
