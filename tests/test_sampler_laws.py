"""The laws of samplers against transformers' own processors and warpers, with ties and borders."""

import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lossless_lab.statistical.sampler_laws import ORDERS, penalised, sampler_probs

WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
CASES = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.6, "top_p": 0.5, "min_p": 0.3},
]


def warped(logits, case, order=ORDERS["transformers"]):
    for name in order:
        if name in case:
            logits = WARPERS[name](case[name])(None, logits)
    return logits.softmax(-1)


def laws(request, dtype, n=200, vocab_size=64):
    generator = torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
    widths = torch.rand(n, 1, generator=generator) * 3
    return (torch.randn(n, vocab_size, generator=generator) * widths).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws_equal_those_of_transformers(case, dtype, request):
    logits = laws(request, dtype)
    probs = sampler_probs(logits, **case)
    assert probs.dtype == dtype and torch.equal(probs, warped(logits, case))


@pytest.mark.parametrize("order", ORDERS)
def test_each_engine_has_its_own_order(order, request):
    logits = laws(request, torch.float64)
    case = CASES[-1]
    probs = sampler_probs(logits, **case, order=ORDERS[order])
    assert torch.equal(probs, warped(logits, case, ORDERS[order]))
    assert torch.equal(probs, sampler_probs(logits, **case)) == (order == "transformers")


grid = st.lists(st.integers(-3, 3), min_size=2, max_size=9)  # ties and exact borders abound


@given(
    grid,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(1, 12),
    st.sampled_from([0.25, 0.5, 0.75, 0.99]),
    st.sampled_from([0.05, 0.25, 0.5, 1.0]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_ties_and_borders_fall_as_in_transformers(xs, temperature, top_k, top_p, min_p):
    for case in (
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
        {"top_p": top_p},
        {"min_p": min_p},
    ):
        # powers of two for probabilities, so that sums meet top-p exactly
        logits = torch.tensor([xs]).double() * math.log(2)
        assert torch.equal(sampler_probs(logits, **case), warped(logits, case))


def test_the_law_sums_to_one_in_float64_over_many_chunks(request):
    logits = laws(request, torch.float64, n=50, vocab_size=49_152)
    probs = sampler_probs(logits, temperature=0.8)
    assert (probs.sum(-1) - 1).abs().max() < 1e-9
    assert torch.equal(probs, (logits / 0.8).softmax(-1))


def test_half_precision_logits_give_a_float32_law(request):
    probs = sampler_probs(laws(request, torch.bfloat16))
    assert probs.dtype == torch.float32 and (probs.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1.0, math.nan, math.inf)),
        ("top_k", (-1, 1.5, math.nan)),
        ("top_p", (0.0, -0.5, 1.5, math.nan)),
        ("min_p", (-0.1, 1.5, math.nan)),
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"`{name}` must be .*; got {value}"):
            sampler_probs(torch.zeros(1, 4), **{name: value})


def test_temperature_zero_is_greedy():
    probs = sampler_probs(torch.tensor([[1.0, 3.0, 3.0], [0.0, -math.inf, -1.0]]), temperature=0)
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_the_penalty_equals_that_of_transformers(request):
    logits = laws(request, torch.float32, n=4)
    prompt, output = [3, 5, 5], [9, 3, 60, 9]
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    for t, row in enumerate(penalised(logits, prompt, output, 1.3)):
        context = torch.tensor([[*prompt, *output[:t]]])
        assert torch.equal(row, processor(context, logits[t : t + 1].clone())[0])
