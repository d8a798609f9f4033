"""Compilation stage by stage, and inspection of layers: against plain forwards, with mutants."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import build_t0

from lossless_lab import mutants, panels
from lossless_lab.numerical.capture import forward, model_inputs
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.optimizations import compilation
from lossless_lab.pipeline import Inspection, compile_drift

IDS = torch.tensor([[1, 5, 9, 13, 22, 31], [1, 7, 8, 11, 15, 20]])


@pytest.fixture(scope="module")
def half():
    return build_t0(torch.bfloat16)


def test_stages_that_only_trace_change_no_bit_and_a_new_length_compiles_once_more(half):
    found = compile_drift(half, IDS, stages=("capture", "trace"))
    assert found.frame["bitwise_equal"].all() and found.first_drifting is None
    assert found.frame["logit_rms"].tolist() == [0.0, 0.0]
    assert (found.frame["graphs"] >= 1).all() and (found.frame["recompilations"] >= 1).all()
    assert "every stage bitwise equal" in str(found)


def test_a_graph_break_is_counted():
    class Broken(torch.nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x + 1

    with compilation.counted() as counters:
        torch.compile(Broken(), backend="eager")(torch.zeros(2))
        assert len(counters().graph_breaks) == 1


def test_a_stage_that_moves_the_logits_is_named_with_numpy_s_distance(half, monkeypatch):
    """A backend that adds noise stands in for Inductor: the first stage that drifts is it."""

    def noisy(graph, inputs):
        def run(*args):
            out = graph(*args)
            return [x + 0.25 * (x > x.mean()).to(x) if x.is_floating_point() else x for x in out]

        return run

    stages = {"capture": ("eager", {}), "noisy": (noisy, {}), "again": (noisy, {})}
    monkeypatch.setattr(compilation, "STAGES", stages)
    found = compile_drift(half, IDS, stages=tuple(stages), region=compilation.mlps)
    assert found.first_drifting == "noisy" and found.region == "compile-mlp"
    moved = found.frame.set_index("stage").loc["noisy"]
    candidate = compilation.stage("noisy", region=compilation.mlps).apply(half).network
    a, b = (forward(n, model_inputs(IDS, None)).double().numpy() for n in (half, candidate))
    d = (b - a) - (b - a).mean(-1, keepdims=True)
    assert moved["logit_rms"] == pytest.approx(np.sqrt((d**2).mean(-1)).max(), rel=1e-9)
    assert moved["word"] == "farther" and moved["compiled_error"] > moved["eager_error"]


def test_an_unknown_stage_lists_the_known_ones():
    with pytest.raises(KeyError, match="capture, trace, decompose"):
        compilation.stage("optimise")


def test_a_patched_network_is_refused_by_name():
    """Its copies would run the original's weights, and nothing of them would be compiled."""
    network = build_t0()
    run = network.model.layers[1].mlp.forward
    network.model.layers[1].mlp.forward = lambda x: run(x)
    with pytest.raises(ValueError, match=r"`model.layers.1.mlp` carries a (forward|method)"):
        compile_drift(network, IDS, stages=("capture",))


@pytest.mark.slow
def test_casts_left_out_b13(half):
    """B13: Inductor drops a cast that eager code makes, and keeps it when told to."""

    def rounded(x):
        return x.to(torch.bfloat16).to(torch.float32)

    x = torch.tensor([1.0009765625, 3.1415927, 0.1])
    assert rounded(x).tolist() == pytest.approx([1, 3.140625, 0.10009766], rel=1e-7)
    assert torch.equal(torch.compile(rounded)(x), x)
    kept = torch.compile(rounded, options={"emulate_precision_casts": True})(x)
    assert torch.equal(kept, rounded(x))
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_bf16_is_no_farther_from_float64_and_emulated_casts_undo_the_drift(half):
    stages = ("inductor", "inductor, casts emulated")
    ids = torch.randint(0, 97, (8, 24), generator=torch.Generator().manual_seed(0))
    found = compile_drift(half, ids, stages=stages).frame.set_index("stage")
    assert not found.loc["inductor", "bitwise_equal"]
    assert found.loc["inductor", "compiled_error"] < found.loc["inductor", "eager_error"]
    left = found["logit_rms"]
    assert left["inductor, casts emulated"] < left["inductor"]


@pytest.fixture(scope="module")
def inspection(half):
    broken = mutants.MUTANTS["attention-scale"].apply(half, dose=0.5, layer=2)
    subjects = {"same": copy.deepcopy(half), "float32": build_t0(), "broken": broken}
    rows = {"a": IDS[0].tolist(), "b": IDS[1].tolist()}
    return Inspection(half, subjects, rows, n_twins=2)


def test_the_faulty_module_is_the_first_above_the_noise_band(inspection):
    assert inspection.first_above("broken") == (2, "attention")
    assert inspection.first_above("broken", "a") == (2, "attention")
    assert inspection.first_above("same") is None


def test_drift_is_that_of_compare_layers_and_tensors_those_of_hooks(inspection, half):
    frame = inspection.drift("broken", "a")
    direct = compare_layers(half, inspection.candidates["broken"], IDS[:1], modules=True).frame
    pd.testing.assert_frame_equal(frame.drop(columns="floor_relative_rms"), direct)
    seen = {}
    mlp = inspection.candidates["broken"].model.layers[1].mlp
    handle = mlp.register_forward_hook(lambda m, a, out: seen.update(mlp=out[0]))
    logits = forward(inspection.candidates["broken"], model_inputs(IDS[:1], None))
    handle.remove()
    assert torch.equal(inspection.tensors("broken", "a", 2, "mlp")[1], seen["mlp"])
    assert torch.equal(inspection.tensors("broken", "a", 4, "logits")[1], logits[0])


def test_the_panel_says_what_the_function_says_and_follows_the_layer(inspection):
    panel = panels.layer_difference(inspection)
    assert panel.error is None and panel.text.startswith("Layer 0, residual: equal, bit by bit")
    panel.controls["candidate"].value = "broken"
    panel.controls["layer"].value = 2
    panel.controls["module"].value = "attention"
    content = panels.difference(inspection, **panel.state)
    assert panel.text == content.text
    assert panel.text.startswith("Layer 2, attention: relative RMS")
    assert "at layer 2 (attention) leaves" in panel.text
    pictures = {panel.png}
    panel.controls["layer"].value = 3
    pictures.add(panel.png)
    panel.controls["candidate"].value = "float32"
    pictures.add(panel.png)
    assert len(pictures) == 3 and "nearer the truth" in panel.text
    panel.controls["layer"].value = 4  # only the last norm and the logits are there
    assert panel.state["module"] in ("norm final", "logits") and panel.error is None


def test_the_panel_opens_where_the_drift_leaves_the_noise(half, inspection):
    broken = {"broken": inspection.candidates["broken"]}
    panel = panels.layer_difference(Inspection(half, broken, {"a": IDS[0].tolist()}, n_twins=2))
    assert (panel.state["layer"], panel.state["module"]) == (2, "attention")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {"a": [1, 2], "b": [1]}}, "`rows` must be prompts of one length.*'b': 1"),
        ({"rows": {}}, "`rows` must be prompts of one length, at least one; got {}"),
        ({"rows": {"a": []}}, "`rows` must be prompts of one length"),
        ({"n_twins": 0}, "`n_twins` must be at least 1; got 0"),
        ({"candidates": {"": None}}, '`candidates` must have names; got ""'),
    ],
)
def test_what_cannot_be_inspected_is_refused(half, changes, message):
    given = {"candidates": {"a": half}, "rows": {"a": [1, 2]}} | changes
    with pytest.raises(ValueError, match=message):
        Inspection(half, **given)


def test_a_panel_without_candidates_is_refused(half):
    with pytest.raises(ValueError, match="at least one candidate"):
        panels.layer_difference(Inspection(half, {}, {"a": [1, 2]}))
