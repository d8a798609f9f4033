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
    with torch.no_grad():
        network(input_ids=IDS, position_ids=torch.arange(9)[None], use_cache=False)
    for pair, side in (((build_t0(), network), "candidate"), ((network, build_t0()), "reference")):
        with pytest.raises(HooksNeverFired, match=f"`{side}`: hooks never fired on 3 of 3 layers"):
            compare_layers(*pair, IDS)
    with pytest.raises(HooksNeverFired, match="never fired"):
        observer_effect(network, IDS)
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
