"""B11: a sliding window off by one is right for short texts and seen around the window."""

import pytest
import torch

from lossless_lab import mutants
from lossless_lab.engines import TransformersEngine
from lossless_lab.engines.windows import WindowNotExercised, sliding_windows, window_consistency

PROMPT = [1, 5, 9, 13, 22, 31, 44, 57, 60, 71, 3, 8]


def network(kind):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
        "sliding_window": 8, "head_dim": 16, "bos_token_id": 1, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "gemma3":
            config = Gemma3TextConfig(num_hidden_layers=6, query_pre_attn_scalar=16, **sizes)
            return Gemma3ForCausalLM(config).eval()
        return MistralForCausalLM(MistralConfig(num_hidden_layers=3, **sizes)).eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_cached_equals_uncached_around_the_window(kind, cache):
    model = network(kind)
    assert sliding_windows(model.config) == (8,)
    uncached = TransformersEngine(model, cache="none")
    found = window_consistency(uncached, TransformersEngine(model, cache=cache), PROMPT)
    assert found["prompt_length"].tolist() == [6, 7, 8, 9, 10]
    assert found["passes_window"].all() and found["first_divergence"].isna().all()
    assert found["max_abs_difference"].max() < 1e-4


@pytest.mark.parametrize(("name", "dose"), [("window-wide", 1), ("window-narrow", 2)])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_a_window_off_by_one_or_two_is_caught_and_only_past_it(kind, name, dose):
    model = network(kind)
    broken = mutants.MUTANTS[name].apply(model, dose=dose)
    uncached = TransformersEngine(model, cache="none")
    found = window_consistency(uncached, TransformersEngine(broken), PROMPT)
    assert found["max_abs_difference"].min() > 1e-3
    with pytest.warns(WindowNotExercised, match="the window is"):
        short = window_consistency(
            uncached, TransformersEngine(broken), PROMPT, lengths=[2, 3], n_tokens=2
        )
    assert short["max_abs_difference"].max() < 1e-4, "right for short texts, and so the warning"


def test_windows_of_gpt_neo_s_local_layers():
    from transformers import GPTNeoConfig

    for kinds, widths in ((["global", "local"], (4,)), (["global", "global"], ())):
        config = GPTNeoConfig(num_layers=2, attention_types=[[kinds, 1]], window_size=4)
        assert sliding_windows(config) == widths


def test_no_window_and_short_prompts_are_named(t0):
    engine = TransformersEngine(t0)
    with pytest.warns(WindowNotExercised, match="has no window"):
        window_consistency(engine, engine, PROMPT)
    windowed = TransformersEngine(network("mistral"))
    with pytest.raises(ValueError, match="must have 10 ids or more; got 3"):
        window_consistency(windowed, windowed, PROMPT[:3])
