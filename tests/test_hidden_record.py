"""Records of final hidden states: against live logits, their floor, and what must be refused."""

import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import torch
from architectures import ARCHITECTURES, build
from safetensors.torch import load_file, save_file

from lossless_lab.number_formats import round_to
from lossless_lab.optimizations.quantization import quantized
from lossless_lab.pipeline.corpus import compare_on
from lossless_lab.pipeline.heads import head_of
from lossless_lab.pipeline.hidden_record import HiddenRecord, record_states
from lossless_lab.statistical.divergences import MEASURES

TEXTS = ["the first document", "short", "a third one, longer than the others", "x = f(y)", "zy"]
KL = MEASURES[0]


def model(network, shift=0):
    """A network with a tokenizer of one id per character."""

    def letters(text, verbose=True):
        return {"input_ids": [3 + (ord(c) + shift) % 94 for c in text]}

    return SimpleNamespace(network=network, tokenizer=letters, name="it")


def nudged(network, size=0.05):
    """A copy with another body, and the same head."""
    other = copy.deepcopy(network)
    head = {id(p) for p in other.get_output_embeddings().parameters()}
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            if id(weight) not in head:
                weight += size * torch.randn(weight.shape, generator=noise)
    return other


@pytest.fixture(scope="module")
def networks():
    return {name: build(name) for name in ("Llama", "Gemma2")}


def live_logits(network, text):
    ids = torch.tensor([model(network).tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return network(ids).logits[0, :-1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_of_stored_states_are_the_live_ones(name, tmp_path):
    """Soft caps (Gemma 2), biases and OPT's projection are in the live forward, the oracle here."""
    network = build(name)
    record = record_states(tmp_path / "r.safetensors", model(network), TEXTS)
    stored, head = load_file(tmp_path / "r.safetensors"), head_of(network)
    for i, text in enumerate(TEXTS):
        with torch.no_grad():
            made = head(stored[f"states/{i}"])
        torch.testing.assert_close(made, live_logits(network, text), rtol=1e-4, atol=2e-4)
    assert "mean KL 0 nats, at most 0" in str(record)
    n_tokens = sum(map(len, TEXTS)) - len(TEXTS)
    assert f"{n_tokens} tokens of {64 * 4} bytes" in str(record)


@pytest.mark.parametrize("change", [
    {"cohere": {"logit_scale": 0.25}}, {"granite": {"logits_scaling": 4.0}},
])  # fmt: skip
def test_a_scale_behind_the_head_is_the_model_s_own(change, tmp_path):
    import transformers
    from architectures import SIZES

    ((kind, scale),) = change.items()
    config = getattr(transformers, f"{kind.title()}Config")(**SIZES, **scale)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = getattr(transformers, f"{kind.title()}ForCausalLM")(config).eval()
    record_states(tmp_path / "r.safetensors", model(network), TEXTS)
    states = load_file(tmp_path / "r.safetensors")["states/2"]
    with torch.no_grad():
        made, bare = head_of(network)(states), network.get_output_embeddings()(states)
    torch.testing.assert_close(made, live_logits(network, TEXTS[2]), rtol=1e-4, atol=1e-4)
    assert (bare / made).nanmedian() == pytest.approx(4, rel=1e-3)  # the mutant: a head alone


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT2"])
def test_a_record_takes_the_candidate_s_place(name, networks, tmp_path):
    """Tied and other heads; every column is that of the live comparison, bit by bit."""
    network = networks.get(name) or build(name)
    reference, candidate = model(network), model(nudged(network))
    record = record_states(tmp_path / "r.safetensors", candidate, TEXTS, max_tokens=30)
    live = compare_on(reference, candidate, TEXTS, max_tokens=30, progress=False)
    assert live[KL].mean() > 1e-3
    for judged in (record, HiddenRecord(tmp_path / "r.safetensors", reference)):
        found = compare_on(reference, judged, TEXTS, max_tokens=30, progress=False)
        assert found.equals(live)
    turned = compare_on(record, reference, TEXTS, max_tokens=30, progress=False)
    backward = live["kl_candidate_reference_nats"]
    assert np.allclose(turned[KL], backward, rtol=1e-5, atol=1e-7)
    shorter = compare_on(reference, record, TEXTS[:3], max_tokens=9, progress=False)
    kept = live[(live["position"] < 8) & live["document"].isin(list("012"))]
    assert np.allclose(shorter[KL], kept[KL], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_storage_floor_is_measured(dtype, networks, tmp_path):
    """Against float64 numpy, of states rounded here; it is what a comparison finds of itself."""
    own = model(networks["Llama"])
    record = record_states(tmp_path / "r.safetensors", own, TEXTS, dtype=dtype)
    found = compare_on(own, record, TEXTS, progress=False)[KL]
    weight = networks["Llama"].lm_head.weight.detach().double().numpy()
    expected = []
    for text in TEXTS:
        ids = torch.tensor([own.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            states = networks["Llama"].model(ids).last_hidden_state[0, :-1]
        p, q = (
            scipy.special.log_softmax(x.double().numpy() @ weight.T, axis=1)
            for x in (states, states.to(getattr(torch, dtype)))
        )
        expected += [(np.exp(p) * (p - q)).sum(1)]
    expected = np.concatenate(expected)
    assert found.mean() == pytest.approx(expected.mean(), rel=1e-2) and found.min() > 0
    lost = re.search("mean KL (.*) nats, at most (.*)", str(record))
    assert float(lost[1]) == pytest.approx(found.mean(), rel=0.05)
    assert float(lost[2]) == pytest.approx(found.max(), rel=0.05)
    sizes = [
        f.nbytes
        for n, f in load_file(tmp_path / "r.safetensors").items()
        if n.startswith("states/")
    ]
    assert sum(sizes) == (sum(map(len, TEXTS)) - len(TEXTS)) * 64 * 2


def test_half_precision_models_lose_nothing_in_sixteen_bits(networks, tmp_path):
    half = model(copy.deepcopy(networks["Llama"]).bfloat16())
    record = record_states(tmp_path / "r.safetensors", half, TEXTS)
    assert "63 tokens of 128 bytes" in str(record)
    assert (compare_on(half, record, TEXTS, progress=False)[KL] == 0).all()


def test_a_quantised_copy_is_judged_with_the_reference_s_head(tiny_draft, tmp_path):
    texts = ["def f(x): return x", "The river rose in the night.", "河水在夜里上涨。"]
    rounded = quantized("int4-group32").apply(tiny_draft).network
    both = SimpleNamespace(network=rounded, tokenizer=tiny_draft.tokenizer)
    record_states(tmp_path / "r.safetensors", both, texts)
    there = HiddenRecord(tmp_path / "r.safetensors", tiny_draft)
    found = compare_on(tiny_draft, there, texts, progress=False)
    assert found.equals(compare_on(tiny_draft, rounded, texts, progress=False))


def test_what_does_not_fit_is_refused(networks, tmp_path):
    own, path = model(networks["Llama"]), tmp_path / "r.safetensors"
    record_states(path, own, TEXTS, max_tokens=20)
    record = HiddenRecord(path, own)
    other_head = copy.deepcopy(networks["Llama"])
    with torch.no_grad():
        other_head.get_output_embeddings().weight[7] *= 1.01
    capped = copy.deepcopy(networks["Gemma2"])
    record_states(tmp_path / "g.safetensors", model(capped), TEXTS)
    capped.config.final_logit_softcapping = 6.0
    wider = copy.deepcopy(networks["Llama"])
    wider.resize_token_embeddings(98)
    plain = tmp_path / "plain.safetensors"
    save_file({"x": torch.zeros(1)}, plain)
    (tmp_path / "text").write_text("no tensors")
    for arguments, message in [
        ((path, other_head), "`model` must have the head of it, which made the logits"),
        ((tmp_path / "g.safetensors", capped), "it is off by"),
        ((path, wider), "`model` must have a head of (97, 64) as in .*; got (98, 64)"),
        ((plain, own), "holds no hidden states: "),
        ((tmp_path / "text", own), "text holds no hidden states: "),
    ]:
        pattern = re.escape(message).replace(r"\.\*", ".*")
        with pytest.raises(ValueError, match=pattern):
            HiddenRecord(*arguments)
    for documents, options, message in [
        (TEXTS[::-1], {"max_tokens": 20}, "document '0' must be as it was recorded; got 18 ids"),
        (TEXTS, {"max_tokens": 21}, "document '2' must be as it was recorded; got 20 ids"),
        ([*TEXTS, "one more"], {"max_tokens": 20}, "document '5' .* got no such document"),
    ]:
        with pytest.raises(ValueError, match=message):
            compare_on(own, record, documents, progress=False, **options)
    with pytest.raises(ValueError, match="tokenizers of both sides"):
        compare_on(model(networks["Llama"], shift=1), record, TEXTS, progress=False)
    with pytest.raises(FileNotFoundError):
        HiddenRecord(tmp_path / "none", own)


def test_what_cannot_be_recorded_is_named(networks, tmp_path):
    own, path = model(networks["Llama"]), tmp_path / "r.safetensors"
    with pytest.raises(ValueError, match=r"`dtype` must be one of float32, .*; got 'int8'"):
        record_states(path, own, TEXTS, dtype="int8")
    hooked = copy.deepcopy(networks["Llama"])
    hooked.register_forward_hook(lambda _, args, out: out)
    with pytest.raises(ValueError, match="logits of its last hidden states; got other code"):
        record_states(path, model(hooked), TEXTS)
    large = copy.deepcopy(networks["Llama"])
    with torch.no_grad():
        large.model.norm.weight *= 1e5
    with pytest.raises(ValueError, match="`dtype` float16 is too small for states up to"):
        record_states(path, model(large), TEXTS, dtype="float16")
    assert not path.exists()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_other_weight_or_dtype_of_the_head_is_refused(dtype, tmp_path):
    """Too little for two rows of logits in 16 bits to show: one row, or a head in 8 bits."""
    own = build("Llama").to(getattr(torch, dtype))
    record_states(path := tmp_path / "r.safetensors", model(own), TEXTS)
    row, rounded, other = (copy.deepcopy(own) for _ in range(3))
    with torch.no_grad():
        row.lm_head.weight[7, 3] *= 1.02
        rounded.lm_head.weight.copy_(round_to(own.lm_head.weight, "int8-channel"))
    other.to(torch.float32 if dtype == "bfloat16" else torch.bfloat16)
    for wrong in (row, rounded, other):
        with pytest.raises(ValueError, match="its weights or their dtype are others"):
            HiddenRecord(path, wrong)
    assert HiddenRecord(path, own).facts["model"] == "it"


def test_a_file_that_was_cut_or_lost_its_facts_is_refused(networks, tmp_path):
    own, path = model(networks["Llama"]), tmp_path / "r.safetensors"
    facts, tensors = record_states(path, own, TEXTS).facts, load_file(path)
    save_file(tensors, tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="not tell of which model and head"):
        HiddenRecord(tmp_path / "bare.safetensors", own)
    cut = tensors | {"states/0": tensors["states/0"][:-1].clone()}
    save_file(cut, tmp_path / "cut.safetensors", facts)
    short = HiddenRecord(tmp_path / "cut.safetensors", own)
    with pytest.raises(ValueError, match="'0' must have 17 states; the file holds 16"):
        compare_on(own, short, TEXTS, progress=False)
