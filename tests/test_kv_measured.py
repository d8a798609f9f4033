"""Real caches of tiny random models hold exactly the predicted bytes, whatever the architecture."""

import importlib.util
import itertools

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, EncoderDecoderCache, QuantizedCache, StaticCache
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from lossless_lab.kv_cache import kv_cache_bytes, models
from lossless_lab.kv_cache.configs import resolve

BATCH_SIZE, PREFILL, STEPS, WINDOW, ENCODER = 2, 6, 6, 8, 5

# Small sizes under every name that a family may use; a config takes those it has.
SMALL = {
    "attention_chunk_size": WINDOW, "bos_token_id": 1, "chunk_size": 8, "conv_L_cache": 3,
    "conv_kernel": 4, "d_ff": 32, "d_kv": 16, "d_model": 64, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 32, "decoder_layers": 4, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "encoder_layers": 2, "eos_token_id": 2, "expand": 2, "ffn_dim": 32,
    "ffn_hidden_size": 32, "head_dim": 16, "hidden_size": 64, "index_head_dim": 16,
    "index_n_heads": 2, "index_topk": 4, "intermediate_size": 32, "kv_lora_rank": 32,
    "linear_conv_kernel_dim": 4, "linear_head_dim": 8, "linear_key_head_dim": 8,
    "linear_num_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 8, "mamba_chunk_size": 8, "mamba_d_conv": 4, "mamba_d_head": 16,
    "mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_expand": 2, "mamba_head_dim": 16,
    "mamba_headdim": 16, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_ngroups": 1,
    "mamba_num_heads": 8, "max_position_embeddings": 64, "max_seq_len": 64,
    "moe_intermediate_size": 16, "n_ctx": 64, "n_embd": 64, "n_group": 1, "n_groups": 1,
    "n_head": 4, "n_heads": 4, "n_inner": 32, "n_layer": 4, "n_layers": 4, "n_mamba_heads": 8,
    "n_positions": 64, "n_routed_experts": 4, "num_attention_heads": 4, "num_decoder_layers": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "num_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "num_layers": 4, "num_local_experts": 4, "pad_token_id": 0,
    "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rotary_dim": 8,
    "shared_expert_intermediate_size": 16, "sliding_window": WINDOW, "ssm_state_size": 8,
    "state_size": 8, "time_step_rank": 4, "topk_group": 1, "v_head_dim": 16, "vocab_size": 128,
    "word_embed_proj_dim": 64,
}  # fmt: skip
HYBRID = ["linear_attention", "full_attention"] * 2
MLA = {"num_key_value_heads": 4}
SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
# model_type -> what the small sizes leave to be said
MODELS = {
    # one width for every layer, under the families' own field names
    "llama": {}, "gpt2": {}, "gptj": {}, "gpt_neox": {}, "gpt_neo": {
        "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "opt": {}, "bloom": {}, "mpt": {}, "codegen": {}, "phi": {}, "stablelm": {}, "qwen2": {},
    "qwen3": {}, "qwen3_moe": {}, "mixtral": {}, "granite": {}, "glm4": {}, "olmo2": {},
    "falcon": {}, "falcon, grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon, all heads": {"multi_query": False}, "gpt_bigcode": {},
    "gpt_bigcode, all heads": {"multi_query": False}, "bitnet": {}, "nemotron": {},
    # windows and chunks
    "mistral": {}, "phi3": {}, "starcoder2": {}, "gemma2": {}, "gemma3_text": {}, "cohere2": {},
    "gpt_oss": {}, "olmo3": {}, "exaone4": {}, "llama4_text": {}, "mimo_v2_flash": {},
    "modernbert-decoder": {},
    "gemma3n_text": {**SHARED, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6,
                     "intermediate_size": [32] * 6},
    "gemma4_text": {**SHARED, "global_head_dim": 32},
    # latents and indexers
    "deepseek_v2": MLA, "deepseek_v3": MLA, "deepseek_v32": MLA, "minicpm3": MLA,
    "glm4_moe_lite": MLA, "glm_moe_dsa": MLA, "kimi_linear": {**MLA, "layer_types": HYBRID},
    # states, alone and beside attention
    "mamba": {}, "mamba2": {"num_heads": 8, "head_dim": 16}, "falcon_mamba": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]}, "nemotron_h": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "use_mem_rope": False},
    "falcon_h1": {"mamba_d_ssm": 128}, "qwen3_next": {}, "qwen3_5_text": {}, "olmo_hybrid": {},
    "lfm2": {}, "minimax": {},
    # cross-attention
    "t5": {}, "bart": {}, "marian": {}, "m2m_100": {},
}  # fmt: skip
NO_STATIC = {"minimax", "t5", "bart", "marian", "m2m_100"}  # caches of another class


def network(model_type, dtype=torch.float32, **overrides):
    """A tiny random model of that family, and whether it has an encoder."""
    extra, model_type = MODELS[model_type], model_type.split(",")[0]
    config_class = CONFIG_MAPPING[model_type]
    aliases = config_class.attribute_map
    names = {*config_class.__dataclass_fields__, *aliases}
    sizes = {k: v for k, v in SMALL.items() if k in names and aliases.get(k) not in SMALL}
    config = config_class(**{**sizes, **extra, **overrides})
    translates = model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    table = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if translates else {}
    name = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **table}[model_type]
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config, dtype=dtype).eval(), translates


def tokens(length):
    return torch.randint(3, 100, (BATCH_SIZE, length))


def held_bytes(cache):
    """Bytes of every tensor a cache really holds, in whatever class it keeps it."""
    if isinstance(cache, EncoderDecoderCache):
        return held_bytes(cache.self_attention_cache) + held_bytes(cache.cross_attention_cache)
    total = sum(tensor_bytes(t) for t in getattr(cache, "linear_cache", ()))
    for layer in cache.layers:
        for name in ("keys", "values", "indexer_keys", "_quantized_keys", "_quantized_values"):
            total += tensor_bytes(getattr(layer, name, None))
        for name in ("conv_states", "recurrent_states"):
            total += tensor_bytes(getattr(layer, name, None))
    return total


def tensor_bytes(item):
    """Bytes of a tensor, of a quantised one's parts, or of everything in a container."""
    if isinstance(item, torch.Tensor):
        if type(item) is not torch.Tensor and hasattr(item, "__tensor_flatten__"):
            return sum(tensor_bytes(getattr(item, name)) for name in item.__tensor_flatten__()[0])
        return item.numel() * item.element_size()
    if isinstance(item, dict):
        return sum(tensor_bytes(value) for value in item.values())
    return sum(tensor_bytes(x) for x in item) if isinstance(item, (tuple, list)) else 0


def grown(model, translates, cache=None):
    """(tokens, bytes held) after prefill and after every step, beyond the window."""
    inputs = {"decoder_input_ids" if translates else "input_ids": tokens(PREFILL)}
    if translates:
        inputs["input_ids"] = tokens(ENCODER)
    with torch.no_grad():
        output = model(**inputs, use_cache=True, **({"cache": cache} if cache else {}))
        cache = cache or output["cache"]
        sizes = [(PREFILL, held_bytes(cache))]
        for step in range(1, STEPS + 1):
            inputs = {"decoder_input_ids" if translates else "input_ids": tokens(1)}
            if translates:
                inputs["encoder_outputs"] = (output.encoder_last_hidden_state,)
            model(**inputs, cache=cache, use_cache=True)
            sizes.append((PREFILL + step, held_bytes(cache)))
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", MODELS)
def test_dynamic_cache(model_type, dtype):
    model, translates = network(model_type, dtype)
    for n_tokens, held in grown(model, translates):
        size = kv_cache_bytes(
            model.config.to_dict(),
            seq_len=n_tokens,
            batch_size=BATCH_SIZE,
            dtype=dtype,
            engine="transformers",
            encoder_len=ENCODER,
        )
        assert size.bytes == held, (n_tokens, size)


@pytest.mark.parametrize("model_type", [m for m in MODELS if m not in NO_STATIC])
def test_static_cache(model_type):
    model, _ = network(model_type)
    cache = StaticCache(model.config, max_cache_len=20)
    size = kv_cache_bytes(
        model.config,
        seq_len=PREFILL,
        batch_size=BATCH_SIZE,
        dtype="float32",
        engine="transformers",
        cache="static",
        max_cache_len=20,
    )
    held = grown(model, False, cache)
    assert {n_bytes for _, n_bytes in held} == {size.bytes}, (held, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("quanto", {"nbits": 4, "q_group_size": 64, "residual_length": 128}),
        ("quanto", {"nbits": 2, "q_group_size": 32, "residual_length": 4}),
        ("hqq", {"nbits": 4, "q_group_size": 64, "residual_length": 3, "axis_key": 1}),
        ("hqq", {"nbits": 8, "q_group_size": 64, "residual_length": 128}),
        ("fp8", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.get("nbits", "")),
)
def test_quantised_cache(backend, options, dtype):
    package = {"quanto": "optimum", "hqq": "hqq"}.get(backend)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    model, _ = network("llama", head_dim=32)
    model = model.to(dtype)
    held = grown(model, False, QuantizedCache(backend, model.config, **options))
    ours = {"nbits": "nbits", "q_group_size": "group_size", "residual_length": "residual_length"}
    for n_tokens, n_bytes in held:
        size = kv_cache_bytes(
            model.config,
            seq_len=n_tokens,
            batch_size=BATCH_SIZE,
            dtype=dtype,
            engine="transformers",
            cache=backend,
            prefill_len=PREFILL,
            **{ours[k]: v for k, v in options.items() if k in ours},
        )
        assert size.bytes == n_bytes, (n_tokens, size)


def test_recurrent_gemma_keeps_its_states_in_its_modules():
    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=3, hidden_size=64, lru_width=64, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, intermediate_size=32, vocab_size=128, attention_window_size=WINDOW,
    )  # fmt: skip
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    with torch.no_grad():
        model(input_ids=tokens(PREFILL), use_cache=True)
    states = {"conv1d_state", "recurrent_states"}
    held = sum(
        tensor_bytes(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name in states
    )
    size = kv_cache_bytes(
        config, seq_len=PREFILL, batch_size=BATCH_SIZE, dtype="float32", engine="transformers"
    )
    assert size.of_kind("state") == held


def test_head_dim_that_is_not_hidden_over_heads():
    # Published with the fixture: 20 tokens hold 30,720 bytes where hidden/heads gives 15,360.
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.randint(3, 90, (1, 20)), use_cache=True)["cache"]
    size = kv_cache_bytes(config, seq_len=20, dtype="fp32", engine="transformers")
    assert held_bytes(cache) == size.bytes == 30_720


def test_bytes_per_token_is_the_measured_slope():
    model, translates = network("qwen3_next")
    held = grown(model, translates)
    slopes = {b - a for (_, a), (_, b) in itertools.pairwise(held)}
    size = kv_cache_bytes(model.config, seq_len=PREFILL, dtype="fp32", engine="transformers")
    assert slopes == {BATCH_SIZE * size.bytes_per_token}


UNRUN = {  # the class needs what the sizes do not say, or keeps its cache in its modules
    "llama-3.2-11b-vision", "deepseek-v2", "deepseek-v2-lite", "recurrentgemma-2b", "whisper-base",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in models().model if n not in UNRUN])
def test_bundled_config_in_full_size_on_meta_tensors(name):
    _, outer, text, *_ = resolve(name)
    translates = outer.is_encoder_decoder
    table = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if translates else {}) or {
        **MODEL_MAPPING_NAMES,
        **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    config = outer if translates else text
    with torch.device("meta"), torch.no_grad():
        found = getattr(transformers, table[config.model_type])
        model = found._from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
        inputs = {"input_ids": torch.zeros(2, 300, dtype=torch.long)}
        if translates:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        cache = model(**inputs, use_cache=True)["cache"]
    size = kv_cache_bytes(name, seq_len=300, batch_size=2, engine="transformers", encoder_len=300)
    assert size.bytes == held_bytes(cache), size
