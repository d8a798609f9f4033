"""Pruned copies against torch's own pruning; zeros counted once; nothing pruned is VACUOUS."""

import dataclasses

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0

from lossless_lab import check, compare_layers, optimizations
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.optimizations.pruning import (
    ENTRIES,
    drop_layers,
    magnitude,
    sparsity,
    top_neurons,
    two_of_four,
)
from lossless_lab.optimizations.quantization import matrices
from lossless_lab.optimizations.witness import observe
from lossless_lab.pipeline.study import Study

GREEDY = Decoding(max_new_tokens=3, stop_token_ids=())
QUIET = {"decoding": GREEDY, "n_variants": 0, "progress": False}
NAMES = [entry.name for entry in ENTRIES]


def witnessed(entry, network):
    made = entry.apply(network)
    assert made.reference_intact
    engine = TransformersEngine(made.network)
    return entry.witness(observe(made.network, lambda: engine.generate([PROMPT_S], GREEDY, seed=0)))


def logits(network, ids=PROMPT_L):
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("build", [build_t0, build_g0])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_smallest_are_those_of_torchs_own_pruning(build, share):
    from torch.nn.utils import prune

    network = build()
    made = magnitude(share).apply(network).network
    for name, weight in matrices(made):
        module = network.get_submodule(name)
        prune.l1_unstructured(module, "weight", amount=share)
        expected = module.weight.detach()
        assert torch.equal(weight, expected if module.weight.shape == weight.shape and
                           isinstance(module, torch.nn.Linear) else expected.T)  # fmt: skip


def test_two_of_four_are_those_of_torchs_own_sparsifier(t0):
    from torch.ao.pruning import WeightNormSparsifier

    made = dict(matrices(two_of_four().apply(t0).network))
    other = build_t0()
    sparsifier = WeightNormSparsifier(
        sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2
    )
    sparsifier.prepare(other, [{"tensor_fqn": f"{name}.weight"} for name in made])
    sparsifier.step()
    sparsifier.squash_mask()
    for name, weight in matrices(other):
        if name in made:
            assert torch.equal(made[name], weight), name


def test_sparsity_counts_tied_weights_once(g0):
    made = magnitude(0.5).apply(g0).network
    pruned = sum(w.numel() for _, w in matrices(g0))
    total = sum(p.numel() for p in g0.parameters())  # the tied head is one of them
    zeros = sum(int((p == 0).sum()) for n, p in g0.named_parameters())
    expected = (round(0.5 * pruned) + zeros) / total
    assert sparsity(made) == pytest.approx(expected, abs=1e-9)
    untied = sum(t.numel() for t in made.state_dict().values())
    assert untied > total, "the state dict holds the tied matrix twice"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("build", [build_t0, build_g0])
def test_the_witness_sees_the_entry_and_not_its_absence(build, name):
    network, entry = build(), optimizations.find(name)
    said = witnessed(entry, network)
    assert said and not said.startswith("VACUOUS")
    assert ("no memory saved" in said) is (name in ("magnitude-50", "2:4"))
    idle = dataclasses.replace(entry, transform=lambda network: (network, {}))
    assert witnessed(idle, network) == ""


@pytest.mark.parametrize("name", NAMES)
def test_the_poisoned_twin_computes_something_else(t0, name):
    entry = optimizations.find(name)
    good, bad = (logits(each.apply(t0).network) for each in (entry, entry.poisoned()))
    assert float((good - bad).abs().max()) > 0.05


def test_pruning_that_prunes_nothing_is_vacuous(t0):
    """A mask that is made and never applied; and a model that was as sparse before."""
    entry = magnitude(0.5)
    idle = dataclasses.replace(
        entry, transform=lambda network: (optimizations.entry.copied(network), {})
    )
    found = check(t0, idle, [[1, *PROMPT_S]], **QUIET)
    assert {a.word for a in found.answers} == {"VACUOUS"}
    once = entry.apply(t0).network
    again = check(once, entry, [[1, *PROMPT_S]], **QUIET)
    assert {a.word for a in again.answers} == {"VACUOUS"}
    assert "as sparse before" in again.sentence
    assert check(once, magnitude(0.6), [[1, *PROMPT_S]], **QUIET)["1a"].word == "DIFFERENT"
    every = check(t0, top_neurons(0.9999), [[1, *PROMPT_S]], **QUIET)
    assert {a.word for a in every.answers} == {"VACUOUS"} and "all of them" in every.sentence


def test_dropped_layers_leave_what_the_others_compute(t0):
    """By hand: the second block replaced by nothing; generation through the cache agrees."""
    entry = drop_layers(2)
    made = entry.apply(t0).network
    assert made.layer_map == {1: 1, 2: 3} and made.config.num_hidden_layers == 2
    other = build_t0()
    other.model.layers[1] = _Nothing()
    assert torch.equal(logits(made), logits(other))
    ids = TransformersEngine(made).generate([PROMPT_S], GREEDY, seed=0)[0].output_ids
    row = list(PROMPT_S)
    for token in ids:
        assert int(logits(other, row)[-1].argmax()) == token
        row.append(token)
    assert t0.config.num_hidden_layers == 3
    assert witnessed(entry, t0) == "2 blocks ran, 1 left out"


class _Nothing(torch.nn.Module):
    def forward(self, hidden_states, **_):
        return hidden_states


def test_layers_are_compared_through_the_map(t0):
    made = drop_layers(2).apply(t0).network
    drift = compare_layers(t0, made, torch.tensor([PROMPT_L]), layer_map=made.layer_map)
    assert drift.first_difference == 3
    study = Study(t0, [[1, *PROMPT_S]], decoding=GREEDY, n_variants=0, keep_logits=True,
                  progress=False)  # fmt: skip
    study.add(drop_layers(2))
    pair = study.pairs()[0]
    frame = study.layers(pair, study.prompts(pair)[0])
    assert float(frame.loc[frame["layer"] == 1, "relative_rms"].max()) == 0


@pytest.mark.parametrize("build", [build_t0, build_g0])
def test_neurons_are_chosen_at_each_token(build):
    """Against the same done by hand in the first MLP, whose input nothing has changed yet."""
    network = build()
    made = top_neurons(0.25).apply(network).network
    name = "model.layers.0.mlp.down_proj" if build is build_t0 else "transformer.h.0.mlp.c_proj"
    seen = []
    modules = [n.get_submodule(name) for n in (network, made)]
    keep = [m.register_forward_hook(lambda m, a, out: seen.append((a[0], out))) for m in modules]
    logits(network), logits(made)
    for handle in keep:
        handle.remove()
    (x, _), (y, out) = seen
    n = x.shape[-1]
    threshold = x.abs().sort(-1, descending=True).values[..., n // 4 - 1 : n // 4]
    expected = x.where(x.abs() >= threshold, torch.zeros(()))
    assert torch.equal(y, expected) and int((y[0, 0] != 0).sum()) == n // 4
    assert torch.equal(out, network.get_submodule(name)(expected))
    assert "25.0 % of the neurons active" in witnessed(top_neurons(0.25), network)


def test_refusals():
    for share in (0, 1, 1.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            magnitude(share)
    with pytest.raises(ValueError, match=r"some of 1 to 3, not all; got \(4,\)"):
        drop_layers(4).apply(build_t0())
    with pytest.raises(ValueError, match="not all"):
        drop_layers(1, 2, 3).apply(build_t0())
    with pytest.raises(ValueError, match=r"down_proj`: rows of 90 weights are no whole groups"):
        two_of_four().apply(build_t0(intermediate_size=90))


def test_a_layer_is_a_number():
    with pytest.raises(ValueError, match=r"some of 1 to 3, not all; got \(True,\)"):
        drop_layers(True).apply(build_t0())
