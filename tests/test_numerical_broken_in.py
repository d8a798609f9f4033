"""Ways in which the numerical level once answered wrongly: against numpy, hooks and counting."""

import copy
import importlib
import itertools

import numpy as np
import pytest
import torch
from conftest import PROMPT_S, build_g0, build_t0

from lossless_lab.engines.decoding import Decoding
from lossless_lab.numerical import referee as room
from lossless_lab.numerical.attribution import attribution, local_error
from lossless_lab.numerical.capture import forward, model_inputs, observer_effect
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.numerical.referee import against_referee
from lossless_lab.numerical.tensors import error_sums, tensor_difference
from lossless_lab.optimizations import compilation
from lossless_lab.pipeline import compile_drift
from lossless_lab.pipeline.study import Study

IDS = torch.tensor([[1, 5, 9, 13, 22, 31], [1, 7, 8, 11, 15, 20], [1, 50, 41, 33, 20, 15]])


def changed(network, change):
    network = copy.deepcopy(network)
    with torch.no_grad():
        change(network)
    return network


# --- NaN on both sides


@pytest.mark.parametrize("value", [float("nan"), 3e38], ids=["nan", "inf"])
def test_the_same_nan_on_both_sides_is_no_difference_and_another_bit_is(t0, value):
    """Controls: a weight changed in layer 1, and one NaN less, are still differences."""
    bad = changed(t0, lambda m: m.model.layers[1].mlp.down_proj.weight.fill_(value))
    with torch.no_grad():
        a, b = (m(IDS).logits.numpy() for m in (bad, copy.deepcopy(bad)))
    assert np.array_equal(a.view(np.int32), b.view(np.int32)) and not np.isfinite(a).any()
    found = compare_layers(bad, copy.deepcopy(bad), IDS)
    assert found.first_place is None and found.nonfinite[2].total > 0
    assert "bitwise equal after every layer; layer 2: non-finite: same positions" in str(found)
    assert found.frame["relative_rms"].isna().any(), "figures of NaN stay NaN"
    assert observer_effect(bad, IDS) == 0
    drift = compile_drift(bad, IDS, stages=("capture",), region=compilation.mlps)
    assert drift.first_drifting is None

    early = changed(bad, lambda m: m.model.layers[0].mlp.down_proj.weight.mul_(1.01))
    assert compare_layers(bad, early, IDS).first_place == (1, "residual")
    assert compare_layers(bad, t0, IDS).first_place == (2, "residual")
    assert compare_layers(t0, bad, IDS).first_place == (2, "residual")


# --- one module in several layers


def test_a_part_that_several_layers_share_is_told_of_none_of_them(t0):
    """Its hook fires in each of them; the layers themselves, and the other parts, are compared."""

    def share(network):
        for layer in network.model.layers:
            layer.mlp = network.model.layers[0].mlp

    shared = changed(t0, share)
    other = changed(shared, lambda m: m.model.layers[0].mlp.down_proj.weight.mul_(1.01))
    found = compare_layers(shared, other, IDS, modules=True)
    places = found.frame[["layer", "module"]].apply(tuple, axis=1)
    assert places.is_unique and "mlp" not in set(found.frame["module"])
    assert "3 parts not compared, first mlp of layer 1" in str(found) and "shared" in str(found)
    with torch.no_grad():
        streams = [m(IDS, output_hidden_states=True).hidden_states[1:3] for m in (shared, other)]
    residual = found.frame.query("module == 'residual' and layer in (1, 2)")["relative_rms"]
    for ours, x, y in zip(residual, *streams, strict=True):
        x, y = (z.double().numpy() for z in (x, y))
        assert ours == pytest.approx(np.sqrt(((y - x) ** 2).sum() / (x**2).sum()), rel=1e-9)

    # one layer with an MLP of its own keeps its part: the control
    def part(network):
        network.model.layers[2].mlp = copy.deepcopy(network.model.layers[2].mlp)

    own = [changed(m, part) for m in (shared, other)]
    frame = compare_layers(*own, IDS, modules=True).frame
    assert frame.loc[frame["module"] == "mlp", "layer"].tolist() == [3]


# --- input


@pytest.mark.parametrize("call", [compare_layers, local_error, attribution, against_referee])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": IDS.float()}, "`input_ids`, whole numbers, must be.*float32"),
        ({"attention_mask": 2 * torch.ones_like(IDS)}, "`attention_mask` must be 1 where"),
        ({"attention_mask": torch.full(IDS.shape, 0.5)}, "`attention_mask` must be 1 where"),
        ({"attention_mask": torch.zeros_like(IDS)}, "`attention_mask` must"),
    ],
    ids=["float ids", "mask of 2", "mask of .5", "no token"],
)
def test_ids_and_masks_that_mean_something_else_are_refused(t0, call, given, message):
    """A mask of 2 numbered positions 1, 3, 5, and one of .5 gave every token position 0."""
    with pytest.raises(ValueError, match=message):
        call(t0, copy.deepcopy(t0), **({"input_ids": IDS} | given))


@pytest.mark.parametrize("mask", [torch.ones(IDS.shape, dtype=torch.bool), torch.ones(IDS.shape)])
def test_masks_of_ones_in_any_dtype_are_masks_of_ones(mask):
    assert model_inputs(IDS, mask)["position_ids"].tolist() == [list(range(6))] * 3


@pytest.mark.parametrize("thing", [None, "model", torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_named(t0, thing):
    with pytest.raises(ValueError, match=f"model is needed; got {type(thing).__name__}"):
        compare_layers(thing, t0, IDS)


def test_a_block_left_in_train_mode_is_no_finding():
    """Its dropout made layer 2 of a model differ from itself, another way each time."""
    network, half = build_g0(), build_g0()
    half.transformer.h[1].train()
    with torch.no_grad():
        assert not torch.equal(half(IDS).logits, half(IDS).logits), "the fault, by torch alone"
    for call in (compare_layers, against_referee):
        with pytest.raises(ValueError, match=r"`transformer.h.1.\S+` is in train mode"):
            call(network, half, IDS)
    no_dropout = build_t0()
    no_dropout.model.layers[1].train()  # changes nothing: no dropout there
    assert compare_layers(build_t0(), no_dropout, IDS).first_place is None


# --- the referee


def test_a_prompt_given_nine_times_is_no_sample_of_nine():
    """The control: nine different prompts are."""
    half = build_t0(torch.bfloat16)
    other = changed(half, lambda m: m.model.layers[0].mlp.down_proj.weight.mul_(1.02))
    again = against_referee(half, other, IDS[:1].repeat(9, 1))
    once = against_referee(half, other, IDS[:1])
    assert (again.unit, again.n_units, once.n_units) == ("position", 6, 6)
    assert again.ratio == pytest.approx(once.ratio) and again.word == once.word
    low, high = again.confidence_interval
    assert low < again.ratio < high, "nine equal rows have an interval of no width"
    several = torch.randint(3, 97, (9, 6), generator=torch.Generator().manual_seed(0))
    assert against_referee(half, other, several).unit == "row"
    assert room.MIN_ROWS <= 9


# --- tensors


def test_nothing_finite_is_never_equal_and_has_no_figures():
    nan = torch.full((4, 3), float("nan"))
    found = tensor_difference(nan, nan)
    assert found.answer == "not finite" and str(found).endswith("no finite pair")
    row = found.to_frame().iloc[0]
    assert row[["relative_rms", "sqnr_db", "cosine", "mismatch_share"]].astype(float).isna().all()
    mixed = nan.clone()
    mixed[0] = 1.0
    assert tensor_difference(mixed, mixed).answer == "equal"


def test_differences_whose_squares_vanish_are_not_called_nothing():
    x = torch.tensor([1e-200, 2e-200], dtype=torch.float64)
    for figures in (error_sums(x, 1.5 * x).figures, tensor_difference(x, 1.5 * x).sums.figures):
        assert figures["max_abs_difference"] == pytest.approx(1e-200)
        assert np.isnan([figures["relative_rms"], figures["sqnr_db"], figures["cosine"]]).all()
    assert error_sums(x, x).figures["relative_rms"] == 0
    assert error_sums(1e200 * x, 1.5e200 * x).relative_rms == pytest.approx(0.5)


def test_documents_without_a_name_count_too():
    """pandas drops None: 150 % of the pairs differed."""
    x = torch.arange(1.0, 9.0).reshape(4, 2)
    y = x + torch.tensor([[0.1], [-0.3], [0.2], [0.5]])
    found, named = (tensor_difference(x, y, groups=g) for g in ([None, *"abb"], [*"cabb"]))
    assert found.mismatch_share == 1 and found.sums.n == 8 and found.shift == named.shift
    assert found.shift.mean == pytest.approx((0.1 - 0.3 + 0.35) / 3, rel=1e-6)


def test_booleans_and_the_smallest_integer():
    assert tensor_difference(torch.tensor([True, False]), torch.tensor([True, True])).sums.n == 2
    with pytest.raises(ValueError, match="`reference` must hold integers up to"):
        tensor_difference(torch.tensor([-(2**63), 1]), torch.tensor([1, 1]))


@pytest.mark.parametrize("n", range(2, 8))
def test_errors_of_one_step_up_or_down_are_called_biased_no_more_often_than_stated(n):
    """Every pattern of n roundings, each up or down with equal chance: all counted, none drawn."""
    x = torch.arange(1.0, n + 1) * 0 + 1
    words = [
        tensor_difference(x, x + torch.tensor(signs) * 2**-7).answer
        for signs in itertools.product((-1.0, 1.0), repeat=n)
    ]
    assert words.count("bias") <= 0.05 * len(words)
    assert words.count("undecided") == (2 if n < 7 else 0), "the two where all go one way"
    assert tensor_difference(torch.ones(64), torch.ones(64) + 2**-7).answer == "bias"


# --- compilation


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": IDS[:, :2]}, "`input_ids` must be at least 3 long"),
        ({"stages": ()}, r"`stages` must be a list of one name or more; got \(\)"),
        ({"stages": "capture"}, "`stages` must be a list of one name or more; got 'capture'"),
    ],
)
def test_what_no_stage_can_be_told_of_is_refused(t0, given, message):
    with pytest.raises(ValueError, match=message):
        compile_drift(t0, **({"input_ids": IDS, "stages": ("capture",)} | given))


def test_both_sides_are_timed_in_turns(t0, monkeypatch):
    """A clock that goes on by 1 s for each eager and 3 s for each compiled call after the first."""
    module = importlib.import_module("lossless_lab.pipeline.compile_drift")
    now, calls, run = [0.0], [], module.forward
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def timed(network, inputs):
        calls.append(network is not t0)
        now[0] += (3 if len(calls) > 3 else 60) if network is not t0 else 1
        return run(network, inputs)

    monkeypatch.setattr(module, "forward", timed)
    row = compile_drift(t0, IDS, stages=("capture",), region=compilation.mlps).frame.iloc[0]
    assert (row["run_s"], row["eager_s"], row["compile_s"]) == (3, 1, 57)


def adding(amount, ran):
    """A backend whose code adds to every output, and notes each call."""

    def backend(graph, inputs):
        def run(*args):
            ran.append(amount)
            return [x + amount if x.is_floating_point() else x for x in graph(*args)]

        return run

    return backend


def test_two_compiled_candidates_of_one_study_each_run_their_own_code(t0, monkeypatch):
    """torch keeps so many compiled versions of one function; past them it runs eager code, unsaid.

    As torch comes they are 8 of one compilation (a fifth model compiled for two shapes is past
    them) and 256 of all: here 2, so that the second candidate is past them unless a study begins
    each anew.
    """
    expected = []
    for amount in (0.5, 1.0):
        network = changed(t0, lambda m: None)
        for layer in network.model.layers:
            layer.mlp.register_forward_hook(lambda m, a, y, amount=amount: y + amount)
        with torch.no_grad():
            expected.append(network(torch.tensor([PROMPT_S])).logits[0, -1])

    def gathered():
        torch._dynamo.reset()
        study = Study(
            t0, [list(PROMPT_S)], decoding=Decoding(max_new_tokens=3), n_variants=0,
            keep_logits=True, progress=False,
        )  # fmt: skip
        ran, logits = [], []
        for amount in (0.5, 1.0):
            name = study.add(compilation.mlps(adding(amount, ran))).candidate
            logits += [both[1][0] for both in study.evidence[name].logits.values()]
        return ran, logits

    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        ran, logits = gathered()
        assert set(ran) == {0.5, 1.0} and sorted(ran) == ran, "the second runs none of the first's"
        for ours, direct in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, direct, rtol=1e-4, atol=1e-4)
        # the control: code that is not forgotten, and the second candidate is no candidate at all
        reset = torch._dynamo.reset
        monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
        reset()
        assert 1.0 not in set(gathered()[0])


def test_more_shapes_than_torch_s_limit_all_run_compiled(t0):
    """Of 12 prompts compiled for fixed lengths, 5 once ran eager code: "exact share 5 of 12".

    The control is torch by itself under the same limit, 2 here.
    """
    ran = []

    def compiled(network):
        found = []
        for n in (3, 4, 5, 6):
            ran.clear()
            forward(network, model_inputs(torch.arange(3, 3 + n)[None], None))
            found.append(bool(ran))
        return found

    by_torch = copy.deepcopy(t0)
    mlp = by_torch.model.layers[0].mlp
    mlp.forward = torch.compile(mlp.forward, backend=adding(0.0, ran), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        assert compiled(by_torch) == [True, True, False, False]
        torch._dynamo.reset()
        ours = compilation.mlps(adding(0.0, ran), dynamic=False).apply(t0).network
        assert compiled(ours) == [True] * 4
