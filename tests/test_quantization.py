"""Quantised copies hold what their format gives back; weights that lay on a grid are known."""

import dataclasses

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0

from lossless_lab import check, optimizations
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.number_formats import FORMATS, round_to
from lossless_lab.optimizations.entry import fingerprint
from lossless_lab.optimizations.quantization import ENTRIES, already_on_grid, matrices, quantized
from lossless_lab.optimizations.witness import observe

GREEDY = Decoding(max_new_tokens=3, stop_token_ids=())
NAMES = [entry.name for entry in ENTRIES]


def witnessed(entry, network):
    made = entry.apply(network)
    assert made.reference_intact
    engine = TransformersEngine(made.network)
    return entry.witness(observe(made.network, lambda: engine.generate([PROMPT_S], GREEDY, seed=0)))


def logits(network):
    with torch.no_grad():
        return network(torch.tensor([PROMPT_L])).logits.float()


@pytest.mark.parametrize("build", [build_t0, build_g0])
@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_holds_what_its_format_gives_back(build, name):
    network = build()
    before = fingerprint(network)
    made = optimizations.find(name).apply(network).network
    assert fingerprint(network) == before
    ours, theirs = dict(matrices(network)), dict(matrices(made))
    assert len(theirs) == 21 if build is build_t0 else 12
    for module, weight in ours.items():
        fmt = FORMATS[name].fitted(weight.shape[1])
        assert torch.equal(theirs[module], round_to(weight, fmt)), module
    touched = {f"{module}.weight" for module in ours}
    for parameter, value in made.named_parameters():
        same = torch.equal(value, network.get_parameter(parameter))
        assert same is (parameter not in touched), parameter


@pytest.mark.parametrize("name", NAMES)
def test_the_witness_sees_the_entry_and_not_its_absence(t0, name):
    entry = optimizations.find(name)
    said = witnessed(entry, t0)
    assert said.startswith(f"21 of 21 matrices on the {name} grid")
    assert "simulated: arithmetic in float32" in said
    assert "WARNING" not in said
    assert ("18 of them as int4-group64" in said) is (name == "int4-group128")
    idle = dataclasses.replace(entry, transform=lambda network: (network, {}))
    assert witnessed(idle, t0) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_the_witness_holds_in_half_precision(name, dtype):
    network = build_t0(dtype)
    said = witnessed(optimizations.find(name), network)
    assert said.startswith("21 of 21") and "WARNING" not in said


def test_a_matrix_that_was_left_out_is_counted(t0):
    entry = quantized("int4-group32")

    def forgetful(network):
        changed, settings = entry.transform(network)
        with torch.no_grad():
            original = network.model.layers[1].mlp.up_proj.weight
            changed.model.layers[1].mlp.up_proj.weight.copy_(original)
        return changed, settings

    said = witnessed(dataclasses.replace(entry, transform=forgetful), t0)
    assert said.startswith("20 of 21 matrices")


def test_the_share_and_the_bits_are_counted_by_hand(t0):
    said = witnessed(quantized("q4_0"), t0)
    linear = sum(w.numel() for _, w in matrices(t0))
    share = 100 * linear / sum(p.numel() for p in t0.parameters())
    assert f"{share:.0f} % of all weights at 4.5 bits" in said


@pytest.mark.parametrize("name", NAMES)
def test_the_poisoned_twin_computes_something_else(t0, name):
    entry = optimizations.find(name)
    good, bad = (logits(each.apply(t0).network) for each in (entry, entry.poisoned()))
    assert float((good - bad).abs().max()) > 0.5
    changed = [torch.equal(a, b) for a, b in zip(
        (w for _, w in matrices(entry.apply(t0).network)),
        (w for _, w in matrices(entry.poisoned().apply(t0).network)), strict=True)]  # fmt: skip
    assert changed.count(False) == 1


def test_fewer_bits_move_the_logits_further(tiny_target):
    network = tiny_target.network
    plain = logits(network)
    moved = [float((logits(quantized(f"int{b}-group32").apply(network).network) - plain).norm())
             for b in (8, 4, 3, 2)]  # fmt: skip
    assert moved == sorted(moved) and moved[0] < 0.1 * moved[1]


def test_a_model_stays_a_model_and_every_position_depends_on_its_weights(tiny_target):
    entry = quantized("nf4")
    assert entry.apply(tiny_target).model.name == "tiny-target"
    assert entry.exercised([3, 2], [1, 1]) == 5


@pytest.mark.parametrize(
    ("name", "level"),
    [("int8-channel", "2"), ("q8_0", "2"), ("fp8-e5m2", "2"), ("mxfp4", "3"), ("q4_0", "3")],
)
def test_levels_claimed(name, level):
    assert quantized(name).level == level


# ---- weights that were quantised before ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_already_on_the_grid_are_known(name, dtype):
    network = build_t0(dtype, hidden_size=128)
    assert already_on_grid(network, name) == ()
    once = quantized(name).apply(network).network
    assert len(already_on_grid(once, name)) == 21


def test_uniform_weights_the_kindest_are_not_taken_for_a_grid():
    """Uniform values err least on a uniform grid: nothing may pass for int8 but int8."""
    network = build_t0(torch.bfloat16)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for _, weight in matrices(network):
            weight.uniform_(-0.1, 0.1)
    for name in FORMATS:
        if "group128" not in name and "group64" not in name:
            assert already_on_grid(network, name) == (), name


def test_quantising_twice_warns_and_other_formats_do_not(t0):
    """The trap: the second q4_1 changes nothing, and its distance of 0 is no merit of q4_1."""
    once = quantized("q4_1").apply(t0).network
    twice = quantized("q4_1").apply(once).network
    assert torch.equal(logits(once), logits(twice))
    assert witnessed(quantized("q4_1"), once).startswith("VACUOUS: 21 of 21 matrices lay on the")
    for name in ("q4_0", "int4-group32-asym", "int4-group64", "nf4"):
        assert "WARNING" not in witnessed(quantized(name), once)


PROMPTS = [[1 + i, *PROMPT_S] for i in range(3)]
QUIET = {"decoding": GREEDY, "n_variants": 0, "progress": False}


def test_a_verdict_on_weights_of_that_grid_is_vacuous_and_says_why(t0):
    once = quantized("q4_1").apply(t0).network
    found = check(once, quantized("q4_1"), PROMPTS, **QUIET)
    assert {a.word for a in found.answers} == {"VACUOUS"}
    assert "21 of 21 matrices lay on the q4_1 grid before" in found.sentence
    assert check(once, quantized("nf4"), PROMPTS, **QUIET)["1a"].word == "DIFFERENT"


def test_a_verdict_on_a_part_that_lay_there_before_says_so_in_its_sentence(t0):
    """No cost is to be read off for what stayed; the rest is judged."""
    once = quantized("q4_1", skip=("lm_head", "mlp")).apply(t0).network
    found = check(once, quantized("q4_1"), PROMPTS, **QUIET)
    assert found["1a"].word == "DIFFERENT"
    assert "as 12 of 21 matrices lay on the q4_1 grid before" in found.sentence
    assert "grid before" not in check(t0, quantized("q4_1"), PROMPTS, **QUIET).sentence


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_lies_on_the_grid_of_its_file(smollm2):
    assert len(already_on_grid(smollm2, "q4_1")) == 210
    for name, weight in matrices(smollm2.network):  # as llama.cpp wrote them, to the last bit
        assert torch.equal(round_to(weight, "q4_1"), weight), name
    assert witnessed(quantized("q4_1"), smollm2.network).startswith("VACUOUS: 210 of 210 matrices")
    for name in ("q4_0", "int4-group32", "int4-group64-asym"):
        assert already_on_grid(smollm2, name) == ()


# ---- bad input -----------------------------------------------------------------------------------


def test_refusals_name_the_layer():
    narrow = build_t0(intermediate_size=40)
    with pytest.raises(ValueError, match=r"`model\.layers\.0\.mlp\.down_proj`: `fmt` mxfp4 has"):
        quantized("mxfp4").apply(narrow)
    with pytest.raises(ValueError, match=r"down_proj`: .*int4-group128 .*nor do smaller ones"):
        quantized("int4-group128").apply(narrow)
    assert witnessed(quantized("mxfp4", skip=("lm_head", "down_proj")), narrow).startswith(
        "18 of 18"
    )
    with pytest.raises(ValueError, match="no linear layer besides `skip`"):
        quantized("int8-channel", skip=("model", "lm_head")).apply(build_t0())
    with pytest.raises(KeyError, match="did you mean 'int8-channel'"):
        quantized("int8-chanel")
    broken = build_t0()
    broken.model.layers[2].self_attn.k_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.k_proj`: .*first \(3, 4\)"):
        quantized("int8-channel").apply(broken)


def test_what_skip_does_not_name_is_refused():
    """A str would be a set of letters, and a name that nothing has would skip nothing."""
    network = build_t0()
    with pytest.raises(ValueError, match=r"`skip` must be a list .*; got the str 'lm_head'"):
        quantized("nf4", skip="lm_head").apply(network)
    for wrong in (["lm_heads"], ["down_proj", "up-proj"], ["norm"]):
        with pytest.raises(ValueError, match=f"names of linear layers; got .*{wrong[-1]}"):
            quantized("nf4", skip=wrong).apply(network)
    made = quantized("nf4", skip=["down_proj", "lm_head"]).apply(network).network
    same = {n for n, w in made.state_dict().items() if w.equal(network.state_dict()[n])}
    kept = {n for n in same if n.endswith("proj.weight")}
    assert kept == {n for n in made.state_dict() if "down_proj" in n}
