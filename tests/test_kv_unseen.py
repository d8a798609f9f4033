"""Figures that no rule was written for: engine logs, source formulas, live caches, bad files."""

import contextlib
import sys

import pytest
import torch
import transformers

from lossless_lab.kv_cache import CannotEstimate, contiguous, engine, kv_cache_bytes
from lossless_lab.kv_cache.sizes import needed

MIB = 2**20
LLAMA_8B = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "hidden_size": 4096}  # fmt: skip
GEMMA_27B = {"model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
             "num_key_value_heads": 16, "head_dim": 128, "hidden_size": 5376,
             "sliding_window": 1024}  # fmt: skip
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
           "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880,
           "sliding_window": 128}  # fmt: skip
QWEN35_2B = {"model_type": "qwen3_5_text", "num_hidden_layers": 24, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
             "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
             "linear_key_head_dim": 128, "linear_value_head_dim": 128,
             "linear_conv_kernel_dim": 4}  # fmt: skip
GEMMA4_31B = {"model_type": "gemma4_text", "num_hidden_layers": 60, "num_attention_heads": 32,
              "num_key_value_heads": 16, "num_global_key_value_heads": 4, "head_dim": 256,
              "global_head_dim": 512, "hidden_size": 5376, "sliding_window": 1024,
              "attention_k_eq_v": True, "num_kv_shared_layers": 0}  # fmt: skip
GEMMA4_12B = {**GEMMA4_31B, "num_hidden_layers": 48, "num_attention_heads": 16,
              "num_key_value_heads": 8, "num_global_key_value_heads": 1,
              "hidden_size": 3840}  # fmt: skip
GEMMA4_E4B = {**GEMMA4_31B, "num_hidden_layers": 42, "num_attention_heads": 8,
              "num_key_value_heads": 2, "num_global_key_value_heads": None, "hidden_size": 2560,
              "sliding_window": 512, "attention_k_eq_v": False,
              "num_kv_shared_layers": 18}  # fmt: skip
TRINITY = {"model_type": "afmoe", "num_hidden_layers": 56, "num_attention_heads": 8,
           "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 1024,
           "sliding_window": 2048}  # fmt: skip
LING = {"model_type": "deepseek_v3", "num_hidden_layers": 6, "num_attention_heads": 16,
        "num_key_value_heads": 16, "hidden_size": 2048, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}  # fmt: skip
DSV2_LITE = {**LING, "model_type": "deepseek_v2", "num_hidden_layers": 27}


def qwen2(layers, heads, kv_heads, hidden):
    return {"model_type": "qwen2", "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "hidden_size": hidden}  # fmt: skip


def whisper(width, layers, heads):
    return {"model_type": "whisper", "d_model": width, "decoder_layers": layers,
            "encoder_layers": layers, "decoder_attention_heads": heads,
            "encoder_attention_heads": heads}  # fmt: skip


def old(model_type, layers, heads, width, **more):
    return {"model_type": model_type, "n_layer": layers, "n_head": heads, "n_embd": width, **more}


LOGGED = [  # config, arguments, part, MiB, the half of its last digit, source
    (qwen2(24, 14, 2, 896), "tensorrt-llm", {"n_tokens": 190656, "dtype": "fp16"}, None,
     2.18 * 1024, 5.2, "Allocated 2.18 GiB for max tokens in paged KV cache (190656), notes"),
    (qwen2(28, 12, 2, 1536), "tensorrt-llm", {"n_tokens": 273792, "dtype": "fp16"}, None,
     7.31 * 1024, 5.2, "Allocated 7.31 GiB for max tokens in paged KV cache (273792), same"),
    (LLAMA_8B, "TensorRT-LLM", {"n_tokens": 263008, "dtype": "fp8"}, None, 16.05 * 1024, 5.2,
     "Allocated 16.05 GiB for max tokens in paged KV cache (263008), 8219 blocks of 32"),
    (LLAMA_8B, "tensorrt_llm", {"n_tokens": 220480, "dtype": "bf16", "block_size": 64}, None,
     26.91 * 1024, 5.2, "dynamo example: Allocated 26.91 GiB for ... (220480), blocks of 64"),
    (qwen2(64, 40, 8, 5120), "sglang", {"n_tokens": 46611, "tensor_parallel": 4}, None,
     2.84 * 1024, 10.3, "#tokens: 46611, K size: 1.42 GB, V size: 1.42 GB, TP0 of 4"),
    (old("gpt2", 12, 12, 768), "sglang", {"n_tokens": 248479}, None, 8.54 * 1024, 10.3,
     "ovg-project/kvcached: #tokens: 248479, K size: 4.27 GB, V size: 4.27 GB"),
    (GEMMA_27B, "llama.cpp b5440", {"n_batch": 2048, "seq_len": 65536, "dtype": "f16"}, None,
     6368, 0.005, "llama.cpp PR 13194 as tabled on r/LocalLLaMA: 5120 + 1248 MiB"),
    (GEMMA_27B, "llama.cpp b5440 -b 64", {"seq_len": 65536, "dtype": "f16"}, None, 5562.5, 0.5,
     "same table, batch 64: 5120 + 442 MiB in whole MiB, 1088 cells, -fa off by default then"),
    (GPT_OSS, "llama.cpp b6200", {"seq_len": 4096, "dtype": "f16"}, None, 96 + 15, 0.005,
     "16.00 + 15.00 MiB (640 cells): window 128 + ubatch 512, padded to 32 without -fa"),
    (GPT_OSS, "llama.cpp b6200 -fa", {"seq_len": 4096, "dtype": "f16"}, None, 96 + 18, 0.005,
     "src/llama-kv-cache-unified-iswa.cpp: 640 cells padded to 256 with -fa, 768"),
    (QWEN35_2B, "llama-cli", {"seq_len": 65536, "batch_size": 4, "kv_unified": True,
     "dtype": "f16"}, "full", 3072, 0.005, "size = 3072.00 MiB (262144 cells, 6 layers, 4/1 seqs)"),
    (QWEN35_2B, "llama.cpp", {"seq_len": 8192, "batch_size": 4}, "state", 77.06, 0.005,
     "size = 77.06 MiB (4 cells, 24 layers, 4 seqs), R (f32): 5.06 MiB, S (f32): 72.00 MiB"),
    ("qwen3.5-27b", "llama.cpp", {"seq_len": 2048, "batch_size": 4, "n_rs_seq": 2}, "state",
     1795.5, 0.005, "size = 1795.50 MiB (4 cells, 64 layers, 4 seqs 2 rs_seq)"),
    (TRINITY, "llama.cpp", {"seq_len": 131072, "dtype": "f16"}, None, 1792 + 105, 0.005,
     "Trinity Nano: 1792.00 MiB (131072 cells, 14 layers) + 105.00 MiB (2560 cells, 42 layers)"),
    (GEMMA4_12B, "llama.cpp", {"seq_len": 2048, "batch_size": 4, "kv_unified": True,
     "dtype": "q8_0"}, None, 68 + 765, 0.005,
     "Gemma 4 12B: 68.00 MiB (8192 cells, 8 layers) + 765.00 MiB (4608 cells, 40 layers, 4/1)"),
    (GPT_OSS, "llama.cpp -ub 128 -ctk q8_0 -ctv q8_0", {"seq_len": 8192}, None, 102 + 3.19, 0.005,
     "llama.cpp docs/backend/snapdragon: 102.00 MiB + 3.19 MiB (256 cells, 12 layers)"),
    (GEMMA4_E4B, "llama.cpp --swa-full", {"seq_len": 32768, "dtype": "f16"}, "full", 512, 0.005,
     "Gemma 4 E4B: size = 512.00 MiB (32768 cells, 4 layers); layers from 24 on reuse"),
    (DSV2_LITE, "ik_llama.cpp -mla 1 -fa off -ctk q8_KV", {"seq_len": 65536, "dtype": "f16"}, None,
     2713.5, 0.005, "ik_llama.cpp pull 240: c^KV (q8_KV): 985,50 MiB, kv^T (f16): 1728,00 MiB"),
    (DSV2_LITE, "ik_llama.cpp -mla 1 -fa -ctk q8_KV", {"seq_len": 65536, "dtype": "f16"}, None,
     985.5, 0.005, "ik_llama.cpp pull 240: c^KV (q8_KV): 985,50 MiB, kv^T: not used"),
    (DSV2_LITE, "ik_llama.cpp -mla 0 -ctk q8_KV", {"seq_len": 65536, "dtype": "f16"}, None,
     12312, 0.005, "ik_llama.cpp pull 240: K (q8_KV): 5400,00 MiB, V (f16): 6912,00 MiB"),
    (DSV2_LITE, "llama.cpp b5500", {"seq_len": 4096, "dtype": ("q8_0", "f16")}, None,
     27 * 4096 * (576 * 34 / 32 + 512 * 2) / MIB, 0, "llama.cpp pull 12801: V repeats the latent"),
    ("kimi-k2", "ik_llama.cpp -mla 3", {"seq_len": 131072, "dtype": "q8_0"}, None, 4666.5, 0.005,
     "c^KV (q8_0): 4666.50 MiB, kv^T: not used, four GPUs together"),
    ("deepseek-r1", "ik_llama.cpp -m R1-00001.gguf -ngl 99 -mla 3 -fa -amb 512 -fmoe",
     {"seq_len": 16384, "dtype": "q8_0"}, None, 583.31, 0.005,
     "c^KV (q8_0): 583.31 MiB with flags that change no cache"),
    (LING, "llama.cpp", {"seq_len": 4096, "batch_size": 2, "dtype": "f16"}, None, 54, 0.005,
     "Ling 3.0: size = 54.00 MiB (4096 cells, 6 layers, 2/2 seqs), V (f16): 0.00 MiB"),
    ({**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}, "llama.cpp",
     {"seq_len": 4096, "dtype": "f16"}, None, 512, 0.005,
     "size = 512.00 MiB (4096 cells, 32 layers, 1/1 seqs)"),
    (old("llama", 0, 0, 0) | {"num_hidden_layers": 60, "num_attention_heads": 52,
     "hidden_size": 6656}, "llama.cpp b500", {"seq_len": 512, "dtype": "f32"}, None, 1560, 0.005,
     "abetlen/llama-cpp-python issue 66: kv self size = 1560.00 MB"),
    (GEMMA4_31B, "vllm", {"seq_len": 262144, "flat": True}, None, 220 * 1024, 51.2,
     "vllm-project/vllm-metal issue 505: 220.0 GiB KV cache is needed, windows ignored"),
    ({"model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16,
      "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 2048}, "vllm",
     {"n_blocks": 175856 // 16}, None, 18.78 * 1024, 5.2,
     "vllm-project/vllm issue 33263: 18.78 GiB, GPU KV cache size: 175,856 tokens"),
    ({**LING, "num_hidden_layers": 27}, "vllm 0.6.4", {"n_blocks": 5373}, None, 35.42 * 1024, 5.2,
     "vllm-project/vllm pull 10927, before: kv_cache_size=35.42GiB, # GPU blocks: 5373"),
    (old("gpt_bigcode", 24, 16, 2048, multi_query=True), "ggml examples/starcoder",
     {"seq_len": 2048, "dtype": "f32"}, None, 768, 0.005,
     "ggml examples/starcoder README: santacoder, memory size = 768.00 MB, n_mem = 49152"),
    ({"model_type": "bloom", "n_layer": 30, "num_attention_heads": 32, "n_embed": 4096},
     "bloomz.cpp", {"seq_len": 512, "dtype": "f32"}, None, 480, 0.005, "bloomz.cpp: 480 MiB"),
    (whisper(1280, 32, 20), "whisper.cpp (2023)", {"seq_len": 448, "dtype": "f16"}, "cross",
     234.38, 0.005, "32 layers x 1500 x 1280 x 2 x 2 B: kv cross size = 234.38 MB"),
]  # fmt: skip


@pytest.mark.parametrize("case", LOGGED, ids=lambda case: case[-1][:40])
def test_what_engines_logged(case):
    config, name, arguments, part, mib, slack, source = case
    config = {k: v for k, v in config.items() if v != 0} if isinstance(config, dict) else config
    found = kv_cache_bytes(config, engine=name, **{"seq_len": 1, "dtype": "bf16", **arguments})
    n_bytes = found.of_kind(part) if part else found.bytes
    assert source and abs(n_bytes / MIB - mib) <= slack, found


def by_layers(n_layers, heads, width, head_dim):
    return {"num_hidden_layers": n_layers, "num_attention_heads": heads, "hidden_size": width,
            "head_dim": head_dim}  # fmt: skip


RWKV6 = {"model_type": "rwkv6", "num_hidden_layers": 24, "hidden_size": 2048, "head_size": 64}
NAS = [{"attention": {"n_heads_in_group": n}} for n in (8, None, 16)]
FORMULAS = [  # config of a family by its own field names, elements of one token or sequence, source
    (old("phi-msft", 24, 32, 2048), 24 * 2 * 2048, "microsoft/phi-1_5 configuration_phi.py"),
    (old("gpt_refact", 32, 32, 2048, multi_query=True), 32 * 2 * 64, "smallcloudai/Refact-1_6B"),
    (old("jais", 40, 40, 5120), 40 * 2 * 5120, "inceptionai/jais-13b"),
    (old("codeshell", 42, 32, 4096, num_query_groups=8), 42 * 2 * 8 * 128, "WisdomShell/CodeShell"),
    ({"model_type": "telechat", "n_layer": 30, "n_head": 32, "hidden_size": 4096}, 30 * 2 * 4096,
     "Tele-AI/telechat-7B"),
    ({**LLAMA_8B, "model_type": "phi3small"}, 32 * 2 * 8 * 128, "microsoft/Phi-3-small-8k"),
    ({**LLAMA_8B, "model_type": "Yi"}, 32 * 2 * 8 * 128, "01-ai/Yi-6B, first files"),
    ({**LLAMA_8B, "model_type": "minicpmv"}, 32 * 2 * 8 * 128, "openbmb/MiniCPM-V-2_6, flat file"),
    ({"model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "n_head_kv": 8,
      "hidden_size": 8192}, 60 * 2 * 8 * 64, "tiiuae/falcon-40b before its conversion"),
    ({"model_type": "RefinedWebModel", "n_layer": 32, "n_head": 71, "hidden_size": 4544,
      "multi_query": True}, 32 * 2 * 64, "tiiuae/falcon-7b before its conversion"),
    ({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096,
      "attn_config": {"attn_type": "multiquery_attention"}}, 32 * 2 * 128, "mosaicml/llm-foundry"),
    ({"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144,
      "attn_config": {"kv_n_heads": 8}}, 40 * 2 * 8 * 128, "databricks/dbrx-base"),
    ({"model_type": "deci", "num_key_value_heads_per_layer": [4, 4, 1, 2],
      **by_layers(4, 32, 4096, 128)}, 11 * 2 * 128, "Deci/DeciLM-7B: KV heads differ by layer"),
    ({"model_type": "llama", "num_key_value_heads_per_layer": [4, 4, 1, 2],
      **by_layers(4, 32, 4096, 128)}, 11 * 2 * 128, "Deci/DeciLM-6b calls itself llama"),
    ({"model_type": "nemotron-nas", "block_configs": NAS, **by_layers(3, 64, 8192, 128)},
     (64 // 8 + 64 // 16) * 2 * 128, "nvidia/Llama-3_3-Nemotron-Super-49B: no attention in one"),
    ({"model_type": "exaone4", "sliding_window": None, **by_layers(30, 32, 2048, 64)},
     30 * 2 * 32 * 64, "LGAI-EXAONE/EXAONE-4.0-1.2B: no window, no pattern"),
    ({"model_type": "minimax_text_01", "num_key_value_heads": 8, **by_layers(16, 64, 6144, 128),
      "attn_type_list": ([0] * 7 + [1]) * 2}, 2 * 2 * 8 * 128 + 14 * 64 * 128 * 128,
     "MiniMaxAI/MiniMax-Text-01: attention in every eighth layer"),
    (RWKV6, 24 * (2 * 2048 + 2048 * 64), "llama.cpp src/llama-hparams.cpp: n_embd_r, n_embd_s"),
    ({"model_type": "rwkv7", "num_hidden_layers": 12, "hidden_size": 768, "head_dim": 64},
     12 * (2 * 768 + 768 * 64), "the same two functions"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "elements", "source"), FORMULAS, ids=lambda v: str(v)[:40])
def test_families_by_their_own_field_names(config, elements, source):
    found = kv_cache_bytes(config, seq_len=1, dtype="f32", state_dtype="f32")
    assert source and found.bytes == 4 * elements, found


def test_a_pattern_of_letters_is_read_as_its_file_means_it():
    # LGAI-EXAONE/EXAONE-4.0-32B: "LLLG", whose 16 global layers transformers lists by position.
    letters = {"model_type": "exaone4", "sliding_window": 4096, "num_key_value_heads": 8,
               "sliding_window_pattern": "LLLG", **by_layers(64, 40, 5120, 128)}  # fmt: skip
    number = transformers.Exaone4Config(**letters | {"sliding_window_pattern": 4})
    sizes = [kv_cache_bytes(c, seq_len=9000).bytes for c in (letters, number)]
    assert sizes[0] == sizes[1] == (48 * 4096 + 16 * 9000) * 8 * 256 * 2


def held(cache):
    """Bytes of every tensor in a cache object, both halves of an encoder-decoder's."""
    halves = ("self_attention_cache", "cross_attention_cache")
    if hasattr(cache, halves[0]):
        return sum(held(getattr(cache, half)) for half in halves)
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def tokens(length):
    return torch.randint(3, 50, (2, length))


T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 16, "vocab_size": 60}
SPARSE = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}


@pytest.mark.parametrize("depths", [(2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize(
    ("family", "more"), [("T5", {}), ("MT5", {}), ("UMT5", {}), ("SwitchTransformers", SPARSE)]
)
def test_only_the_decoders_layers_count(family, more, depths):
    n_encoder, n_decoder = depths
    fields = {**T5, **more, "num_layers": n_encoder, "num_decoder_layers": n_decoder}
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=tokens(5)).last_hidden_state
        cache = model.decoder(tokens(7), encoder_hidden_states=encoded, use_cache=True)["cache"]
    for source in (config, config.to_dict(), {"model_type": config.model_type, **fields}):
        asked = {"seq_len": 7, "batch_size": 2, "encoder_len": 5, "dtype": "f32"}
        assert kv_cache_bytes(source, engine="transformers", **asked).bytes == held(cache)


def test_heads_that_the_class_computes_need_not_be_stated():
    fields = {"num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8,
              "hidden_size": 32, "num_experts_per_tok": 2}  # fmt: skip
    config = transformers.JetMoeConfig(
        **fields, num_local_experts=4, intermediate_size=16, vocab_size=60
    )
    with torch.no_grad():
        cache = transformers.JetMoeForCausalLM(config).eval()(tokens(5), use_cache=True)["cache"]
    file = {"model_type": "jetmoe", **fields}
    asked = {"seq_len": 5, "batch_size": 2, "dtype": "f32", "engine": "hf"}
    assert kv_cache_bytes(file, **asked).bytes == held(cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rwkv_keeps_five_vectors_per_layer(dtype):
    config = transformers.RwkvConfig(hidden_size=64, num_hidden_layers=3, vocab_size=100)
    model = transformers.RwkvForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        states = model(tokens(7), use_cache=True).state
    asked = {"seq_len": 7, "batch_size": 2, "dtype": dtype}
    found = kv_cache_bytes(config, engine="huggingface", **asked)
    assert found.bytes == sum(state.nbytes for state in states)
    assert found.bytes_per_token == 0


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("transformers 5.24.0 (StaticCache)", "cache", "static"),
        ("transformers (HybridCache)", "cache", "static"),
        ("transformers 4.44 SlidingWindowCache", "cache", "static"),
        ("transformers 4.44 (QuantizedCache)", "cache", "quanto"),
        ("hf transformers HQQQuantizedCache", "cache", "hqq"),
        ("transformers (OffloadedCache)", "cache", "dynamic"),
        ("Hugging Face (EncoderDecoderCache)", "cache", "dynamic"),
        ("llama.cpp b6000", "flash_attn", False), ("llama.cpp b6000 -fa", "flash_attn", True),
        ("llama.cpp", "flash_attn", True), ("llama.cpp b7000 -fa off", "flash_attn", False),
        ("ik_llama.cpp", "flash_attn", True), ("llama-bench b6500", "version", "6500"),
    ],
)  # fmt: skip
def test_names_of_engines_and_caches(text, option, value):
    assert getattr(engine(text), option) == value


def test_a_wrappers_version_is_no_build():
    for text in ("llama-cpp-python 0.3.2", "llama.cpp 0.2"):
        with pytest.raises(ValueError, match=r"`version` '0.* is no build number of llama.cpp"):
            kv_cache_bytes(LLAMA_8B, seq_len=1, dtype="f16", engine=text)


DBRX = {"model_type": "dbrx", "n_layers": 2, "n_heads": 4, "d_model": 64}
DECI = {"model_type": "deci", **by_layers(2, 8, 64, 8)}
NEMOTRON = {**DECI, "model_type": "nemotron-nas"}
CHATGLM = {"model_type": "chatglm", "num_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
           "kv_channels": 16, "multi_query_attention": True}  # fmt: skip
FALCON = {"model_type": "falcon", "n_layer": 2, "n_head": 4, "hidden_size": 64, "n_head_kv": 3}
JAMBA = {"model_type": "jamba", "attn_layer_period": 0, "mamba_d_state": 16,
         **by_layers(4, 4, 64, 16)}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (DBRX, "`kv_n_heads` is missing"), ({**DBRX, "attn_config": None}, "`kv_n_heads` is miss"),
        ({**DBRX, "attn_config": {"kv_n_heads": 0}}, "`kv_n_heads` is missing"),
        ({**DBRX, "attn_config": {"kv_n_heads": -2}}, "4 attention heads, no multiple of -2"),
        ({**DBRX, "attn_config": {"kv_n_heads": 3}}, "`num_attention_heads` 4 is not a multiple"),
        ({**DBRX, "attn_config": {"kv_n_heads": "2"}}, "kv_n_heads"),
        ({"model_type": "minimax_m1", **by_layers(4, 4, 64, 16)}, "`layer_types` is missing"),
        (CHATGLM, "`multi_query_group_num` is missing"), (FALCON, "no multiple of 3 KV heads"),
        (DECI, "`num_key_value_heads_per_layer` is missing"),
        ({**DECI, "num_key_value_heads_per_layer": [2]}, r"heads of 2 layers are \[2\]"),
        ({**DECI, "num_key_value_heads_per_layer": 2}, "heads of 2 layers are 2"),
        ({**DECI, "num_key_value_heads_per_layer": [2, "2"]}, "`kv_heads_by_layer` is '2'"),
        ({**DECI, "num_key_value_heads_per_layer": [2, 3]}, "layer 1 has 8 attention heads"),
        (NEMOTRON, "`block_configs` is missing"),
        ({**NEMOTRON, "block_configs": [1, 2]}, "`block_configs` has no `n_heads_in_group`"),
        ({**NEMOTRON, "block_configs": 5}, "`block_configs` has no `n_heads_in_group`"),
        ({**NEMOTRON, "block_configs": NAS}, "heads of 2 layers are"),
        ({k: v for k, v in RWKV6.items() if k != "head_size"}, "`head_size` is missing"),
        ({**RWKV6, "head_size": "64"}, "`head_size` is '64'"),
        ({"model_type": "rwkv", "num_hidden_layers": 2}, "`hidden_size` is missing"),
        (JAMBA, "`attn_layer_period` is 0"), (old("openai-gpt", 2, 4, 64), "without a cache"),
        ({"model_type": "bloom", "n_layer": 2, "n_head": 4}, "`hidden_size` is missing"),
        ({**LLAMA_8B, "num_key_value_heads": [8, 8]}, "num_key_value_heads"),
        ({**GEMMA_27B, "sliding_window": None}, "`sliding_window` is missing"),
        ({**GEMMA_27B, "sliding_window": [1024]}, "sliding_window"),
        ({**GEMMA_27B, "layer_types": ["full_attention"]}, "num_hidden_layers"),
    ],
    ids=lambda value: str(value)[-40:],
)  # fmt: skip
def test_what_a_file_leaves_open_gives_no_number(config, said):
    with pytest.raises(CannotEstimate, match=said):
        kv_cache_bytes(config, seq_len=8)


MUTANTS = [  # what the rules above would miss: (module, name, mutated)
    ("geometry", "needed", lambda config, *names: needed(config, *names[::-1])),
    ("geometry", "_kv_heads", lambda config, kind: config.num_attention_heads),
    ("configs", "_kv_heads_of", lambda blocks, n_heads: [n_heads] * len(blocks)),
]


@pytest.mark.parametrize(("module", "name", "mutated"), MUTANTS, ids=lambda v: str(v)[:20])
def test_a_broken_rule_is_seen(module, name, mutated, monkeypatch):
    t5 = {"model_type": "t5", **T5, "num_layers": 2, "num_decoder_layers": 3}

    def all_hold():
        found = kv_cache_bytes(t5, seq_len=1, encoder_len=1, dtype="f32").bytes
        rows = [4 * elements for _, elements, _ in FORMULAS]
        ours = [kv_cache_bytes(c, seq_len=1, dtype="f32", state_dtype="f32").bytes
                for c, *_ in FORMULAS]  # fmt: skip
        return found == 3 * 4 * 16 * 4 * 2 and rows == ours

    assert all_hold()
    monkeypatch.setattr(sys.modules[f"lossless_lab.kv_cache.{module}"], name, mutated)
    with contextlib.suppress(AttributeError, CannotEstimate):  # seen too
        assert not all_hold()


def test_a_build_that_forgot_its_default_is_seen(monkeypatch):
    asked = {"seq_len": 4096, "dtype": "f16", "engine": "llama.cpp b6200"}
    assert kv_cache_bytes(GPT_OSS, **asked).bytes == 111 * MIB
    monkeypatch.setattr(contiguous.LlamaCpp, "padding", 256)
    assert kv_cache_bytes(GPT_OSS, **asked).bytes != 111 * MIB
