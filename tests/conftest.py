"""Fixtures that several test files share: T0 and G0, the bundled tiny pair, SmolLM2."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: two threads only wait for each other

import sys

import pytest
import torch

PROMPT_S = (1, 5, 9, 13)
PROMPT_L = (1, 7, 8, 11, 15, 20, 33, 41, 50)
# Greedy, 20 new tokens from PROMPT_S on T0 in float32.
T0_GREEDY_S = (17, 22, 71, 77, 65, 46, 64, 46, 95, 56, 62, 62, 62, 82, 32, 72, 46, 62, 62, 82)


def build_t0(dtype=torch.float32, **changes):
    """A fresh T0: the Llama with seeded random weights of the known-failure cases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    } | changes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**config)).eval().to(dtype)


def build_g0(**changes):
    """A fresh G0: same width, depth and vocabulary as T0, learned absolute positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {
        "vocab_size": 97,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    } | changes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**config)).eval()


@pytest.fixture(scope="session")
def t0():
    """T0 in float32; treat it as read-only (use `build_t0` for a copy of your own)."""
    return build_t0()


@pytest.fixture(scope="session")
def g0():
    """G0 in float32; treat it as read-only."""
    return build_g0()


@pytest.fixture(scope="session")
def tiny_target():
    """The bundled target model, loaded once; read-only."""
    from lossless_lab import models

    return models.load("tiny-target")


@pytest.fixture(scope="session")
def tiny_draft():
    """The bundled draft model, loaded once; read-only."""
    from lossless_lab import models

    return models.load("tiny-draft")


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2 in float32; skipped where it was not fetched, fetched first in CI."""
    from lossless_lab import models

    if not models.is_present("smollm2"):
        if not os.environ.get("CI"):
            pytest.skip("smollm2 is not on this machine: run `lossless-lab models fetch smollm2`")
        models.fetch("smollm2")
    return models.load("smollm2")


@pytest.fixture(autouse=True)
def _no_compiled_code_of_other_tests():
    """Each test compiles for itself: what another backend compiled for the same code is dropped."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    yield
