"""Layer drift against numpy, without moving the needle; pads, layer maps and broken models."""

import copy
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0

from lossless_lab.numerical.capture import (
    HooksNeverFired,
    capture,
    decoder_layers,
    forward,
    model_inputs,
    observer_effect,
)
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.numerical.parts import parts_of

IDS = torch.tensor([PROMPT_L])


def streams_by_hooks(network, inputs):
    """Every stream and the logits as float64 arrays, kept by plain hooks: an oracle for capture."""
    kept = {}
    layers = next(m for m in network.modules() if isinstance(m, torch.nn.ModuleList))

    def keep(i):
        def hook(module, args, output):
            kept[i] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    handles = [layer.register_forward_hook(keep(i + 1)) for i, layer in enumerate(layers)]
    with torch.no_grad():
        out = network(**inputs, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    found = [out.hidden_states[0], *(kept[i + 1] for i in range(len(layers))), out.logits]
    return [x.double().numpy() for x in found]


def by_numpy(reference, candidate, inputs, keep=...):
    rows = []
    for x, y in zip(*(streams_by_hooks(m, inputs) for m in (reference, candidate)), strict=True):
        x, y = (z.reshape(-1, z.shape[-1]) if keep is ... else z[keep] for z in (x, y))
        rows.append(
            {
                "rms_difference": np.sqrt(np.mean((y - x) ** 2)),
                "rms_reference": np.sqrt(np.mean(x**2)),
                "relative_rms": np.linalg.norm(y - x) / np.linalg.norm(x),
                "max_abs_difference": abs(y - x).max(),
                "sqnr_db": 20 * np.log10(np.linalg.norm(x) / np.linalg.norm(y - x)),
                "cosine": (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y),
                "n_positions": len(x),
            }
        )
    return rows


def agree(frame, expected):
    return len(frame) == len(expected) and all(
        np.allclose(frame[name].astype(float), [row[name] for row in expected], rtol=1e-9)
        for name in expected[0]
    )


def scaled(network, layer, factor=1.01):
    """A copy whose MLP of one block (from 1) is scaled: a fault that starts in that layer."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        decoder_layers(network)[layer - 1].mlp.down_proj.weight.mul_(factor)
    return network


@pytest.mark.parametrize("build", [build_t0, build_g0])
def test_every_figure_agrees_with_numpy(build):
    reference, candidate = build(), build().bfloat16()
    drift = compare_layers(reference, candidate, IDS)
    inputs = {"input_ids": IDS}
    assert agree(drift.frame, by_numpy(reference, candidate, inputs))
    assert drift.frame["layer"].tolist() == [0, 1, 2, 3, 4]
    assert drift.frame["module"].tolist() == ["residual"] * 4 + ["logits"]


def test_the_tiny_pair_agrees_with_numpy(tiny_target):
    network = tiny_target.network
    ids = torch.randint(0, network.config.vocab_size, (2, 24), generator=torch.Generator())
    half = copy.deepcopy(network).bfloat16()
    drift = compare_layers(tiny_target, SimpleNamespace(network=half), ids)
    assert agree(drift.frame, by_numpy(network, half, {"input_ids": ids}))
    assert drift.n_positions == 48 and drift.n_layers == network.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("threads", [1, 2])
def test_capture_leaves_the_logits_bitwise_as_they_were(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for network in (build_t0(dtype), build_g0().to(dtype)):
            other = copy.deepcopy(network)
            with torch.no_grad():
                plain = network(IDS).logits[0]
            drift = compare_layers(network, other, IDS)
            assert torch.equal(drift.reference_logits, plain)  # the thread that asks
            assert torch.equal(drift.candidate_logits, plain)  # and the one in lockstep with it
            assert observer_effect(network, IDS) == 0
            assert torch.equal(forward(network, model_inputs(IDS, None))[0], plain)
    finally:
        torch.set_num_threads(before)


@pytest.mark.smollm2
def test_capture_leaves_smollm2_bitwise_as_it_was(smollm2):
    ids = torch.arange(100, 116)[None]
    with torch.no_grad():
        plain = smollm2.network(ids).logits[0]
    drift = compare_layers(smollm2, smollm2, ids)
    assert torch.equal(drift.reference_logits, plain) and torch.equal(drift.candidate_logits, plain)
    assert drift.first_difference is None and drift.n_layers == 30


def test_an_instrument_that_writes_is_seen():
    """The mutant: a capture that changes what it reads moves the logits."""
    network = build_t0()
    plain = forward(network, model_inputs(IDS, None))
    with capture(network, lambda layer, stream: stream.mul_(1.001)):
        assert not torch.equal(forward(network, model_inputs(IDS, None)), plain)


def test_a_model_against_itself_is_bitwise_equal():
    network = build_t0()
    drift = compare_layers(network, network, IDS)
    assert drift.first_difference is None
    assert (drift.frame["sqnr_db"] == math.inf).all() and (drift.frame["cosine"] == 1).all()
    assert str(drift) == "9 positions: bitwise equal after every layer"


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_fault_is_placed_in_its_own_layer(layer):
    drift = compare_layers(build_t0(), scaled(build_t0(), layer), IDS)
    assert drift.first_difference == layer
    assert (drift.frame["rms_difference"][:layer] == 0).all()


def test_an_off_by_one_of_the_layers_is_caught():
    """A mutant that pairs each layer with the candidate's next one disagrees with numpy."""
    reference, candidate = build_t0(), build_t0().bfloat16()
    expected = by_numpy(reference, candidate, {"input_ids": IDS})
    shifted = compare_layers(reference, candidate, IDS, layer_map={2: 1, 3: 2})
    assert not agree(shifted.frame[shifted.frame["layer"].isin([0, 1, 2])], expected[:3])
    swapped = compare_layers(candidate, reference, IDS).frame
    assert not agree(swapped, expected)  # the reference is what drift is relative to
    late = compare_layers(reference, candidate, IDS[:, 1:]).frame
    assert not agree(late, expected)


def test_pads_are_left_out_and_positions_are_explicit():
    """Rows padded on the left give the figures of the same rows alone, learned positions too."""
    pad = len(PROMPT_L) - len(PROMPT_S)
    ids = torch.tensor([[0] * pad + list(PROMPT_S), PROMPT_L])
    mask = torch.tensor([[0] * pad + [1] * len(PROMPT_S), [1] * len(PROMPT_L)])
    for build in (build_t0, build_g0):
        reference, candidate = build(), build().bfloat16().float()  # rounded weights
        batch = compare_layers(reference, candidate, ids, attention_mask=mask)
        assert batch.n_positions == len(PROMPT_S) + len(PROMPT_L)
        alone = [
            compare_layers(reference, candidate, torch.tensor([p])) for p in (PROMPT_S, PROMPT_L)
        ]
        squares = sum(d.frame["rms_difference"] ** 2 * d.n_positions for d in alone)
        pooled = np.sqrt(squares / batch.n_positions)
        assert np.allclose(batch.frame["rms_difference"], pooled, rtol=1e-3)
        logits = torch.cat([d.reference_logits for d in alone])
        assert torch.allclose(batch.reference_logits, logits, atol=1e-5)


class Poison(torch.nn.Module):
    """Wraps a block and writes NaN at one position of its output."""

    def __init__(self, block, position):
        super().__init__()
        self.block, self.position = block, position

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args, **kwargs):
        out = self.block(*args, **kwargs)
        out = out.clone()
        out[0, self.position] = math.nan
        return out


def poisoned(position):
    network = build_t0()
    layers = decoder_layers(network)
    layers[2] = Poison(layers[2], position)
    return network


def test_a_nan_at_a_pad_is_no_finding_and_elsewhere_it_is_located():
    ids = torch.tensor([[0, 0, *PROMPT_S]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    harmless = compare_layers(build_t0(), poisoned(1), ids, attention_mask=mask)
    assert not harmless.nonfinite and harmless.first_difference is None
    found = compare_layers(build_t0(), poisoned(3), ids, attention_mask=mask)
    assert set(found.nonfinite) == {3, 4} and found.first_difference == 3
    assert found.nonfinite[3].first == (1, 0)  # the second real token
    assert found.nonfinite[3].summary == "only candidate"
    assert found.frame["rms_difference"].isna().tolist() == [False, False, False, True, True]
    assert math.isnan(found.frame["max_abs_difference"][3])
    assert "layer 3: non-finite: only candidate, first at (1, 0)" in str(found)


def test_hooks_of_compiled_code_are_said_never_to_fire():
    network = build_t0()
    network.forward = torch.compile(network.forward, backend="eager")
    for pair, side in (((build_t0(), network), "candidate"), ((network, build_t0()), "reference")):
        with pytest.raises(HooksNeverFired, match=f"`{side}`: hooks never fired on 3 of 3 layers"):
            compare_layers(*pair, IDS)
    with pytest.raises(HooksNeverFired, match="never fired"):
        observer_effect(network, IDS)
    with pytest.raises(HooksNeverFired, match="`candidate`"):
        compare_layers(build_t0(), torch.compile(build_t0(), backend="eager"), IDS)
    assert threading.active_count() < 20 and not any(
        layer._forward_hooks for layer in decoder_layers(network)
    )


def test_other_layer_counts_need_a_layer_map():
    full, pruned = build_t0(), build_t0()
    del decoder_layers(pruned)[1]
    pruned.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match="has 2 layers and `reference` 3; pass `layer_map"):
        compare_layers(full, pruned, IDS)
    drift = compare_layers(full, pruned, IDS, layer_map={1: 1, 2: 3})
    assert drift.frame["layer"].tolist() == [0, 1, 3, 4]
    assert (drift.frame["rms_difference"][:2] == 0).all()
    assert (drift.frame["rms_difference"][2:] > 0).all()


@pytest.mark.parametrize("layer_map", [{2: 1, 1: 2}, {1: 4}, {4: 1}, {1: 0}])
def test_a_layer_map_must_rise_and_stay_inside(layer_map):
    with pytest.raises(ValueError, match="`layer_map` must rise from 1 to at most 3"):
        compare_layers(build_t0(), build_t0(), IDS, layer_map=layer_map)


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"vocab_size": 99}, "logits of size 99 at layer 4"),
        ({"hidden_size": 32}, "size 32 at layer 0"),
    ],
)
def test_other_sizes_are_named(changes, what):
    with pytest.raises(ValueError, match=f"`candidate` has .*{what}"):
        compare_layers(build_t0(), build_t0(**changes), IDS)


def test_bad_input_is_named():
    network = build_t0()
    with pytest.raises(ValueError, match=r"must be \[batch_size, seq_len\]; got \(9,\)"):
        compare_layers(network, network, IDS[0])
    with pytest.raises(ValueError, match="`attention_mask` must have the shape"):
        compare_layers(network, network, IDS, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="must be in eval mode"):
        compare_layers(network, copy.deepcopy(network).train(), IDS)
    bare = torch.nn.Linear(2, 2)
    bare.config = network.config
    with pytest.raises(ValueError, match="must hold a ModuleList of num_hidden_layers=3"):
        compare_layers(network, bare, IDS)


def test_layers_are_found_beside_other_lists_of_the_same_length():
    network = build_t0()
    network.model.layers[0].experts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    assert decoder_layers(network) is network.model.layers


def test_a_candidate_that_fails_says_so_and_leaves_no_thread_behind():
    network = build_t0()
    before = threading.active_count()

    def fail(*args, **kwargs):
        raise RuntimeError("kernel missing")

    decoder_layers(network)[1].forward = fail
    for pair in ((build_t0(), network), (network, build_t0())):
        with pytest.raises(RuntimeError, match="kernel missing"):
            compare_layers(*pair, IDS)
    assert threading.active_count() == before


def test_lockstep_holds_about_one_layer():
    """When a layer is compared, the streams of two layers before are already freed."""
    import weakref

    from lossless_lab.numerical.capture import lockstep

    seen, alive = [], []

    def compare(layer, x, y):
        alive.append(sum(ref() is not None for ref in seen[:-2]))
        seen.extend((weakref.ref(x), weakref.ref(y)))

    networks = build_t0(num_hidden_layers=8), build_t0(num_hidden_layers=8)
    lockstep(*networks, model_inputs(IDS, None), {i: i for i in range(9)}, compare)
    assert len(alive) == 10 and max(alive) <= 2
    seen.clear(), alive.clear()
    places = [*range(9), *parts_of(networks[0])]
    lockstep(*networks, model_inputs(IDS, None), {place: place for place in places}, compare)
    assert len(alive) == 10 + 8 * 4 + 1 and max(alive) <= 8  # at most one layer's, of each


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
DELTA = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NORMS = ("norm input_layernorm", "norm post_attention_layernorm")
# name -> changes to SIZES, the parts of a block in the order in which they run
FAMILIES = {
    "llama": ({}, [NORMS[0], "attention", NORMS[1], "mlp"]),
    "gpt2": (GPT, ["norm ln_1", "attention", "norm ln_2", "mlp"]),
    "gpt_neox": ({}, [NORMS[0], "attention", NORMS[1], "mlp"]),
    "falcon": ({}, [NORMS[0], "attention", "mlp"]),
    "bloom": (
        {"n_layer": 2, "n_head": 4},
        [NORMS[0], "attention", NORMS[1], "mlp"],
    ),
    "gemma2": (
        {"head_dim": 8, "final_logit_softcapping": 3.0},
        [
            NORMS[0],
            "attention",
            NORMS[1],
            "norm pre_feedforward_layernorm",
            "mlp",
            "norm post_feedforward_layernorm",
        ],
    ),
    "mixtral": ({"num_local_experts": 4}, [NORMS[0], "attention", NORMS[1], "mlp"]),
    "opt": (
        {"ffn_dim": 64, "word_embed_proj_dim": 32},
        ["norm self_attn_layer_norm", "attention", "norm final_layer_norm", "mlp fc1", "mlp fc2"],
    ),
    "phi": ({}, [NORMS[0], "attention", "mlp"]),
    "cohere": ({"logit_scale": 0.25}, [NORMS[0], "attention", "mlp"]),
    "granite": ({"logits_scaling": 4.0}, [NORMS[0], "attention", NORMS[1], "mlp"]),
    "qwen3_next": (DELTA, [NORMS[0], "attention", NORMS[1], "mlp"]),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"]},
        ["norm operator_norm", "attention", "norm ffn_norm", "mlp"],
    ),
}
PAD = len(PROMPT_L) - len(PROMPT_S)
PADDED = {
    "input_ids": torch.tensor([[0] * PAD + list(PROMPT_S), PROMPT_L]),
    "attention_mask": torch.tensor([[0] * PAD + [1] * len(PROMPT_S), [1] * len(PROMPT_L)]),
}


def build(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family][0]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def rounded(network):
    """A copy whose weights, but not its arithmetic, were rounded to bf16."""
    return copy.deepcopy(network).bfloat16().float()


def outputs_by_hooks(network, inputs):
    """Module -> its output, kept by plain hooks; and the logits without pads."""
    kept, mask = {}, inputs["attention_mask"].bool()

    def keep(module, args, output):
        out = output[0] if isinstance(output, tuple) else output
        kept[module] = out.clone() if isinstance(out, torch.Tensor) else out  # Falcon adds in place

    handles = [module.register_forward_hook(keep) for module in network.modules()]
    logits = forward(network, inputs)[mask]
    for handle in handles:
        handle.remove()
    return kept, logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_every_family_agree_with_numpy(family):
    """Padded batch: names, order, figures and pads; the logits are the model's real ones."""
    reference = build(family)
    candidate = rounded(reference)
    drift = compare_layers(reference, candidate, **PADDED, modules=True)
    frame, parts = drift.frame, FAMILIES[family][1]
    expected = ["residual", *2 * [*parts, "residual"], "norm final", "logits"]
    assert frame["module"].tolist() == expected and not drift.notes
    assert frame["layer"].tolist() == [0, *[1] * (len(parts) + 1), *[2] * (len(parts) + 1), 3, 3]
    assert (frame["n_positions"] == int(PADDED["attention_mask"].sum())).all()
    inputs = model_inputs(*PADDED.values())
    sides = [outputs_by_hooks(network, inputs) for network in (reference, candidate)]
    places = [parts_of(network) for network in (reference, candidate)]
    mask = PADDED["attention_mask"].bool()
    for row in frame.to_dict("records"):
        place = row["layer"], row["module"]
        if place in places[0]:
            x, y = (
                kept[found[place]].reshape(*mask.shape, -1)[mask].double().numpy()
                for (kept, _), found in zip(sides, places, strict=True)
            )
            assert row["rms_difference"] == pytest.approx(np.sqrt(np.mean((y - x) ** 2)), rel=1e-9)
            assert row["rms_reference"] == pytest.approx(np.sqrt(np.mean(x**2)), rel=1e-9)
    assert torch.equal(drift.reference_logits, sides[0][1])
    assert torch.equal(drift.candidate_logits, sides[1][1])
    plain = compare_layers(reference, candidate, **PADDED).frame
    stream = frame[frame["module"].isin(["residual", "logits"])].reset_index(drop=True)
    assert plain.equals(stream)  # looking at the parts changes no other figure
    for network in (reference, candidate):
        assert observer_effect(network, **PADDED, modules=True) == 0


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_a_head_alone_is_not_the_logits(family):
    """The mutant: soft cap or scale left out."""
    network = build(family)
    drift = compare_layers(network, network, **PADDED, modules=True)
    norm = parts_of(network)[3, "norm final"]
    kept = []
    handle = norm.register_forward_hook(lambda module, args, output: kept.append(output))
    forward(network, model_inputs(*PADDED.values()))
    handle.remove()
    head = network.get_output_embeddings()(kept[0])[PADDED["attention_mask"].bool()]
    assert not torch.allclose(head, drift.reference_logits, rtol=0.01)


@pytest.mark.parametrize(
    "path, part",
    [
        ("mlp.down_proj", "mlp"),
        ("self_attn.o_proj", "attention"),
        ("input_layernorm", "norm input_layernorm"),
        ("post_attention_layernorm", "norm post_attention_layernorm"),
    ],
)
def test_a_fault_is_placed_in_its_own_part(path, part):
    candidate = build_t0()
    with torch.no_grad():
        decoder_layers(candidate)[1].get_submodule(path).weight.mul_(1.01)
    drift = compare_layers(build_t0(), candidate, IDS, modules=True)
    assert drift.first_place == (2, part) and drift.first_difference == 2
    assert f"first difference after layer 2 of 3 ({part}), " in str(drift)


def test_a_nan_is_placed_in_its_own_part():
    candidate = build_t0()
    with torch.no_grad():
        decoder_layers(candidate)[1].mlp.down_proj.weight[5, 0] = math.nan
    drift = compare_layers(build_t0(), candidate, IDS, modules=True)
    assert next(iter(drift.nonfinite)) == (2, "mlp") and drift.nonfinite[2, "mlp"].first == (0, 5)


def test_unknown_names_fall_back_to_generic_blocks():
    def wrapped():
        network = build_t0()
        for i, layer in enumerate(list(decoder_layers(network))):
            decoder_layers(network)[i] = Poison(layer, 0)
        return network

    drift = compare_layers(wrapped(), wrapped(), IDS, modules=True)
    assert "block block" in set(drift.frame["module"])
    assert "generic blocks, told by no known name: block block" in str(drift)
    mixed = compare_layers(build_t0(), wrapped(), IDS, modules=True)
    assert set(mixed.frame["module"]) == {"residual", "norm final", "logits"}
    assert "12 parts not compared, first attention of layer 1: not run by both" in str(mixed)
    assert compare_layers(build_t0(), wrapped(), IDS).notes == ()


def test_a_part_of_another_size_is_passed_over():
    """Pruned MLP channels: OPT's first matrix has fewer rows, everything else is compared."""
    reference = build("opt")
    pruned = copy.deepcopy(reference)
    for block in decoder_layers(pruned):
        block.fc1.weight = torch.nn.Parameter(block.fc1.weight[:48])
        block.fc1.bias = torch.nn.Parameter(block.fc1.bias[:48])
        block.fc2.weight = torch.nn.Parameter(block.fc2.weight[:, :48])
    drift = compare_layers(reference, pruned, **PADDED, modules=True)
    assert drift.first_place == (1, "mlp fc2")
    assert drift.notes[0].startswith("2 parts not compared, first mlp fc1 of layer 1")


class Int8Linear(torch.nn.Module):
    """What quantisers put in a Linear's place: packed weights, no parameter of its own."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.packed * self.scale)


def quantised():
    network = build_t0()
    for block in decoder_layers(network):
        for parent in (block.self_attn, block.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(parent, name, Int8Linear(child))
    return network


def quantised_by_quanto():
    from optimum.quanto import freeze, qint8, quantize

    network = build_t0()
    quantize(network, weights=qint8, exclude="lm_head")
    freeze(network)
    return network


def pruned():
    network = build_t0()
    with torch.no_grad():
        for block in decoder_layers(network):
            weight = block.mlp.down_proj.weight
            weight[weight.abs() < weight.abs().median()] = 0
    return network


def compiled_by_parts():
    network = build_t0()
    for block in decoder_layers(network):
        block.mlp.forward = torch.compile(block.mlp.forward, backend="eager")
    return network


SUBJECTS = {
    "cast": lambda: build_t0(torch.bfloat16),
    "quantised": quantised,
    "quantised by quanto": quantised_by_quanto,
    "pruned": pruned,
    "compiled by parts": compiled_by_parts,
}


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_capture_moves_nothing_in_any_subject(subject, modules):
    network = SUBJECTS[subject]()
    plain = forward(network, model_inputs(*PADDED.values()))[PADDED["attention_mask"].bool()]
    drift = compare_layers(build_t0(), network, **PADDED, modules=modules)
    assert torch.equal(drift.candidate_logits, plain)
    assert observer_effect(network, **PADDED, modules=modules) == 0
    assert drift.first_difference == (
        None if subject.startswith("compiled") else 1 - (subject == "cast")
    )
    if modules:
        parts = {"attention", "mlp", *NORMS, "residual", "norm final", "logits"}
        assert set(drift.frame["module"]) == parts


def test_regional_compilation_is_labelled_with_its_observer_effect():
    drift = compare_layers(build_t0(), compiled_by_parts(), IDS, modules=True)
    assert drift.notes == (
        "`candidate` runs 3 compiled modules (first model.layers.0.mlp): another program than the "
        "whole model compiled as one; observer effect 0",
    )
    blocks = build_t0()
    for block in decoder_layers(blocks):
        block.forward = torch.compile(block.forward, backend="eager")
    drift = compare_layers(build_t0(), blocks, IDS, modules=True)
    assert drift.frame["module"].tolist() == ["residual"] * 4 + ["norm final", "logits"]
    assert "12 parts not compared, first attention of layer 1" in drift.notes[0]
    assert "runs 3 compiled modules (first model.layers.0)" in drift.notes[1]


@pytest.mark.slow
def test_inductor_by_parts_is_seen_without_being_moved():
    """bf16, where fused code keeps what eager code rounds: a drift that starts in the first MLP."""
    eager, compiled = build_t0(torch.bfloat16), build_t0(torch.bfloat16)
    for block in decoder_layers(compiled):
        block.mlp.forward = torch.compile(block.mlp.forward)
    drift = compare_layers(eager, compiled, **PADDED, modules=True)
    assert drift.notes[0].endswith("observer effect 0")
    assert drift.first_place == (1, "mlp")
    assert observer_effect(compiled, **PADDED, modules=True) == 0


def test_an_observer_effect_is_printed():
    """The mutant: compiled code that does something else when it is watched."""
    network = compiled_by_parts()
    block = decoder_layers(network)[1]
    block.register_forward_hook(
        lambda module, args, output: output + torch.arange(64.0) * (len(module._forward_hooks) > 1)
    )
    drift = compare_layers(build_t0(), network, IDS)
    effect = float(drift.notes[0].rpartition(" ")[2])
    plain = forward(network, model_inputs(IDS, None))[0]
    assert effect == pytest.approx(float((drift.candidate_logits - plain).abs().max()), rel=1e-2)
    assert effect > 0.1


def test_dropped_layers_keep_their_parts():
    full, short = build_t0(), build_t0()
    del decoder_layers(short)[1]
    short.config.num_hidden_layers = 2
    frame = compare_layers(full, short, IDS, layer_map={1: 1, 2: 3}, modules=True).frame
    assert frame["layer"].tolist() == [0, *[1] * 5, *[3] * 5, 4, 4]
    assert (frame["rms_difference"][frame["layer"] < 3] == 0).all()


def test_parts_in_another_order_are_matched_or_passed_over():
    """A candidate that runs its MLP first: nothing hangs, and what was missed is said."""
    network = build("phi")
    other = copy.deepcopy(network)
    for block in decoder_layers(other):

        def forward_of(hidden_states, block=block, **kwargs):
            x = block.input_layernorm(hidden_states)
            fed = block.mlp(x)
            return block.self_attn(hidden_states=x, **kwargs)[0] + fed + hidden_states

        block.forward = forward_of
    drift = compare_layers(network, other, **PADDED, modules=True)
    assert drift.frame["module"].tolist().count("residual") == 3
    assert drift.frame["relative_rms"].max() < 1e-6
    assert "parts not compared" in drift.notes[0]


def test_ids_of_another_tokenizer_are_named():
    with pytest.raises(
        ValueError, match=r"must lie in 0 to 96, the vocabulary of .*; got up to 97"
    ):
        compare_layers(build_t0(), build_t0(), torch.tensor([[1, 97]]))


@pytest.mark.smollm2
def test_parts_of_smollm2_move_nothing(smollm2):
    ids = torch.arange(100, 116)[None]
    plain = forward(smollm2.network, model_inputs(ids, None))[0]
    drift = compare_layers(smollm2, smollm2, ids, modules=True)
    assert torch.equal(drift.reference_logits, plain) and torch.equal(drift.candidate_logits, plain)
    assert drift.first_difference is None and len(drift.frame) == 1 + 30 * 5 + 2


def test_autocast_of_the_caller_holds_for_both_sides_and_shared_blocks_are_refused(t0):
    ids = torch.tensor([PROMPT_L])
    with torch.autocast("cpu", torch.bfloat16):
        assert compare_layers(t0, t0, ids).first_difference is None
    shared = copy.deepcopy(t0)
    shared.model.layers = torch.nn.ModuleList([shared.model.layers[0]] * 3)
    with pytest.raises(ValueError, match="runs one block as several layers"):
        compare_layers(t0, shared, ids)
