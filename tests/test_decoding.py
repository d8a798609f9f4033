"""Decoding: every field stated and validated; what a checkpoint declares (case B28)."""

import pytest
from conftest import PROMPT_S, build_t0

from lossless_lab.engines import Decoding, TransformersEngine, declared, leaks, stop_token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", True),
        ("seed", 2**63),
        ("n_samples", 0),
        ("stop_token_ids", (3, -1)),
    ],
)
def test_a_bad_value_is_named_with_its_rule(field, value):
    with pytest.raises(ValueError, match=rf"`{field}.*must be.*got"):
        Decoding(**{field: value})


def test_stop_ids_are_a_set():
    assert Decoding(stop_token_ids=(96, 77, 96)).stop_token_ids == (77, 96)
    assert Decoding(stop_token_ids=()).stop_token_ids == ()


def test_union_of_declared_end_ids():
    from types import SimpleNamespace

    tokenizer = SimpleNamespace(eos_token_id=5)
    assert stop_token_ids({"eos_token_id": [77, 96]}, {"eos_token_id": 2}, tokenizer) == (
        *(2, 5, 77, 96),
    )
    assert stop_token_ids(None, {"eos_token_id": None}) == ()


def test_zero_temperature_is_greedy_and_recorded_as_zero():
    assert Decoding(temperature=0).greedy
    assert Decoding(temperature=0.0).temperature == 0.0
    assert not Decoding(temperature=1e-7).greedy


def opinionated():
    """T0 whose checkpoint declares a penalty and sampling (case B28)."""
    network = build_t0()
    network.generation_config.repetition_penalty = 1.5
    network.generation_config.do_sample = True
    network.generation_config.temperature = 0.7
    return network


def test_b28_the_checkpoint_does_not_leak(tmp_path):
    import torch
    from transformers import LlamaForCausalLM

    network = opinionated()
    config, before = network.generation_config, network.generation_config.to_dict()
    plain = build_t0()
    ids = torch.tensor([PROMPT_S])
    neutral = plain.generate(ids, do_sample=False, max_new_tokens=20)[0, 4:].tolist()
    leaking = network.generate(ids, do_sample=False, max_new_tokens=20)[0, 4:].tolist()
    assert leaking != neutral and leaking[:7] == neutral[:7]  # the fault is there to be avoided
    decoding = Decoding(max_new_tokens=20)
    (ours,) = TransformersEngine(network).generate([PROMPT_S], decoding, seed=0)
    assert list(ours.output_ids) == neutral
    assert network.generation_config is config and config.to_dict() == before
    # what would have been imposed is shown, and survives a reload
    network.save_pretrained(tmp_path)
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path)
    for source in (network, reloaded, before):
        shown = leaks(source, decoding).set_index("field")["checkpoint"].to_dict()
        assert shown == {"repetition_penalty": 1.5, "do_sample": True, "temperature": 0.7}
    described = TransformersEngine(network).describe()["checkpoint_decoding"]
    assert described == {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.5}


def test_b28_the_checkpoint_settings_can_be_asked_for_openly():
    import torch

    network = opinionated()
    decoding = Decoding.from_checkpoint(network, max_new_tokens=20)
    assert (decoding.temperature, decoding.repetition_penalty, decoding.top_k) == (0.7, 1.5, 50)
    assert leaks(network, decoding).empty
    (ours,) = TransformersEngine(network).generate([PROMPT_S], decoding, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        bare = network.generate(torch.tensor([PROMPT_S]), max_new_tokens=20)
    assert list(ours.output_ids) == bare[0, 4:].tolist()
    greedy = Decoding.from_checkpoint(network, max_new_tokens=20, temperature=0.0)
    (ours,) = TransformersEngine(network).generate([PROMPT_S], greedy, seed=0)
    bare = network.generate(torch.tensor([PROMPT_S]), do_sample=False, max_new_tokens=20)
    assert list(ours.output_ids) == bare[0, 4:].tolist()


def test_settings_without_a_field_are_refused_not_dropped():
    with pytest.raises(ValueError, match="no_repeat_ngram_size=3"):
        Decoding.from_checkpoint({"no_repeat_ngram_size": 3})


def test_neutral_values_of_a_checkpoint_are_no_leak():
    assert declared({"temperature": 1.0, "top_p": 1.0, "num_beams": 1, "eos_token_id": 2}) == {}
    assert leaks({"top_k": 50}, Decoding(temperature=1.0, top_k=50)).empty
