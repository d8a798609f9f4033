"""Call history: stale buffers, kept state and overwritten outputs are seen."""

import copy

import pytest
import torch
from conftest import PROMPT_S

from lossless_lab.numerical.history import call_history, prefix_reuse

A, B, C = torch.zeros(1, 3), torch.ones(1, 3), torch.full((1, 2), 5.0)


def test_a_function_of_its_input_alone_is_independent_nan_included():
    assert call_history(lambda x: x * 2, [A, B, C]).independent
    assert call_history(lambda x: x / x * torch.nan, [A, B]).independent


def test_state_kept_between_calls_is_named_with_input_and_predecessor():
    kept = []

    def call(x):
        kept.append(float(x.sum()))
        return x + (1e-6 if len(kept) > 1 and kept[-2] == 3.0 else 0.0)  # only after B

    found = call_history(call, [A, B])
    assert not found.independent
    assert {(i, j) for i, j, _ in found.changed} >= {(0, 1)}
    assert "input 0 moved by 1e-06 after input 1" in str(found)


def test_a_state_that_only_shows_after_one_of_three_inputs_is_found():
    last = [None]

    def call(x):
        stale, last[0] = last[0], x
        return x + (stale is C) * (x is B) * 1.0

    found = call_history(call, [A, B, C])
    assert (1, 2) in {(i, j) for i, j, _ in found.changed}


def test_an_output_that_is_a_reused_buffer_is_overwritten_though_each_answer_is_right():
    buffer = torch.zeros(1, 3)

    def call(x):
        return buffer.copy_(x * 2)

    found = call_history(call, [A, B])
    assert found.overwritten == (0,) and found.changed == ()
    assert "output of input 0 was overwritten" in str(found)


def test_a_cache_extended_in_place_changes_the_shape_and_counts_as_changed():
    rows = []

    def call(x):
        rows.append(x[:, :1])
        return torch.cat(rows, 1)

    assert call_history(call, [A, B]).changed[0][2] == float("inf")


def test_one_input_is_refused():
    with pytest.raises(ValueError, match="two different ones or more; got 1"):
        call_history(lambda x: x, [A])


def test_a_ring_of_as_many_buffers_as_inputs_is_overwritten_later():
    ring, calls = [torch.zeros(1, 3) for _ in range(2)], []

    def call(x):
        calls.append(x)
        return ring[len(calls) % 2].copy_(x * 2)

    found = call_history(call, [A, B])
    assert found.changed == () and found.overwritten


def test_equal_inputs_outputs_that_are_no_tensor_and_signs_of_zero():
    with pytest.raises(ValueError, match="two different ones"):
        call_history(lambda x: x, [A, A.clone()])
    with pytest.raises(ValueError, match="must return a tensor; got tuple"):
        call_history(lambda x: (x,), [A, B])
    minus = iter([1.0, 1.0] + [-1.0] * 20)
    assert not call_history(lambda x: x.abs() * 0 * next(minus), [A, B]).independent


def test_a_cache_handed_on_is_extended_in_place_and_copies_are_not_b14(t0):
    """Against `generate` of the whole text: what a warm copy answers is what a cold run does."""
    prefix, suffixes = PROMPT_S, [[20, 21], [20, 21], [33, 41, 50]]
    found = prefix_reuse(t0, prefix, suffixes).set_index("handed")
    copies, same = found.loc["a copy"], found.loc["the same object"]
    assert copies["cached_tokens"].tolist() == [4, 4, 4]
    assert copies["max_abs_difference"].max() < 1e-4
    assert same["cached_tokens"].tolist() == [4, 6, 8], "grown by each suffix before"
    assert same["max_abs_difference"].iloc[0] < 1e-4 < 0.1 < same["max_abs_difference"].iloc[1]


def test_a_cache_object_passed_to_generate_twice_answers_another_question_b14(t0):
    """The reported case: the first answer is right, the cache grows, the second call fails."""
    ids = torch.tensor([[*PROMPT_S, 20, 21]])
    plain = t0.generate(ids, max_new_tokens=9, do_sample=False)
    with torch.no_grad():
        cache = t0(ids[:, :4], use_cache=True)["cache"]
    options = {"max_new_tokens": 9, "do_sample": False}
    warm = t0.generate(ids, cache=copy.deepcopy(cache), **options)
    assert torch.equal(warm, plain) and cache.get_seq_length() == 4
    assert torch.equal(t0.generate(ids, cache=cache, **options), plain)
    assert cache.get_seq_length() == 14  # prompt and all new tokens but the last
    with pytest.raises(RuntimeError):  # a reshape error in this version of transformers
        t0.generate(ids, cache=cache, **options)
