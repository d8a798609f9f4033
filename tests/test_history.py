"""Call history: stale buffers, kept state and overwritten outputs are seen."""

import pytest
import torch

from lossless_lab.numerical.history import call_history

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
