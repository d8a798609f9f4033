"""Error made against error inherited, and swapped layers against modules swapped by brute force."""

import copy
import math
import zlib

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0
from scipy import stats

from lossless_lab.numerical import attribution as room
from lossless_lab.numerical.attribution import Attribution, attribution, local_error
from lossless_lab.numerical.capture import HooksNeverFired, decoder_layers, forward, model_inputs
from lossless_lab.numerical.layers import compare_layers

IDS = torch.tensor([PROMPT_L])
PAD = len(PROMPT_L) - len(PROMPT_S)
PADDED = {
    "input_ids": torch.tensor([[0] * PAD + list(PROMPT_S), PROMPT_L]),
    "attention_mask": torch.tensor([[0] * PAD + [1] * len(PROMPT_S), [1] * len(PROMPT_L)]),
}


@pytest.fixture
def rng(request):
    """Seeded by the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def linears(block):
    return [m for m in block.modules() if hasattr(m, "weight") and m.weight.ndim == 2]


def damaged(network, **doses):
    """A copy whose matrices are scaled by 1 + dose in the named blocks, from 1: `l2=.1`."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        for layer, dose in doses.items():
            for m in linears(decoder_layers(network)[int(layer[1:]) - 1]):
                m.weight.mul_(1 + dose)
    return network


def int4(network):
    """A copy whose blocks' matrices are rounded to 15 levels a row."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        for block in decoder_layers(network):
            for m in linears(block):
                scale = m.weight.abs().amax(1, keepdim=True) / 7
                m.weight.copy_((m.weight / scale).round() * scale)
    return network


def logits_of(network, inputs):
    with torch.no_grad():
        mask = inputs.get("attention_mask")
        out = network(**model_inputs(inputs["input_ids"], mask)).logits
    mask = torch.ones(out.shape[:2]) if mask is None else mask
    return out[mask.bool()].double().numpy()


def spread(d):
    """Centred RMS: the standard deviation over the vocabulary, root mean square over positions."""
    return math.sqrt(np.mean(d.std(axis=1) ** 2))


def by_brute_force(reference, candidate, inputs):
    """Copies of both models with one module exchanged, run from the ids on."""
    base, end = logits_of(reference, inputs), logits_of(candidate, inputs)
    into, back, rest = [], [], [end - base, end - base]
    for i in range(len(decoder_layers(reference))):
        for side, (host, guest) in enumerate(((reference, candidate), (candidate, reference))):
            mixed = copy.deepcopy(host)
            decoder_layers(mixed)[i] = copy.deepcopy(decoder_layers(guest)[i])
            logits = logits_of(mixed, inputs)
            if side == 0:
                into.append(spread(logits - base))
                rest[0] = rest[0] - (logits - base)
            else:
                back.append(spread(end - base) - spread(logits - base))
                rest[1] = rest[1] - (end - logits)
    return into, back, spread(end - base), [spread(r) for r in rest]


@pytest.mark.parametrize("build", [build_t0, build_g0])
@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, PADDED], ids=["alone", "padded"])
def test_every_effect_equals_modules_swapped_by_brute_force(build, inputs):
    reference, candidate = build().double(), int4(build()).double()
    found = attribution(reference, candidate, **inputs)
    into, back, whole, rest = by_brute_force(reference, candidate, inputs)
    assert np.allclose(found.frame["into_logit_rms"], into, rtol=1e-9)
    assert np.allclose(found.frame["back_logit_rms"], back, rtol=1e-9)
    assert np.allclose(found.frame["interaction_logit_rms"], np.subtract(back, into), rtol=1e-9)
    assert found.whole == pytest.approx(whole, rel=1e-9)
    assert [found.remainder_into, found.remainder_back] == pytest.approx(rest, rel=1e-9)
    assert found.n_positions == (13 if "attention_mask" in inputs else 9)
    swapped = attribution(candidate, reference, **inputs)  # the mutant: sides exchanged
    assert not np.allclose(swapped.frame["back_logit_rms"], back, rtol=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "qwen3_next", "opt", "falcon"])
def test_swaps_in_other_families_equal_brute_force(family):
    """Layers are replayed by the model's own code: masks, rotary tables, soft caps and scales."""
    from test_layers import build

    reference = build(family)
    candidate = damaged(reference, l1=0.05, l2=-0.05)
    found = attribution(reference, candidate, **PADDED)
    into, back, whole, _ = by_brute_force(reference, candidate, PADDED)
    assert np.allclose(found.frame["into_logit_rms"], into, rtol=1e-5)
    assert np.allclose(found.frame["back_logit_rms"], back, rtol=1e-4, atol=1e-6)
    assert found.whole == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_one_damaged_layer_is_named_by_both_views(layer):
    reference = build_t0()
    found = attribution(reference, damaged(reference, **{f"l{layer}": 0.01}), IDS)
    assert found.ranking == (layer,)
    changed = found.frame["layer"] == layer
    effects = found.frame.loc[changed, ["into_logit_rms", "back_logit_rms"]].to_numpy()
    assert np.allclose(effects, found.whole) and found.whole > 0
    rest = found.frame.loc[~changed, ["into_logit_rms", "back_logit_rms"]]
    assert (rest == 0).all(axis=None)  # bitwise: what is replayed is not recomputed
    assert str(found).startswith(f"layer {layer} alone changes the logits; whole drift")


def test_graded_damage_is_ranked():
    """Six layers damaged more and more: both views agree, and the order is that of the doses."""
    reference = build_t0(num_hidden_layers=6)
    doses = {"l4": 0.3, "l2": 0.03, "l6": 0.003, "l1": 3e-4, "l3": 3e-5, "l5": 3e-6}
    found = attribution(reference.double(), damaged(reference, **doses).double(), IDS)
    assert found.frame["into_logit_rms"].rank(ascending=False).tolist() == [4, 2, 5, 1, 6, 3]
    if found.ranking:
        assert found.ranking[0] == 4
    assert "rank correlation" in str(found)


def test_two_layers_that_undo_each_other_show_as_interaction():
    """Scaling V by 2 and O by 1/2 across two damaged layers: alone each is large, together less."""
    reference = build_t0()
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        first, second = decoder_layers(candidate)[:2]
        direction = torch.randn(64, generator=torch.Generator().manual_seed(0))
        first.mlp.down_proj.weight.add_(0.5 * direction[:, None])
        second.mlp.down_proj.weight.sub_(0.5 * direction[:, None])
    found = attribution(reference, candidate, IDS)
    assert found.ranking is None and str(found).startswith("no ranking: too few layers change")
    assert found.remainder_into > 0.1 * found.whole
    assert (found.frame["interaction_logit_rms"][:2].abs() > 0.1 * found.whole).any()
    apart = attribution(reference, damaged(reference, l1=1e-4, l3=1e-4), IDS)
    assert apart.remainder_into < 0.02 * apart.whole  # small doses add up


@pytest.mark.parametrize("n_layers", [3, 8])
def test_rounding_every_layer_to_int4_gives_no_false_ranking(n_layers):
    """On these models the views disagree, so nothing is ranked although effects differ by 10."""
    reference = build_t0(num_hidden_layers=n_layers)
    found = attribution(reference, int4(reference), IDS)
    assert found.ranking is None and (found.frame["into_logit_rms"] > 0).all()
    r = stats.spearmanr(found.frame["into_logit_rms"], found.frame["back_logit_rms"]).statistic
    assert found.rank_correlation == pytest.approx(r)
    why = "the two views disagree" if n_layers > 3 else "too few layers change to tell agreement"
    assert str(found).startswith(f"no ranking: {why}")
    assert f"(rank correlation {r:.2g}, p = {found.pvalue:.2g})" in str(found)
    assert found.frame["into_logit_rms"].max() > 3 * found.frame["into_logit_rms"].min()


def result(into, back):
    frame = pd.DataFrame({"layer": range(1, len(into) + 1), "into_logit_rms": into})
    frame = frame.assign(back_logit_rms=back, interaction_logit_rms=np.subtract(back, into))
    r, p = room._agreement(room._changed(frame))
    values = {"whole": 1.0, "remainder_into": 0.1, "remainder_back": 0.1, "n_positions": 9}
    return Attribution(frame=frame, rank_correlation=r, pvalue=p, **values)


def test_views_that_have_nothing_in_common_are_ranked_at_the_stated_rate(rng):
    """5 % for the correlation, times the chance of one first layer, which goes with it."""
    ranked = 0
    for _ in range(200):
        ranked += result(rng.random(12), rng.random(12)).ranking is not None
    assert stats.binomtest(ranked, 200).proportion_ci(0.998, method="exact").low <= 0.05
    agreeing = [result(x := rng.random(12), x + 0.1 * rng.random(12)) for _ in range(20)]
    assert sum(a.ranking is not None for a in agreeing) >= 15


def test_the_rule_of_the_ranking():
    rising = np.arange(1.0, 6)
    assert result(rising, rising).ranking == (5, 4, 3, 2, 1)
    assert result(rising, rising).pvalue == pytest.approx(1 / 120)  # exact: 1 of 5!
    assert result(rising[:3], rising[:3]).ranking is None  # 1 of 3! is no evidence
    assert result(rising, [1, 2, 3, 5, 4]).ranking is None  # p = 5/120, but another layer first
    assert result(rising, rising[::-1]).ranking is None
    assert result([0, 2, 0], [0, -1, 0]).ranking == (2,)
    assert result([0, 0, 0], [0, 0, 0]).ranking is None
    lost = result([1, math.nan, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    assert lost.ranking is None and math.isnan(lost.rank_correlation)


def test_changes_that_have_no_layers():
    reference = build_t0()
    with pytest.raises(ValueError, match="no attribution by layer: every layer of"):
        attribution(reference, build_t0().bfloat16(), IDS)
    same = attribution(reference, build_t0(), IDS)
    assert same.ranking is None and same.whole == 0
    assert str(same).startswith("no ranking: no layer changes the logits; whole drift 0 ")
    head = build_t0()
    with torch.no_grad():
        head.lm_head.weight.mul_(1.01)
    outside = attribution(reference, head, IDS)
    assert outside.whole > 0 and "what changed lies outside the layers" in str(outside)


def test_a_nan_is_no_ranking():
    candidate = build_t0()
    with torch.no_grad():
        decoder_layers(candidate)[1].mlp.down_proj.weight[0, 0] = math.nan
    found = attribution(build_t0(), candidate, IDS)
    assert found.ranking is None and "logits are not finite" in str(found)
    assert found.frame["into_logit_rms"].isna().tolist() == [False, True, False]


def test_sizes_that_differ_are_named():
    for changes, what in (
        ({"num_hidden_layers": 4}, "has 4 layers and `reference` 3"),
        ({"hidden_size": 32}, "has 32 features in the residual stream and `reference` 64"),
        ({"vocab_size": 99}, "has 99 tokens in the vocabulary and `reference` 97"),
    ):
        with pytest.raises(ValueError, match=f"`candidate` {what}"):
            attribution(build_t0(), build_t0(**changes), IDS)
        if "num_hidden_layers" not in changes:
            with pytest.raises(ValueError, match="sizes must be equal"):
                local_error(build_t0(), build_t0(**changes), IDS)
    with pytest.raises(ValueError, match="got up to 97: ids of another tokenizer"):
        attribution(build_t0(), build_t0(), torch.tensor([[97]]))


def test_nothing_before_the_swapped_layer_is_run_again():
    """Two recorded passes, one replayed layer each as a check, and L − i layers for each swap."""
    networks = build_t0(), damaged(build_t0(), l2=0.1)
    ran = []
    for network in networks:
        for layer in decoder_layers(network):
            layer.register_forward_hook(lambda module, args, output: ran.append(module))
    attribution(*networks, IDS)
    assert len(ran) == 2 * 3 + 2 + 2 * (3 + 2 + 1)


@pytest.mark.parametrize("subject", ["quantised", "pruned"])
def test_other_subjects_are_attributed(subject):
    from test_layers import SUBJECTS

    reference, candidate = build_t0(), SUBJECTS[subject]()
    found = attribution(reference, candidate, **PADDED)
    into, back, whole, _ = by_brute_force(reference, candidate, PADDED)
    assert np.allclose(found.frame["into_logit_rms"], into, rtol=1e-5)
    assert np.allclose(found.frame["back_logit_rms"], back, rtol=1e-4, atol=1e-6)
    assert found.whole == pytest.approx(whole, rel=1e-6)
    assert (local_error(reference, candidate, **PADDED)["local_relative_added"] > 0).all()


def test_quantos_layers_do_what_the_same_integers_do_by_hand():
    from test_layers import SUBJECTS

    quanto, by_hand = (SUBJECTS[name]() for name in ("quantised by quanto", "quantised"))
    frames = [attribution(build_t0(), candidate, IDS).frame for candidate in (quanto, by_hand)]
    assert np.allclose(*(f["into_logit_rms"] for f in frames), rtol=1e-3)
    frames = [local_error(build_t0(), candidate, IDS) for candidate in (quanto, by_hand)]
    assert np.allclose(*(f["local_relative_rms"] for f in frames), rtol=1e-3)


def test_layers_compiled_by_parts_can_be_swapped():
    from test_layers import SUBJECTS

    network = SUBJECTS["compiled by parts"]()
    assert attribution(build_t0(), network, IDS).whole == 0
    assert (local_error(build_t0(), network, IDS)["local_relative_rms"] == 0).all()


def test_both_models_are_left_as_they_were():
    networks = build_t0(), damaged(build_t0(), l2=0.1)
    inputs = model_inputs(IDS, None)
    before = [(forward(m, inputs), list(decoder_layers(m))) for m in networks]
    attribution(*networks, IDS)
    local_error(*networks, IDS)
    decoder_layers(networks[1])[2].forward = None  # fails on the way
    with pytest.raises(TypeError):
        attribution(*networks, IDS)
    del decoder_layers(networks[1])[2].forward
    for network, (logits, layers) in zip(networks, before, strict=True):
        assert torch.equal(forward(network, inputs), logits)
        assert all(a is b for a, b in zip(decoder_layers(network), layers, strict=True))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_a_model_that_passes_more_than_its_outputs_on_is_refused():
    """A layer that leaves something behind for the next one: replayed, it would be forgotten."""
    network = build_t0()
    first, last = decoder_layers(network)[0], decoder_layers(network)[2]
    left = []
    first.register_forward_pre_hook(lambda module, args: left.append(torch.arange(64.0)))
    last.register_forward_hook(lambda module, args, output: output + (left.pop() if left else 0))
    with pytest.raises(RuntimeError, match="`reference` gives other logits when its stored"):
        attribution(network, build_t0(), IDS)


def test_compiled_models_have_no_layers_to_swap():
    network = build_t0()
    network.forward = torch.compile(network.forward, backend="eager")
    with torch.no_grad():
        network(input_ids=IDS, position_ids=torch.arange(9)[None], use_cache=False)
    for call in (attribution, local_error):
        with pytest.raises(HooksNeverFired, match="`candidate`"):
            call(build_t0(), network, IDS)


def local_by_numpy(reference, candidate, ids):
    """Each candidate block called by hand on the reference's stream, rotary tables given."""
    with torch.no_grad():
        out = reference(ids, output_hidden_states=True)
        kept = []
        handles = [
            block.register_forward_hook(lambda m, a, o: kept.append(o))
            for block in decoder_layers(reference)
        ]
        reference(ids)
        for handle in handles:
            handle.remove()
        positions = torch.arange(ids.shape[1])[None]
        streams = [out.hidden_states[0], *kept]
        rows = []
        for i, block in enumerate(decoder_layers(candidate)):
            start = streams[i].to(next(block.parameters()).dtype)
            tables = candidate.model.rotary_emb(start, positions)
            made = block(start, position_embeddings=tables, position_ids=positions)
            x, y, a, b = (z.double().numpy() for z in (streams[i + 1], made, streams[i], start))
            error = np.linalg.norm((y - b) - (x - a)) / np.linalg.norm(x - a)
            rows.append((error, np.linalg.norm(y - x) / np.linalg.norm(x)))
    return np.array(rows)


@pytest.mark.parametrize("kind", ["int4", "bfloat16", "float64"])
def test_local_errors_equal_blocks_called_by_hand(kind):
    reference = build_t0(torch.float64 if kind == "float64" else torch.float32)
    candidate = int4(build_t0()) if kind == "int4" else int4(build_t0()).to(getattr(torch, kind))
    frame = local_error(reference, candidate, IDS)
    expected = local_by_numpy(reference, candidate, IDS)
    assert np.allclose(frame["local_relative_added"], expected[:, 0], rtol=1e-4)
    assert np.allclose(frame["local_relative_rms"], expected[:, 1], rtol=1e-4)
    drift = compare_layers(reference, candidate, IDS).frame
    assert frame["accumulated_relative_rms"].tolist() == drift["relative_rms"][1:4].tolist()
    # The mutant: a candidate fed its own stream shows accumulated error as local.
    assert not np.allclose(frame["accumulated_relative_rms"][1:], expected[1:, 1], rtol=1e-2)


def test_error_made_is_told_from_error_inherited():
    frame = local_error(build_t0(), damaged(build_t0(), l2=0.01), **PADDED)
    assert (frame["local_relative_rms"] > 0).tolist() == [False, True, False]
    assert (frame["accumulated_relative_rms"] > 0).tolist() == [False, True, True]
    assert frame["n_positions"].tolist() == [13] * 3
    network = build_t0()
    assert (local_error(network, network, IDS)["local_relative_added"] == 0).all()


def test_local_errors_of_a_model_with_dropped_layers():
    full, short = build_t0(), build_t0()
    del decoder_layers(short)[1]
    short.config.num_hidden_layers = 2
    frame = local_error(full, short, IDS, layer_map={1: 1, 2: 3})
    assert frame["layer"].tolist() == [1, 3] and (frame["local_relative_rms"] == 0).all()
    assert (frame["accumulated_relative_rms"] > 0).tolist() == [False, True]


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mixtral", "qwen3_next", "opt"])
def test_local_errors_in_other_families(family):
    from test_layers import build

    frame = local_error(build(family), damaged(build(family), l1=0.02), **PADDED)
    assert (frame["local_relative_added"] > 0).tolist() == [True, False]
    assert (frame["accumulated_relative_rms"] > 0).all()
