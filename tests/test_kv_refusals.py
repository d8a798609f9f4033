"""Bad input of every kind gives an error that names it, never a number."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lossless_lab.kv_cache import (
    ENGINES,
    CannotEstimate,
    capacity,
    engine,
    geometry,
    kv_cache_bytes,
    sweep,
    weights_bytes,
)
from lossless_lab.kv_cache.checks import Count, Positive, Share, kinds_of

few = settings(max_examples=20, deadline=None)  # of each of many options
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16,
}  # fmt: skip
MLA = {
    "model_type": "deepseek_v3", "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "hidden_size": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "state_size": 16,
    "intermediate_size": 128, "conv_kernel": 4, "expand": 2,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
GEMMA = {**MISTRAL, "model_type": "gemma4_text", "global_head_dim": 32, "num_kv_shared_layers": 0}
GEMMA |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
QWEN = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "num_attention_heads": 4,
    "hidden_size": 64, "num_key_value_heads": 2, "head_dim": 16, "full_attention_interval": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
CONFIGS = {c["model_type"]: c for c in (LLAMA, MLA, MAMBA, GPT2, MISTRAL, GEMMA, QWEN)}
SIZES = [
    (family, name)
    for family, config in CONFIGS.items()
    for name, value in config.items()
    if type(value) is int and name not in ("full_attention_interval", "intermediate_size")
]
NO_INTEGER = st.one_of(
    st.floats(), st.booleans(), st.text(), st.none().map(lambda _: [1]), st.complex_numbers()
)
BAD = {
    Positive: st.one_of(st.integers(max_value=0), NO_INTEGER),
    Count: st.one_of(st.integers(max_value=-1), NO_INTEGER),
    Share: st.one_of(
        st.floats().filter(lambda x: not 0 < x <= 1), st.text(), st.integers(max_value=0)
    ),
}
OPTIONS = [
    (name, option, next(rule for rule in BAD if rule in (kind, *getattr(kind, "__args__", ()))))
    for name, cls in ENGINES.items()
    for option, kind in kinds_of(cls).items()
    if any(rule in (kind, *getattr(kind, "__args__", ())) for rule in BAD)
]


def size(config=LLAMA, **options):
    return kv_cache_bytes(config, **{"seq_len": 8, **options})


@few
@given(data=st.data())
@pytest.mark.parametrize(("name", "option", "rule"), OPTIONS, ids=lambda v: str(v)[:24])
def test_every_numeric_option_of_every_engine_is_checked(name, option, rule, data):
    value = data.draw(BAD[rule])
    with pytest.raises(ValueError, match=f"^`{option}` must .*; received .*{name}"):
        engine(name, **{option: value})


def test_the_options_that_are_checked():
    checked = {option for _, option, _ in OPTIONS}
    assert len(OPTIONS) >= 24 and {"n_ctx", "n_rs_seq", "block_size", "swa_ratio"} <= checked


ARGUMENTS = [
    (function, name, next(r for r in BAD if r in (kind, *getattr(kind, "__args__", ()))))
    for function in (kv_cache_bytes, capacity, sweep, weights_bytes)
    for name, kind in kinds_of(function).items()
    if any(r in (kind, *getattr(kind, "__args__", ())) for r in BAD)
]


@few
@given(data=st.data())
@pytest.mark.parametrize(
    ("function", "name", "rule"), ARGUMENTS, ids=lambda v: getattr(v, "__name__", str(v)[:22])
)
def test_every_numeric_argument_is_checked(function, name, rule, data):
    needed = {
        kv_cache_bytes: {"seq_len": 1},
        capacity: {"seq_len": 1, "memory_bytes": 2**34},
        sweep: {"seq_lens": [1], "batch_sizes": [1], "dtypes": ["bf16"]},
        weights_bytes: {},
    }[function]
    config = ["llama-3.1-8b"] if function is sweep else "llama-3.1-8b"
    with pytest.raises(ValueError, match=f"^`{name}` must "):
        function(config, **needed | {name: data.draw(BAD[rule])})


@few
@given(st.integers(1, 10**6), st.sampled_from([np.int8, np.int32, np.int64, np.uint16, np.uint64]))
def test_numpy_integers_are_welcome(number, kind):
    number = number % 120 + 1
    assert size(seq_len=kind(number)).bytes == size(seq_len=number).bytes
    assert engine("vllm", block_size=kind(number)).block_size == number
    assert type(engine("vllm", block_size=kind(number)).block_size) is int


@few
@given(
    data=st.data(),
    bad=st.one_of(
        st.integers(max_value=-1), st.integers(min_value=2**24 + 1), st.booleans(),
        st.floats(), st.text(), st.just(0),
    ),
)  # fmt: skip
@pytest.mark.parametrize(("family", "name"), SIZES)
def test_every_size_field_of_a_config_is_checked(family, name, data, bad):
    if name in ("num_kv_shared_layers", "n_group") and bad == 0:
        return
    if name == "expand" and isinstance(bad, float) and bad > 0:
        return  # a factor
    with pytest.raises(CannotEstimate, match=f"`{name}`"):
        size({**CONFIGS[family], name: bad})


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_a_misspelt_size_names_its_neighbour(family, name):
    config = dict(CONFIGS[family])
    value = config.pop(name)
    if name in ("num_kv_shared_layers", "expand"):
        return
    for wrong in (name[:-1], name + "s", name[0] + name[2:], name[:4] + name[3:]):
        if wrong in CONFIGS[family] or len(name) < 9:
            continue
        with pytest.raises(CannotEstimate, match=f"`{wrong}` is no field.*did you mean `{name}`"):
            size({**config, wrong: value})


def test_kv_heads_under_another_familys_name():
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    with pytest.raises(CannotEstimate, match=r"`num_kv_heads`.*`num_key_value_heads`"):
        size({**config, "num_kv_heads": 2})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "num_hidden_layers": 10**7}, "`num_hidden_layers` is 10000000"),
        ({**GEMMA, "num_kv_shared_layers": 9}, "`num_kv_shared_layers` 9 exceeds"),
        ({**MAMBA, "intermediate_size": 100}, "`intermediate_size` 100 is not `expand` 2 times"),
        ({k: v for k, v in MAMBA.items() if k != "state_size"}, "`state_size` is missing"),
        ({k: v for k, v in MLA.items() if k != "kv_lora_rank"}, "`kv_lora_rank` is missing"),
        ({**LLAMA, "model_type": "lama"}, "did you mean 'llama'"),
        (None, "`config` must be"), (5, "`config` must be"), ([LLAMA], "`config` must be"),
    ],
    ids=str,
)  # fmt: skip
def test_contradictions_and_absurdities(config, said):
    with pytest.raises(CannotEstimate, match=said.replace("(", r"\(")):
        size(config)


def test_a_window_that_the_file_switches_off_may_be_zero():
    config = {**LLAMA, "model_type": "qwen2", "sliding_window": 0, "use_sliding_window": False}
    assert size(config).bytes == size().bytes


@pytest.mark.parametrize("content", [b"", b"not json", b"\xff\xfe\x00\x01", b"[1, 2]", b'"x"'])
def test_a_file_that_is_no_config_is_named(tmp_path, content):
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(CannotEstimate, match=r"some.json"):
        size(path)


@pytest.mark.parametrize("kind", [str, Path])
def test_what_is_not_there_is_named(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        size(kind(tmp_path))
    for name in ("/nope/config", "/nope/config.json", "llama-3.1-8"):
        with pytest.raises(FileNotFoundError, match=name):
            size(kind(name))


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch):
    import huggingface_hub

    def refuse(*_):
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(FileNotFoundError, match=r"`config` 'some/model' is not .*: no network$"):
        size("some/model")


@pytest.mark.parametrize(
    ("name", "refused", "kept"),
    [
        ("vllm", "q8_0", "nvfp4"), ("sglang", "q4_0", "fp8_e5m2"), ("llama.cpp", "fp8", "iq4_nl"),
        ("llama.cpp", "nvfp4", "q8_0"), ("llama.cpp", "q6_0", "q5_1"), ("ggml", "fp8", "f16"),
        ("ik_llama.cpp", "int8", "q6_0"), ("transformers", "fp8", "f32"),
        ("tensorrt-llm", "q8_0", "int8"), ("whisper.cpp", "fp8", "f16"),
    ],
)  # fmt: skip
def test_a_format_that_the_engine_lacks_lists_those_it_has(name, refused, kept):
    wide = {**LLAMA, "head_dim": 128}
    assert size(wide, engine=name, dtype=kept).bytes > 0
    with pytest.raises(ValueError, match=f"`dtype` {refused} is no cache format of {name}, which"):
        size(wide, engine=name, dtype=refused)
    with pytest.raises(ValueError, match="is no cache format"):
        sweep([wide], seq_lens=[1], batch_sizes=[1], dtypes=[refused], engine_name=name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": ("f16", "f16", "f16")}, "a pair"),
        ({"dtype": "int4-g0"}, "int4-g0"),
        ({"dtype": None}, "`dtype` None"),
        ({"dtype": "fp8_ds_mla"}, "for MLA latents"),
        ({"engine": 5}, "`engine` must be a name"),
        ({"engine": "vllm", "ssm_dtype": "q8_0"}, "`ssm_dtype` must be one of float32"),
        ({"state_dtype": "q8_0"}, "`state_dtype` must be one of float32"),
        ({"engine": "vllm", "mamba_cache_mode": "foo"}, "one of none, align, all"),
        ({"engine": "ik_llama.cpp -mla 9"}, "`mla_mode` must be one of 0, 1, 2, 3"),
        ({"engine": "transformers", "cache": "quanto", "nbits": 3}, "`nbits` must be one of"),
        ({"engine": "transformers", "cache": "quanto", "nbits": 8}, "`nbits` of quanto"),
        ({"engine": "llama.cpp -ub -5"}, "`n_ubatch` must be a positive integer; received -5"),
        ({"engine": "llama.cpp -fa maybe"}, "`flash_attn` must be True or False"),
        ({"engine": "vllm", "flat": 1}, "`flat` must be True or False"),
        ({"engine": "llama.cpp", "n_ctx": 7}, "`seq_len` 8 exceeds the 7 cells"),
        ({"engine": "llama.cpp", "n_ctx": 31, "batch_size": 4}, "`seq_len` 8 exceeds the 7 cells"),
    ],
    ids=str,
)  # fmt: skip
def test_one_rule_for_names_and_switches(options, said):
    with pytest.raises(ValueError, match=said):
        size(**options)


@pytest.mark.parametrize(("config", "n_gpus"), [(MLA, 5), ({**LLAMA, "num_key_value_heads": 1}, 3)])
def test_gpus_must_divide_the_heads_of_latents_and_mqa_too(config, n_gpus):
    with pytest.raises(ValueError, match=f"`tensor_parallel` {n_gpus} does not divide the 4"):
        size(config, tensor_parallel=n_gpus)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("vllm==0.11.0", "0.11.0"), ("vllm-0.11.0", "0.11.0"), ("vLLM v0.11", "0.11"),
        ("llama.cpp build 6500", "6500"), ("llama.cpp version: 6500 (abc)", "6500"),
        ("llama.cpp (b6500)", "6500"), ("LLAMA.CPP B6500", "6500"), ("llama-server b6500", "6500"),
        ("whisper.cpp (2024+, padded to 256)", "2024"), ("llama.cpp -b 4096", ""),
        ("transformers 5.24.0 (DynamicCache)", "5.24.0"), ("trtllm", ""), ("llama.cpp", ""),
        ("sglang@0.5.2", "0.5.2"), ("vllm:0.11", "0.11"), ("llama.cpp iSWA, padded to 256", ""),
    ],
)  # fmt: skip
def test_versions_as_people_write_them(text, version):
    assert engine(text).version == version


@pytest.mark.parametrize("text", ["llama.cpp of 6500", "vllm nightly 0.12.1", "llama.cpp is b65"])
def test_a_version_in_the_wrong_place_is_not_dropped(text):
    with pytest.raises(ValueError, match="a version stands right after"):
        engine(text)


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("llama.cpp -c 8192", "n_ctx", 8192), ("llama.cpp --ctx-size=8192", "n_ctx", 8192),
        ("llama.cpp --no-kv-unified", "kv_unified", False), ("llama.cpp -kvu", "kv_unified", True),
        ("llama.cpp --kv-unified off", "kv_unified", False), ("llama.cpp -fa", "flash_attn", True),
        ("llama.cpp -fa off -ub 256", "n_ubatch", 256), ("llama.cpp -no-kvu", "kv_unified", False),
        ("vllm --block-size 32", "block_size", 32), ("sglang --page-size 64", "page_size", 64),
        ("vllm --kv-cache-dtype auto", "key_dtype", "auto"),
        ("vllm --num-gpu-blocks-override 115", "n_blocks", 115),
        ("sglang --swa-full-tokens-ratio 0.5", "swa_ratio", 0.5),
    ],
)  # fmt: skip
def test_flags_that_are_honoured(text, option, value):
    assert getattr(engine(text), option) == value


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("llama.cpp -np 4", "batch_size"), ("llama.cpp --parallel 4", "batch_size"),
        ("vllm --tensor-parallel-size 2", "tensor_parallel"), ("vllm -tp 2", "tensor_parallel"),
        ("vllm --max-model-len 4096", "seq_len"), ("vllm --max-num-seqs 4", "batch_size"),
        ("vllm --gpu-memory-utilization 0.9", "utilization"),
        ("sglang --mem-fraction-static 0.9", "utilization"),
        ("vllm --enable-prefix-caching", "mamba_cache_mode"),
        ("vllm --speculative-config {}", "n_speculative_tokens"),
        ("llama.cpp --draft-max 4", "n_rs_seq"),
    ],
)  # fmt: skip
def test_flags_that_are_arguments_here_name_the_argument(text, argument):
    with pytest.raises(ValueError, match=f"say it with.*`{argument}`"):
        engine(text)


def test_an_allocator_takes_options_too():
    rules = engine("vllm 0.11")
    assert engine(rules, block_size=32).block_size == 32 and engine(rules) is not None
    assert size(engine=rules, block_size=32).bytes == size(engine="vllm 0.11", block_size=32).bytes


@pytest.mark.parametrize("bad", [[-5], [0], [5.7], [True], [math.nan], ["8"], [2**31], [None]])
@pytest.mark.parametrize("name", ["seq_lens", "batch_sizes"])
def test_a_sweep_takes_positive_integers_only(name, bad):
    grid = {"seq_lens": [1], "batch_sizes": [1], "dtypes": ["bf16"]} | {name: bad}
    with pytest.raises(ValueError, match=f"`{name}` must"):
        sweep(["llama-3.1-8b"], **grid)


def test_a_sweep_beyond_int64_is_refused():
    grid = {"seq_lens": [2**31 - 1], "batch_sizes": [2**31 - 1], "dtypes": ["bf16"]}
    with pytest.raises(ValueError, match="exceeds int64"):
        sweep(["llama-3.1-405b"], **grid)
    one = kv_cache_bytes("llama-3.1-405b", seq_len=2**31 - 1, batch_size=2**31 - 1)
    assert one.bytes == 126 * 8 * 256 * 2 * (2**31 - 1) ** 2


@pytest.mark.parametrize("name", ["vllm", "llama.cpp", "sglang"])
@few
@given(longer=st.integers(1, 200_000), shorter=st.integers(1, 200_000), batch=st.integers(1, 64))
def test_a_longer_request_never_takes_less(name, longer, shorter, batch):
    longer, shorter = max(longer, shorter), min(longer, shorter)
    for config in (LLAMA, MLA, GEMMA, QWEN):
        asked = {"batch_size": batch, "engine": name}
        assert (
            size(geometry(config), seq_len=shorter, **asked).bytes
            <= size(geometry(config), seq_len=longer, **asked).bytes
        )


def test_json_with_a_nan_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": math.nan}))
    with pytest.raises(CannotEstimate, match="`num_hidden_layers` is nan"):
        size(path)
