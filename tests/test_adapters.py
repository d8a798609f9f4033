"""Merging an adapter: exact algebra, told apart from the rounding of the merged weights (B40)."""

import dataclasses

import pytest
import torch
from conftest import PROMPT_S, build_g0, build_t0

from lossless_lab import check, optimizations
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.number_formats import round_to
from lossless_lab.optimizations.adapters import merged, with_adapters
from lossless_lab.optimizations.quantization import already_on_grid, matrices, quantized
from lossless_lab.optimizations.witness import observe

PROMPT = [1, 5, 9, 13, 22, 31]
PROMPTS = [PROMPT, *([2 + i, 7, 8, 11, 3] for i in range(6))]
LONG = Decoding(max_new_tokens=30, stop_token_ids=())


def logits(network, ids=PROMPT):
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0].float()


def answer(network, entry):
    return check(network, entry, PROMPTS, decoding=LONG, progress=False)


def test_an_adapter_is_what_lora_says():
    """W x + (alpha / r) B A x by hand, on one layer and through the network's logits."""
    plain, adapted = build_t0(), with_adapters(build_t0())
    layer = adapted.model.layers[1].self_attn.k_proj
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    weight = plain.model.layers[1].self_attn.k_proj.weight
    expected = x @ (weight + 32 / 8 * layer.lora_B @ layer.lora_A).T
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert float((logits(plain) - logits(adapted)).abs().max()) > 0.5
    names = [n for n, _ in adapted.named_modules() if n.endswith("base_layer")]
    assert len(names) == 9


def test_in_float32_the_algebra_is_proven_by_the_floor_and_equal_tokens():
    """Merged weights are rounded in float32 too: about the floor, at times just above it."""
    found = answer(with_adapters(build_t0()), merged())
    assert found["1a"].word == "DIFFERENT" and found["1c"].estimate < 3
    assert found["1b"].estimate == 0
    assert found.witness == "9 adapters merged, none left"
    good = logits(merged().apply(with_adapters(build_t0())).network)
    assert float((logits(with_adapters(build_t0())) - good).abs().max()) < 3e-5


def test_in_bfloat16_it_differs_and_the_cause_is_the_rounding_of_merged_weights():
    found = answer(with_adapters(build_t0()).bfloat16(), merged())
    assert found["1b"].word == "DIFFERENT" and found["1c"].word == "DIFFERENT"
    assert "rounding of the changed weights in bfloat16 (control: " in found.cause
    assert "differing prompts identical in float32" in found.cause and "margin" in found.cause
    adapted = with_adapters(build_t0()).bfloat16()
    apart = (logits(adapted) - logits(merged().apply(adapted).network)).abs().max()
    assert 0.02 < float(apart) < 1  # the issue's own adapter gave 0.195


def test_into_a_four_bit_base_the_weights_are_rounded_to_its_format_again():
    adapted = with_adapters(quantized("nf4").apply(build_t0()).network)
    entry = merged("nf4")
    made = entry.apply(adapted).network
    layer = adapted.model.layers[0].self_attn.q_proj
    whole = layer.base_layer.weight + 4.0 * layer.lora_B @ layer.lora_A
    expected = round_to(whole, "nf4")
    assert torch.allclose(made.model.layers[0].self_attn.q_proj.weight, expected, atol=1e-6)
    assert len(already_on_grid(made, "nf4")) == len(dict(matrices(made)))
    found = answer(adapted, entry)
    assert entry.level == "3" and found["1b"].word == "DIFFERENT"
    plain = merged().apply(adapted).network  # not rounded again: exact, and no longer 4 bits
    assert float((logits(plain) - logits(adapted)).abs().max()) < 3e-5
    assert len(already_on_grid(plain, "nf4")) == len(dict(matrices(plain))) - 9


def test_the_witness_sees_the_entry_and_not_its_absence():
    adapted, entry = with_adapters(build_t0()), optimizations.find("merge-adapters")
    idle = dataclasses.replace(entry, transform=lambda network: (network, {}))

    def said(which):
        made = which.apply(adapted).network
        engine = TransformersEngine(made)
        short = Decoding(max_new_tokens=2, stop_token_ids=())
        return entry.witness(observe(made, lambda: engine.generate([PROMPT_S], short, seed=0)))

    assert said(entry) and said(idle) == ""
    good, bad = (logits(e.apply(adapted).network) for e in (entry, entry.poisoned()))
    assert float((good - bad).abs().max()) > 0.05


@pytest.mark.parametrize("nothing", [{"alpha": 0.0}, {"std": 0.0}])
def test_adapters_that_add_nothing_are_vacuous(nothing):
    found = answer(with_adapters(build_t0(), **nothing), merged())
    assert {a.word for a in found.answers} == {"VACUOUS"}
    assert "the 9 adapters added nothing" in found.sentence
    rounded = answer(with_adapters(build_t0(), **nothing), merged("nf4"))
    assert rounded["1a"].word == "DIFFERENT"  # the base's own weights are rounded


def test_a_delta_that_is_rounded_away_is_no_vacuous_merge():
    """Weights of 1 are too coarse in bfloat16 to take it in; some outputs were not."""
    plain = build_t0()
    for layer in plain.model.layers:
        torch.nn.init.ones_(layer.self_attn.q_proj.weight)
    adapted = with_adapters(plain, std=1.5e-4, modules=["q_proj"]).bfloat16()
    made = merged().apply(adapted).network
    assert all(bool((layer.self_attn.q_proj.weight == 1).all()) for layer in made.model.layers)
    assert not made.adapters_idle


def test_what_cannot_carry_or_merge_adapters_is_refused():
    with pytest.raises(ValueError, match="no adapter to merge"):
        merged().apply(build_t0())
    with pytest.raises(ValueError, match="no linear layer named q_proj, k_proj, v_proj"):
        with_adapters(build_g0())


def test_a_merge_that_would_change_the_embeddings_too_is_refused():
    tied = build_t0()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    before = tied.model.embed_tokens.weight.clone()
    adapted = with_adapters(tied, modules=["lm_head"])
    with pytest.raises(ValueError, match=r"`lm_head` has those of `model.embed_tokens`"):
        merged().apply(adapted)
    assert adapted.model.embed_tokens.weight.equal(before)
    others = merged().apply(with_adapters(tied)).network
    assert others.adapters_merged == 9
