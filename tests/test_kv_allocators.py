"""What engines reserve, against figures their logs and unit tests print."""

import pytest

from lossless_lab.kv_cache import capacity, engine, geometry, kv_cache_bytes
from lossless_lab.kv_cache.allocators import Request
from lossless_lab.kv_cache.configs import bundled
from lossless_lab.kv_cache.formats import storage_formats

MIB = 2**20


def cells(model, kind, **options):
    size = kv_cache_bytes(model, **options)
    return next(part.cells for part in size.parts if part.kind == kind)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama.cpp", 768),  # PAD(128 + 512, 256)
        ("llama.cpp b7000 -ub 256", 512),  # PAD(128 + 256, 256)
        ("llama.cpp b6900", 640),  # no padding between two pull requests
        ("llama.cpp b6500 -fa off", 640),  # padded to 32 without flash attention
        ("llama.cpp b6500", 768),  # padded to 256 with it
        ("llama.cpp b5450 -fa off", 2176),  # the whole batch of 2,048 at first
        ("llama.cpp b5000", 8192),  # before window caches
        ("llama.cpp b7000 --swa-full", 8192),
        ("llama.cpp --swa-full", 8192),
        ("ik_llama.cpp", 8192),
    ],
)
def test_window_cells_of_gpt_oss_by_build(text, expected):
    assert cells("gpt-oss-20b", "sliding", seq_len=8192, engine=text) == expected


def test_llama_cpp_sequences_unified_and_not():
    options = {"seq_len": 1000, "batch_size": 4, "engine": "llama.cpp"}
    assert cells("llama-3.1-8b", "full", **options) == 4 * 1024
    assert cells("llama-3.1-8b", "full", kv_unified=True, **options) == 4096
    # window x sequences + micro-batch in a shared cache: PAD(4 x 128 + 512, 256)
    assert cells("gpt-oss-20b", "sliding", kv_unified=True, **options) == 1024
    # gpt-oss-20b at q8_0, 131,072 cells, 12 layers prints 1,632 MiB
    size = kv_cache_bytes("gpt-oss-20b", seq_len=131072, dtype="q8_0", engine="llama.cpp")
    assert size.of_kind("full") == 1632 * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [("b1000", 1000), ("b2000", 1024), ("b2800 -fa off", 1024), ("b6500 -fa off", 1024),
     ("b6500", 1024), ("b6900", 1000), ("", 1024)],
)  # fmt: skip
def test_llama_cpp_pads_the_context_by_build(text, expected):
    assert cells("llama-2-7b", "full", seq_len=1000, engine=f"llama.cpp {text}") == expected


def test_llama_cpp_gives_full_context_where_every_layer_slides():
    size = kv_cache_bytes("mistral-7b-v0.1", seq_len=32768, dtype="f16", engine="llama.cpp")
    assert size.bytes == 32768 * 131_072


def test_llama_cpp_mla_by_build():
    size = {
        text: kv_cache_bytes("deepseek-r1", seq_len=256, dtype="f16", engine=text).bytes
        for text in ("llama.cpp", "llama.cpp b7000", "llama.cpp b5000")
    }
    assert size["llama.cpp"] == 61 * 576 * 2 * 256
    assert size["llama.cpp b7000"] == 61 * (576 + 512) * 2 * 256
    assert size["llama.cpp b5000"] == 61 * 128 * (192 + 128) * 2 * 256


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [  # "Setting attention block size to N tokens", vLLM 0.18 and 0.19 logs
        ("qwen3.5-9b", "bf16", 528),
        ("qwen3.5-9b", "fp8", 1056),
        ("qwen3.5-27b", "bf16", 784),
        ("qwen3.5-35b-a3b", "bf16", 1056),
        ("qwen3.5-35b-a3b", "fp8", 2096),
        ("qwen3-next-80b-a3b", "bf16", 544),
        ("llama-3.1-8b", "bf16", 16),
    ],
)
def test_vllm_block_of_hybrids(model, dtype, expected):
    key, value = storage_formats(dtype)
    request = Request(seq_len=1, n_sequences=1, key_format=key, value_format=value)
    assert engine("vllm").hybrid_block_size(geometry(model), request) == expected


def test_vllm_block_of_nemotron_with_half_precision_states():
    # LMCache users' table for Nemotron 3 Nano: 1072 tokens with bf16 K and V, 2128 with fp8.
    for dtype, expected in (("bf16", 1072), ("fp8", 2128)):
        key, value = storage_formats(dtype)
        request = Request(seq_len=1, n_sequences=1, key_format=key, value_format=value)
        rules = engine("vllm --mamba-ssm-cache-dtype float16")
        assert rules.hybrid_block_size(geometry("nemotron-3-nano"), request) == expected


def test_vllm_pages_of_a_hybrid_are_padded_to_one_size():
    size = kv_cache_bytes("qwen3.5-35b-a3b", seq_len=8192, engine="vllm 0.18")
    page = 1056 * 2 * 2 * 256 * 2
    assert size.of_kind("state") == 30 * page
    assert size.of_kind("full") == 10 * 8 * page  # ceil(8192 / 1056)
    state = next(part for part in size.parts if part.kind == "state")
    assert page / (state.stored_bytes / 30) - 1 == pytest.approx(0.0076, abs=5e-5)  # as logged


def test_vllm_windows_and_groups():
    # 12 + 12 layers: full ceil(8192/16), sliding ceil(min(127 + 8192, 8192)/16) + 1
    size = kv_cache_bytes("gpt-oss-20b", seq_len=8192, engine="vllm 0.15")
    assert [p.cells for p in sorted(size.parts, key=lambda p: p.kind)] == [8192, 8208]
    few = kv_cache_bytes(
        "gpt-oss-20b", seq_len=8192, engine="vllm 0.15", max_num_batched_tokens=2048
    )
    assert few.of_kind("sliding") == 12 * 2048 * (-(-(127 + 2048) // 16) + 1) * 16
    # 10 full and 52 sliding: groups of 10, so 60 sliding layers are paid for
    new = kv_cache_bytes("gemma-3-27b", seq_len=16384, engine="vllm 0.15")
    old = kv_cache_bytes("gemma-3-27b", seq_len=16384, engine="vllm 0.11")
    assert new.of_kind("sliding") * 52 == old.of_kind("sliding") * 60
    flat = kv_cache_bytes("gemma-3-27b", seq_len=16384, engine="vllm 0.9")
    assert flat.bytes == 62 * 16384 * 16 * 256 * 2


def test_vllm_chunks_keep_one_chunk_and_the_batch():
    size = kv_cache_bytes(
        "llama-4-scout", seq_len=65536, engine="vllm 0.11", max_num_batched_tokens=4096
    )
    assert size.of_kind("chunked") == 36 * (8192 + 4096) * 8 * 256 * 2


def test_vllm_counts_one_more_token_as_a_block_more():
    # vLLM's unit test: 16,384 tokens of 32 layers, 32 heads of 128 need 8 GiB; 16,385 do not fit.
    config = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
              "hidden_size": 4096}  # fmt: skip
    room = capacity(config, memory_bytes=2**33, seq_len=1, weights=0, activations=0, engine="vllm",
                    framework_bytes=0, utilization=1.0, dtype="f16")  # fmt: skip
    assert room.max_seq_len == 16384


def test_sglang_has_a_padding_slot():
    size = kv_cache_bytes("llama-3.1-8b", seq_len=1, engine="sglang", n_tokens=1000)
    assert size.bytes == 1001 * 131_072
    paged = kv_cache_bytes("llama-3.1-8b", seq_len=100, engine="sglang --page-size 64")
    assert paged.bytes == (128 + 64) * 131_072


def test_an_indexer_key_is_kept_in_fp8_with_a_scale_by_serving_engines():
    for name in ("vllm", "sglang"):
        size = kv_cache_bytes("deepseek-v3.2", seq_len=64, engine=name)
        part = next(part for part in size.parts if part.kind == "indexer")
        assert part.row_bytes == 132


def test_whisper_cpp_beams_share_two_spare_caches():
    one = kv_cache_bytes("whisper-base", seq_len=448, engine="whisper.cpp")
    five = kv_cache_bytes("whisper-base", seq_len=448, engine="whisper.cpp", num_beams=5)
    assert five.of_kind("full") == 7 * one.of_kind("full")
    assert five.of_kind("cross") == one.of_kind("cross")


def test_every_allocator_reserves_at_least_what_is_stored():
    for name in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "ik_llama.cpp"):
        for model in ("llama-3.1-8b", "deepseek-r1", "gemma-3-27b", "qwen3.5-27b"):
            size = kv_cache_bytes(model, seq_len=5000, batch_size=3, engine=name)
            if not (name == "sglang" and model == "gemma-3-27b"):  # a shared pool, see swa_ratio
                assert size.bytes >= size.stored_bytes, (name, model)


@pytest.mark.parametrize(
    ("dtype", "per_token", "fixed_gib", "plain", "plain_gib"),
    [  # printed requirements of Qwen3.5 27B with three MTP tokens, and without: bytes per token of
        # whole blocks, and the constant part, measured on vLLM for each cache format
        ("bfloat16", 69_632, 0.62, 65_536, 0.14), ("fp8", 34_816, 0.63, 32_768, 0.14),
        ("int8_per_token_head", 35_360, 0.63, 33_280, 0.14),
        ("fp8_per_token_head", 35_360, 0.63, 33_280, 0.14),
        ("int4_per_token_head", 17_952, 0.62, 16_896, 0.15),
    ],
)  # fmt: skip
def test_vllm_mtp_layer_joins_the_attention_group(dtype, per_token, fixed_gib, plain, plain_gib):
    for tokens, slope, fixed in ((3, per_token, fixed_gib), (0, plain, plain_gib)):
        rules = engine("vllm", n_speculative_tokens=tokens)
        key, value = storage_formats(dtype)
        asked = Request(seq_len=1, n_sequences=1, key_format=key, value_format=value)
        block = rules.hybrid_block_size(geometry("qwen3.5-27b"), asked)
        one, two = (
            kv_cache_bytes("qwen3.5-27b", seq_len=n * block, dtype=dtype, engine=rules).bytes
            for n in (1, 2)
        )
        assert two - one == block * slope
        assert (2 * one - two) / 2**30 == pytest.approx(fixed, abs=0.011)


def test_vllm_mtp_can_be_off_and_a_draft_joins_the_groups():
    asked = {"seq_len": 8192, "engine": "vllm", "n_speculative_tokens": 3}
    layer = {"model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 24,
             "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 5120}  # fmt: skip
    own = kv_cache_bytes("qwen3.5-27b", **asked)
    assert own.bytes == kv_cache_bytes("qwen3.5-27b", draft=layer, **asked).bytes
    off = kv_cache_bytes("qwen3.5-27b", mtp=False, **asked)
    assert own.bytes * 16 == off.bytes * 17
    assert any("draft" in note for note in own.notes) and not off.notes


def test_nemotron_h_that_states_no_state_dtype_by_release():
    stated = dict(models_config("nemotron-3-nano"))
    silent = {k: v for k, v in stated.items() if k != "mamba_ssm_cache_dtype"}
    sizes = {
        text: kv_cache_bytes(silent, seq_len=1, engine=text).of_kind("state")
        for text in ("vllm 0.19", "vllm 0.20", "vllm 0.19 --mamba-ssm-cache-dtype float32")
    }
    assert sizes["vllm 0.19"] < sizes["vllm 0.20"] and len(set(sizes.values())) == 2
    assert any("mamba_ssm_cache_dtype" in n for n in kv_cache_bytes(silent, seq_len=1).notes)


def models_config(name):
    return bundled()[name]["config"]


def test_llama_cpp_pool_is_shared_or_divided():
    asked = {"batch_size": 4, "engine": "llama.cpp", "n_ctx": 32768}
    assert cells("llama-3.1-8b", "full", seq_len=8192, **asked) == 32768
    assert cells("llama-3.1-8b", "full", seq_len=32768, kv_unified=True, **asked) == 32768
    assert cells("llama-3.1-8b", "full", seq_len=10, **asked) == 32768
    # 1,000 cells for 3 sequences: PAD(333, 256) each
    odd = {"seq_len": 10, "batch_size": 3, "engine": "llama.cpp -c 1000"}
    assert cells("llama-3.1-8b", "full", **odd) == 3 * 512


def test_llama_cpp_widens_v_only_without_flash_attention_and_only_lately():
    shape = {"seq_len": 4096, "dtype": "f16", "swa_full": True}
    names = ("llama.cpp", "llama.cpp -fa off", "llama.cpp b5800 -fa off", "ik_llama.cpp -fa off")
    on, off, old, ik = (kv_cache_bytes("gemma-4-e2b", engine=x, **shape).bytes for x in names)
    assert off > on == old == ik
