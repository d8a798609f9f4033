"""Sizes against arithmetic by hand, published figures, gguf's tables, and refusals of bad input."""

import json

import gguf
import pytest
from transformers import LlamaConfig

from lossless_lab.cli import main
from lossless_lab.kv_cache import CannotEstimate, binary, geometry, kv_cache_bytes, models, sweep
from lossless_lab.kv_cache.formats import FORMATS, storage_format
from lossless_lab.panels.kv_cache import kv_cache_sizing

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}


def size(config=LLAMA, **options):
    return kv_cache_bytes(config, **{"seq_len": 4096, **options})


def test_eight_requests_of_4096_tokens_take_four_gib():
    # 8 x 4,096 tokens x 32 layers x 2 x 8 heads x 128 x 2 B; a copied example prints 1.00 GB.
    assert size(batch_size=8, dtype="fp16").bytes == 8 * 4096 * 32 * 2 * 8 * 128 * 2 == 4 * 2**30
    assert "4.00 GiB" in str(size(batch_size=8)) and "8 x (128 + 128)" in str(size())


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "hidden", "heads", "per_token"),
    [  # published with the failure "head_dim guessed from hidden size"; the guess is in the note
        (36, 8, 128, 2560, 32, 147_456),  # guess 92,160
        (28, 8, 128, 1024, 16, 114_688),  # guess 57,344
        (30, 3, 64, 576, 9, 23_040),
    ],
)
def test_head_dim_is_taken_from_the_config(layers, kv_heads, head_dim, hidden, heads, per_token):
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "head_dim": head_dim,
    }
    assert size(config, seq_len=1).bytes == per_token
    assert size(config, seq_len=1, dtype="fp32").bytes_per_token == 2 * per_token


def test_seventeen_tokens_take_two_blocks():
    found = kv_cache_bytes("smollm2-135m", seq_len=17, engine="vllm", block_size=16)
    assert (found.bytes, found.stored_bytes) == (737_280, 391_680)


@pytest.mark.parametrize(
    ("model", "dtype", "per_token"),
    [
        ("llama-3.1-8b", "bf16", 131_072),
        ("llama-3.1-70b", "bf16", 320 * 1024),
        ("deepseek-r1", "bf16", 70_272),
        ("smollm2-135m", "fp32", 46_080),
    ],
)
def test_published_bytes_per_token(model, dtype, per_token):
    assert kv_cache_bytes(model, seq_len=100, dtype=dtype).bytes_per_token == per_token


def test_gemma_3_1b_is_windowed():
    windowed = kv_cache_bytes("gemma-3-1b", seq_len=32768)
    assert binary(windowed.bytes) == "139.00 MiB"
    naive = kv_cache_bytes("gemma-3-1b", seq_len=32768, engine="llama.cpp", swa_full=True)
    assert binary(naive.bytes) == "832.00 MiB"
    assert windowed.bytes_per_token == 4 * 2 * 256 * 2  # past the window only full layers grow


def test_mla_is_57_times_below_the_naive_formula():
    latent = kv_cache_bytes("deepseek-r1", seq_len=1024).bytes
    naive = 61 * 128 * (128 + 128) * 2 * 1024  # heads x (nope + value), rope left out
    assert naive / latent == pytest.approx(56.9, abs=0.1)
    expanded = kv_cache_bytes("deepseek-r1", seq_len=1024, engine="ik_llama.cpp -mla 0").bytes
    assert expanded == 61 * 128 * (192 + 128) * 2 * 1024


def test_breakdown_adds_up_and_converts():
    found = kv_cache_bytes("falcon-h1-7b", seq_len=1000, batch_size=3)
    frame = found.to_frame()
    assert frame.bytes.sum() == found.bytes == found.of_kind("full") + found.fixed_bytes
    assert found.bytes == 3 * (1000 * found.bytes_per_token + found.fixed_bytes // 3)
    assert "<script" not in found._repr_html_()


def test_batch_and_beams_multiply_and_a_draft_adds():
    one = size().bytes
    assert size(batch_size=3).bytes == 3 * one
    assert size(batch_size=3, num_beams=4).bytes == 12 * one
    draft = kv_cache_bytes("llama-3.2-1b", seq_len=4096).bytes
    assert size(draft="llama-3.2-1b").bytes == one + draft


@pytest.mark.parametrize(("tp", "share"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_tensor_parallel_divides_heads_then_replicates(tp, share):
    found = size(tensor_parallel=tp)
    assert found.bytes == size().bytes * share // 8


def test_tensor_parallel_leaves_the_latent_whole_and_divides_states():
    for tp in (2, 8):
        assert (
            kv_cache_bytes("deepseek-r1", seq_len=64, tensor_parallel=tp).bytes
            == kv_cache_bytes("deepseek-r1", seq_len=64).bytes
        )
    whole = kv_cache_bytes("qwen3-next-80b-a3b", seq_len=64).of_kind("state")
    half = kv_cache_bytes("qwen3-next-80b-a3b", seq_len=64, tensor_parallel=2).of_kind("state")
    assert whole == 2 * half


def test_mamba2_groups_are_replicated_when_split_too_finely():
    # 8 groups of 2 x 128 channels beside 8,192: 16 GPUs hold 16 groups between them.
    config = {"model_type": "mamba2", "num_hidden_layers": 1, "hidden_size": 4096, "num_heads": 128,
              "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4}  # fmt: skip
    found = kv_cache_bytes(config, seq_len=1, tensor_parallel=16)
    assert found.bytes == (8192 + 16 * 256) // 16 * 3 * 2 + 128 // 16 * 64 * 128 * 4


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "f16", "bf16"])
def test_ggml_formats_equal_ggufs_table(name):
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert FORMATS[name].block_bytes / FORMATS[name].block == n_bytes / block


def test_formats_with_scales():
    assert size(dtype="fp8", seq_len=1).bytes == size(seq_len=1).bytes // 2
    scaled = size(dtype="fp8_per_token_head", seq_len=1).bytes
    assert scaled == 32 * 8 * 2 * (128 + 4)
    assert size(dtype="nvfp4", seq_len=1).bytes == 32 * 8 * 2 * (64 + 8)
    assert kv_cache_bytes("deepseek-r1", seq_len=1, dtype="fp8_ds_mla").bytes == 61 * 656
    assert storage_format("int4-g32").bits == 5.0
    mixed = size(dtype={"k": "q8_0", "v": "q4_0"}, seq_len=1).bytes
    assert mixed == 32 * 8 * 128 * (34 + 18) // 32


def test_sources_of_a_config_agree(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    as_object = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    sources = [LLAMA, tmp_path, tmp_path / "config.json", as_object, "llama-3.1-8b"]
    assert len({kv_cache_bytes(s, seq_len=64).bytes for s in sources}) == 1


def test_bundled_configs_are_forty_or_more_with_sources_and_all_can_be_sized():
    frame = models()
    assert len(frame) >= 40 and frame.source.str.startswith("https://").all()
    for name in frame.model:
        assert kv_cache_bytes(name, seq_len=64, encoder_len=8).bytes > 0


def test_a_nested_config_takes_the_class_defaults_and_says_so():
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
              "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}}  # fmt: skip
    shape = geometry(config)  # the 4B file leaves out heads and head_dim
    assert dict(shape.assumed)["num_key_value_heads"] == 4
    assert len(shape.of_kind("full")) == 5
    assert any("class's default" in note for note in kv_cache_bytes(config, seq_len=1).notes)


def test_old_field_names():
    chatglm = {"model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32,
               "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128,
               "hidden_size": 4096}  # fmt: skip
    assert kv_cache_bytes(chatglm, seq_len=1).bytes == 28 * 2 * 256 * 2
    falcon = {"model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "n_head_kv": 8,
              "hidden_size": 8192, "new_decoder_architecture": True}  # fmt: skip
    assert kv_cache_bytes(falcon, seq_len=1).bytes == 60 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llamma"}, "model_type 'llamma' is unknown"),
        ({"model_type": None}, "`model_type` is None"),
        ({"num_hidden_layers": ...}, "`num_hidden_layers` is missing"),
        ({"num_attention_heads": ...}, "`num_attention_heads` is missing"),
        ({"hidden_size": ...}, "`hidden_size` is missing"),
        ({"num_key_value_heads": 5}, "`num_attention_heads` 32 is not a multiple of"),
        ({"num_hidden_layers": -1}, "`num_hidden_layers` is -1"),
        ({"hidden_size": 4097}, "4097"),
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, "same quantity"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"], "head_dim": 64}, "32"),
        ({"model_type": "reformer"}, "reformer"),
        ({"model_type": "bert"}, "text generators"),
        ({"model_type": "vit"}, "text generators"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_config_that_does_not_say_enough_gives_no_number(change, message):
    config = {k: v for k, v in {**LLAMA, **change}.items() if v is not ...}
    with pytest.raises(CannotEstimate, match="cannot estimate: ") as caught:
        kv_cache_bytes(config, seq_len=1)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "`seq_len` must be a positive integer; received 0"),
        ({"seq_len": -5}, "`seq_len`"),
        ({"seq_len": 2.5}, "`seq_len`"),
        ({"batch_size": 0}, "`batch_size`"),
        ({"num_beams": 0}, "`num_beams`"),
        ({"tensor_parallel": 0}, "`tensor_parallel`"),
        ({"tensor_parallel": 3}, "`tensor_parallel` 3 does not divide the 32 attention heads"),
        ({"dtype": "q9"}, "`dtype` 'q9' is unknown"),
        ({"dtype": {"k": "f16"}}, "keys 'k' and 'v'"),
        ({"engine": "vlm"}, "`engine` 'vlm' is unknown"),
        ({"engine": "llama.cpp -nkvx 9"}, "flag -nkvx is not known to change"),
        ({"engine": "transformers", "cache": "quant"}, "`cache` must be one of dynamic"),
        ({"engine": "transformers", "cache": "static", "max_cache_len": 9}, "`max_cache_len` 9"),
        ({"engine": "transformers", "cache": "hqq", "prefill_len": 5000}, "`prefill_len` 5000"),
        ({"engine": "transformers", "cache": "hqq", "seq_len": 1, "group_size": 96}, "group_size"),
        (
            {"engine": "llama.cpp -ub many"},
            "`n_ubatch` must be a positive integer; rec",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_request_is_named(options, message):
    with pytest.raises(ValueError) as caught:
        size(**options)
    assert message in str(caught.value)


def test_two_configs_of_one_name_cannot_be_swept():
    with pytest.raises(ValueError, match="`configs` must have distinct names"):
        sweep([LLAMA, LLAMA], seq_lens=[1], batch_sizes=[1], dtypes=["bf16"])


def test_an_option_of_another_engine_is_named():
    with pytest.raises(TypeError, match="`block_size` is not an option of engine"):
        size(engine="llama.cpp", block_size=16)


def test_blocks_that_do_not_divide_a_head_are_refused():
    config = {**LLAMA, "head_dim": 80}
    with pytest.raises(ValueError, match="`dtype` q8_0 has blocks of 32 elements"):
        size(config, dtype="q8_0")


def test_cross_attention_needs_an_encoder_length():
    with pytest.raises(CannotEstimate, match="`encoder_len`"):
        kv_cache_bytes("t5-large", seq_len=128)
    assert kv_cache_bytes("whisper-base", seq_len=1).of_kind("cross") == 6 * 512 * 2 * 2 * 1500


def test_a_missing_name_suggests_its_neighbours():
    with pytest.raises(FileNotFoundError, match="near it are"):
        kv_cache_bytes("llama-3.1-8", seq_len=1)


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ("t5-large --encoder-len 7 --beams 2", {"encoder_len": 7, "num_beams": 2}),
        ("smollm2-135m --dtype q8_0,f16 --engine llama.cpp",
         {"dtype": ("q8_0", "f16"), "engine": "llama.cpp"}),
        ("llama-3.1-8b --draft llama-3.2-1b", {"draft": "llama-3.2-1b"}),
        ("mamba-2.8b --state-dtype bf16", {"state_dtype": "bf16"}),
    ],
)  # fmt: skip
def test_the_command_line_says_the_same(arguments, call, capsys):
    assert main(["kv-cache", *arguments.split(), "--context", "64", "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bytes"] == kv_cache_bytes(arguments.split()[0], seq_len=64, **call).bytes


def test_more_tokens_than_the_model_was_made_for_are_noted():
    assert "at most 1,024 tokens" in " ".join(kv_cache_bytes("gpt2", seq_len=1025).notes)
    assert not kv_cache_bytes("gpt2", seq_len=1024).notes


def test_the_panel_offers_what_the_engine_keeps_and_says_what_is_wrong():
    panel = kv_cache_sizing()
    menu = panel.controls["dtype"]
    assert "q8_0" not in menu.options and "nvfp4" in menu.options
    panel.controls["engine"].value = "llama.cpp"
    menu.value = "q8_0"
    panel.controls["engine"].value = "vllm"
    assert panel.error is None and menu.value == "bfloat16"
    panel.controls["model"].value = "deepseek-r1"
    assert "weights and overhead alone take 1.23 TiB of 80.00 GiB" in panel.text
    panel.controls["model"].value = "gpt2"
    assert "at most 1,024 tokens, less than asked here" in panel.text
    panel.controls["batch"].value = 1
    assert "1 request may have" in panel.text
    panel.controls["model"].value = "gemma-3-27b"
    assert "a window and 8,192 tokens" in panel.text
