"""Two runs token by token: where they part, by what margin, and what is no model difference."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, T0_GREEDY_S, build_t0
from hypothesis import given
from hypothesis import strategies as st

from lossless_lab.numerical.tokens import compare_tokens, first_divergence


def record(output_ids, text=None, **changes):
    fields = {
        "prompt_id": "p",
        "sample_index": 0,
        "prompt_ids": PROMPT_S,
        "output_ids": None if output_ids is None else tuple(output_ids),
        "text": " ".join(map(str, output_ids or ())) if text is None else text,
        "finish_reason": "length",
    }
    return SimpleNamespace(**(fields | changes))


def only(reference, candidate, **options):
    """The one row of a comparison of one pair."""
    return compare_tokens([reference], [candidate], **options).frame.iloc[0]


# Where outputs part


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_first_divergence_equals_a_plain_loop(a, b):
    expected = None if a == b else next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )  # fmt: skip
    assert first_divergence(tuple(a), tuple(b)) == expected


def test_equal_outputs():
    row = only(record([5, 6]), record([5, 6]))
    assert row["kind"] == "equal" and row["ids_equal"] and row["first_divergence"] is not None
    assert np.isnan(row["reference_margin"])
    comparison = compare_tokens([record([5, 6])], [record([5, 6])])
    assert comparison.frame["first_divergence"].isna().all()
    assert comparison.exact_share == 1.0 and comparison.n_prompts_differing == 0


def test_a_token_shift_by_one_is_caught_at_once():
    row = only(record(T0_GREEDY_S[:-1]), record(T0_GREEDY_S[1:]))
    assert row["first_divergence"] == 0 and row["kind"] == "content"
    assert (row["reference_token_id"], row["candidate_token_id"]) == (17, 22)


def test_several_samples_and_the_share_of_prompts():
    def run(ids):
        return [record(x, prompt_id=p, sample_index=i) for (p, i), x in ids.items()]

    a = run({("a", 0): [1, 2], ("a", 1): [1, 3], ("b", 0): [4, 4]})
    b = run({("b", 0): [4, 4], ("a", 1): [1, 3], ("a", 0): [1, 9]})  # any order
    comparison = compare_tokens(a, b)
    assert comparison.exact_share == pytest.approx(2 / 3)
    assert comparison.n_prompts == 2 and comparison.n_prompts_differing == 1
    assert comparison.divergences["candidate_token_id"].tolist() == [9]
    assert "first divergence at token 1 of prompt 'a' (2 -> 9)" in str(comparison)


# B04: a flip between near ties


def greedy_bf16():
    """T0 in bf16 from S: 40 greedy ids and the logits that chose them."""
    network = build_t0(torch.bfloat16)
    out = network.generate(
        torch.tensor([PROMPT_S]), max_new_tokens=40, do_sample=False, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    return network, out.sequences[0, 4:].tolist(), torch.stack(out.logits)[:, 0].float()


def test_a_near_tie_is_quoted_in_absolute_terms_and_in_rounding_steps():
    network, ids, logits = greedy_bf16()
    top = logits.topk(2, -1)
    margins = (top.values[:, 0] - top.values[:, 1]).masked_fill(logits.argmax(-1) == 0, math.inf)
    at = int(margins.argmin())  # where a run of another order would flip first
    flipped = next(i for i in top.indices[at].tolist() if i != ids[at])
    rest = network.generate(
        torch.tensor([[*PROMPT_S, *ids[:at], flipped]]), max_new_tokens=40 - at - 1,
        do_sample=False, pad_token_id=0,
    )[0, 4:].tolist()  # fmt: skip
    with torch.no_grad():  # the candidate, fed the reference's ids in one pass
        forced = network(torch.tensor([[*PROMPT_S, *ids[:-1]]])).logits[0, 3:].float()
    comparison = compare_tokens(
        [record(ids)], [record(rest)], laws={("p", 0): (logits, forced)}.get, dtype="bfloat16"
    )
    row = comparison.frame.iloc[0]
    assert row["first_divergence"] == at and row["kind"] == "content"
    assert (row["reference_token_id"], row["candidate_token_id"]) == (ids[at], flipped)
    assert row["reference_margin"] == pytest.approx(float(margins[at]))
    step = 2.0 ** (math.floor(math.log2(float(top.values[at, 0]))) - 7)  # 7 bits after the point
    assert row["margin_steps"] == pytest.approx(float(margins[at]) / step)
    assert row["margin_steps"] <= 2  # a near tie
    pair = [ids[at], flipped]
    assert row["logit_difference"] == pytest.approx(
        float((forced[at, pair] - logits[at, pair]).abs().max())
    )
    later = logits[at + 1 :].argmax(-1) == forced[at + 1 :].argmax(-1)
    assert row["teacher_forced_agreement"] == pytest.approx(float(later.float().mean()))
    assert row["teacher_forced_agreement"] > 0.9  # though the free outputs have parted for good
    assert "bfloat16 steps" in str(comparison)


def test_one_bf16_step_by_hand():
    """Top logits 2.515625 and 2.5: the margin of .0156 is one step between 2 and 4."""
    reference = torch.tensor([[0.0, 2.515625, 2.5], [9.0, 0.0, 0.0]])
    candidate = torch.tensor([[0.0, 2.5, 2.515625], [9.0, 0.0, 0.0]])
    row = only(
        record([1, 0]), record([2, 2]), laws=lambda key: (reference, candidate), dtype="bfloat16"
    )
    assert row["reference_margin"] == 0.015625 and row["margin_steps"] == 1.0
    assert row["logit_difference"] == 0.015625 and row["teacher_forced_agreement"] == 1.0
    in_single = only(record([1, 0]), record([2, 2]), laws=lambda key: (reference, candidate))
    assert in_single["margin_steps"] == 2.0**16  # the same margin in float32 is no tie


def test_assisted_decoding_parts_only_where_the_top_two_nearly_tie():
    """Prompt lookup in each dtype; float32 is the control, half precision may flip near ties."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        network, ids = build_t0(dtype), torch.tensor([PROMPT_S])
        options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        plain = network.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
        assisted = network.generate(ids, prompt_lookup_num_tokens=4, **options)
        logits = torch.stack(plain.logits)[:, 0].float()
        row = only(
            record(plain.sequences[0, 4:].tolist()),
            record(assisted[0, 4:].tolist()),
            laws=lambda key, x=logits: (x, x),
            dtype=str(dtype).removeprefix("torch."),
        )
        assert row["ids_equal"] or dtype != torch.float32
        assert row["ids_equal"] or row["margin_steps"] <= 4


def test_margins_need_logits_that_reach_the_divergence():
    laws = torch.zeros(1, 4), torch.zeros(1, 4)
    row = only(record([1, 2]), record([1, 3]), laws=lambda key: laws)
    assert np.isnan(row["reference_margin"]) and np.isnan(row["teacher_forced_agreement"])
    row = only(record([1, 2]), record([1, 3]), laws=lambda key: None)
    assert np.isnan(row["margin_steps"]) and row["first_divergence"] == 1


# B03: lengths, stop ids, pad tails


def test_other_stop_sets_are_said_and_are_no_content_difference():
    a = record([17, 22, 71, 77], finish_reason="stop")
    b = record([17, 22, 71, 77, 65, 46], finish_reason="length")
    stops = {"reference_stop_ids": (77, 96), "candidate_stop_ids": (96,)}
    comparison = compare_tokens([a], [b], **stops)
    row = comparison.frame.iloc[0]
    assert row["kind"] == "stop_set" and not row["ids_equal"]
    assert (row["n_reference"], row["n_candidate"], row["first_divergence"]) == (4, 6, 4)
    assert str(comparison).endswith(
        "stop sets differ: {77, 96} and {96}, outputs agree up to the stop"
    )
    swapped = {"reference_stop_ids": (96,), "candidate_stop_ids": (77, 96)}
    assert only(b, a, **swapped)["kind"] == "stop_set"  # whichever side stops


@pytest.mark.parametrize("stops", [(77, 96), None])
def test_a_shorter_output_under_one_stop_set_is_a_difference_of_length(stops):
    options = {"reference_stop_ids": stops, "candidate_stop_ids": stops}
    a, b = record([17, 22], finish_reason="length"), record([17, 22, 71])
    assert only(a, b, **options)["kind"] == "length"
    a = record([17, 77], finish_reason="stop")  # the candidate ran past an end id of its own
    assert only(a, record([17, 77, 65]), **options)["kind"] == "length"


def test_a_difference_before_the_stop_is_content():
    stops = {"reference_stop_ids": (77,), "candidate_stop_ids": (96,)}
    a = record([17, 22, 77], finish_reason="stop")
    assert only(a, record([17, 23, 77, 65]), **stops)["kind"] == "content"


def test_t0_trimmed_at_the_union_of_end_ids_agrees_to_the_stop():
    """Row S ends after 4 tokens for one side; the other knows 96 alone and goes on."""
    t0 = build_t0()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    batch = torch.tensor([[0] * 5 + list(PROMPT_S), PROMPT_L])
    out = t0.generate(batch, attention_mask=(batch != 0).long(), eos_token_id=[77, 96], **options)
    other = t0.generate(torch.tensor([PROMPT_S]), eos_token_id=[96], **options)[0, 4:].tolist()
    row_s = out[0, 9:].tolist()
    assert row_s == [17, 22, 71, 77] + [0] * 8  # with its pad tail
    trimmed = record(row_s[:4], finish_reason="stop")
    stops = {"reference_stop_ids": (77, 96), "candidate_stop_ids": (96,)}
    row = only(trimmed, record(other), **stops)
    assert row["kind"] == "stop_set" and (row["n_reference"], row["n_candidate"]) == (4, 12)
    untrimmed = only(record(row_s), record(other), **stops)
    assert untrimmed["kind"] == "content"  # what the pad tail would have been taken for


# Texts


def test_white_space_alone_is_named():
    row = only(record([1, 2], "a  b\n"), record([1, 3], "a b"))
    assert row["kind"] == "whitespace" and row["whitespace_only"] and not row["text_equal"]
    row = only(record([1, 2], "ab"), record([1, 3], "ac"))
    assert row["kind"] == "content" and not row["whitespace_only"]


def test_equal_texts_from_other_ids_stay_a_difference_of_ids():
    comparison = compare_tokens([record([1, 2], "ab")], [record([3], "ab")])
    assert comparison.text_share == 1.0 and comparison.exact_share == 0.0
    assert comparison.frame["kind"].tolist() == ["content"]


def test_texts_are_compared_where_no_ids_are():
    a, b = record(None, "x y"), record(None, "x  y")
    comparison = compare_tokens([a], [b])
    row = comparison.frame.iloc[0]
    assert row["kind"] == "whitespace" and comparison.frame["first_divergence"].isna().all()
    assert only(a, record(None, "z"))["kind"] == "text_only"
    assert only(a, record(None, "x y"))["kind"] == "equal"


def test_an_empty_output_is_a_record_like_any_other():
    assert only(record([]), record([]))["kind"] == "equal"
    row = only(record([], finish_reason="stop"), record([4]))
    assert row["kind"] == "length" and row["first_divergence"] == 0


# What stops a comparison


def test_a_second_bos_stops_the_comparison():
    a = record([1], prompt_ids=(257, 256))
    b = record([2], prompt_ids=(257, 257, 256))
    for pair in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=r"prompts differ at position 1 \(extra BOS\)"):
            compare_tokens(*[[x] for x in pair])


def test_other_prompts_stop_the_comparison():
    a, b = record([1], prompt_ids=(5, 6)), record([1], prompt_ids=(5, 7))
    with pytest.raises(ValueError, match=r"'p': prompts differ at position 1 \(2 and 2 tokens\)"):
        compare_tokens([a], [b])
    assert only(record([1], prompt_ids=()), b)["kind"] == "equal"  # text files tell no prompt ids


def test_missing_and_doubled_pairs_are_named():
    one, two = record([1], prompt_id="a"), record([1], prompt_id="b", sample_index=3)
    with pytest.raises(ValueError, match=r"`candidate` lacks 1 of .*pairs: 'b' sample 3"):
        compare_tokens([one, two], [one])
    with pytest.raises(ValueError, match=r"`reference` lacks 1 of .*pairs: 'b' sample 3"):
        compare_tokens([one], [one, two])
    with pytest.raises(ValueError, match="`candidate` holds prompt 'a', sample 0 more than once"):
        compare_tokens([one], [one, one])
    with pytest.raises(ValueError, match="`reference` must hold at least one record; got none"):
        compare_tokens([], [one])


def test_what_a_model_wrote_is_escaped():
    a, b = record([1], "<script>", prompt_id="<b>"), record([2], "x", prompt_id="<b>")
    shown = compare_tokens([a], [b])._repr_html_()
    assert "<b>" not in shown and "&lt;b&gt;" in shown
