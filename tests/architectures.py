"""Tiny models of many architectures, with seeded random weights, norms and biases included."""

import torch
import transformers

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MHA = {"num_key_value_heads": 4}  # where every head has its own keys
WINDOW = {"sliding_window": 4, "head_dim": 16, "query_pre_attn_scalar": 16}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# Architecture -> what its config needs besides SIZES.
ARCHITECTURES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 4},
    "Gemma2": WINDOW | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0},
    "Gemma3": WINDOW | {"layer_types": MIXED},
    "GPT2": MHA,
    "GPTNeoX": MHA,
    "Phi3": {},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "Falcon": MHA,
    "Bloom": MHA | {"n_layer": 3, "n_head": 4},
    "OPT": MHA | {"ffn_dim": 128, "word_embed_proj_dim": 64},
}


def build(architecture):
    """A tiny model; norms and biases, which are born as ones and zeros, are drawn too."""
    name = architecture + ("Text" if architecture == "Gemma3" else "")
    kind = "GPT2LMHeadModel" if architecture == "GPT2" else f"{architecture}ForCausalLM"
    config = getattr(transformers, f"{name}Config")(**(SIZES | ARCHITECTURES[architecture]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = getattr(transformers, kind)(config).eval()
        with torch.no_grad():
            for weight in network.parameters():
                if weight.ndim == 1:
                    weight.add_(0.3 * torch.randn(weight.shape))
    return network
