"""Every numerical mutant does what it says, is told from rounding noise, and is placed."""

import copy
import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from architectures import ARCHITECTURES, build
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0

from benchmarks import harmless
from benchmarks import mutants as calibration
from lossless_lab.mutants import MUTANTS, Mutant, NotApplicable
from lossless_lab.numerical.attribution import attribution
from lossless_lab.numerical.capture import decoder_layers
from lossless_lab.numerical.history import call_history
from lossless_lab.numerical.local import local_error
from lossless_lab.optimizations.entry import fingerprint
from lossless_lab.stats.intervals import share_interval

IDS = torch.tensor([PROMPT_L])
LOCAL = [m for m in MUTANTS.values() if m.kind == "layer-local"]
RAGGED = torch.tensor([[0] * 5 + [*PROMPT_S], PROMPT_L])
MASK = torch.tensor([[0] * 5 + [1] * 4, [1] * 9])
POSITIONS = (MASK.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def logits(network, ids=IDS, **given):
    return network(ids, use_cache=False, **given).logits


def close(x, y, atol=2e-5):
    return torch.allclose(x, y, atol=atol) and not torch.equal(x.isnan(), ~x.isnan())


# What each mutant does, against a construction that owes nothing to it.


def with_mask(network, change):
    """Logits under a hand-made additive mask [seq_len, seq_len]."""
    n = IDS.shape[1]
    mask = torch.full((n, n), -math.inf).triu(1)
    change(mask, torch.arange(n))
    return logits(network, attention_mask=mask[None, None].nan_to_num(neginf=-3e38))


def test_positions_equal_explicit_ones():
    moved = {"position_ids": torch.tensor([[0, 1, 2, 3, 5, 6, 7, 8, 9]])}
    moved["attention_mask"] = torch.ones_like(IDS)  # else the gap is read as two packed texts
    for network in (build_t0(), build_g0()):
        broken = MUTANTS["positions"].apply(network, dose=1)
        assert close(logits(broken), logits(network, **moved))
        assert not close(logits(broken), logits(network))


@pytest.mark.parametrize("build", [build_t0, build_g0])
def test_masks_equal_handmade_ones(build):
    def hide(mask, i):
        mask[i[1:], i[:-1]] = math.log(0.25)

    def leak(mask, i):
        mask[i[:-1], i[1:]] = math.log(0.75)

    network = build()
    for name, change in (("hidden-key", hide), ("leak", leak)):
        broken = MUTANTS[name].apply(network, dose=0.75)
        assert close(logits(broken), with_mask(network, change))


def test_a_visible_pad_equals_no_mask_and_needs_pads():
    network = build_t0()
    broken = MUTANTS["visible-pad"].apply(network, dose=1)
    seen = logits(broken, RAGGED, attention_mask=MASK, position_ids=POSITIONS)
    ones = torch.ones_like(MASK)  # with no mask at all, restarts would be read as packed texts
    assert close(seen, logits(network, RAGGED, attention_mask=ones, position_ids=POSITIONS))
    assert torch.equal(logits(broken), logits(network))  # inert without pads


def test_a_stale_row_equals_a_cache_edited_by_hand():
    network = build_t0()
    broken = MUTANTS["stale-cache"].apply(network, dose=1)
    assert torch.equal(logits(broken), logits(network))  # inert without a cache
    found = []
    with torch.no_grad():
        for model in (network, broken):
            out = model(IDS[:, :8], use_cache=True)
            if model is network:
                for layer in out["cache"].layers:
                    layer.keys[..., 7, :] = layer.keys[..., 6, :]
                    layer.values[..., 7, :] = layer.values[..., 6, :]
            found.append(model(IDS[:, 8:], cache=out["cache"]).logits)
    assert close(*found)


def test_state_is_the_answer_to_the_call_before():
    network = build_t0()
    broken = MUTANTS["state"].apply(network, dose=0.5)
    other = torch.tensor([PROMPT_S])
    first, _, again = (logits(broken, x) for x in (IDS, other, IDS))
    assert torch.equal(first, logits(network))
    assert close(again, (logits(network) + logits(network, other)[:, -1:]) / 2)
    assert not call_history(lambda x: logits(broken, x), [IDS, other]).independent
    assert call_history(lambda x: logits(network, x), [IDS, other]).independent


def test_windows_and_rotary_bases_equal_other_configs():
    def built(**changes):
        config = copy.deepcopy(calibration.build_window().config)
        for name, value in changes.items():
            setattr(config, name, value)
        other = calibration.MistralForCausalLM(config).eval()
        other.load_state_dict(calibration.build_window().state_dict())
        return other

    for name, dose, size in (("window-wide", 1, 9), ("window-narrow", 2, 6)):
        broken = MUTANTS[name].apply(calibration.build_window(), dose=dose)
        assert torch.equal(logits(broken), logits(built(sliding_window=size)))
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    broken = MUTANTS["rope-base"].apply(calibration.build_window(), dose=9)
    assert close(logits(broken), logits(built(rope_parameters=rope)))


def test_scales_norms_and_weights_equal_edits_by_hand():
    network = build_t0()
    block = decoder_layers(network)[1]
    broken = MUTANTS["attention-scale"].apply(network, dose=1)
    with torch.no_grad():
        twice = copy.deepcopy(network)
        decoder_layers(twice)[1].self_attn.q_proj.weight.mul_(2)
    assert close(logits(broken), logits(twice))
    norms = decoder_layers(MUTANTS["eps-large"].apply(network, dose=0.5))[1]
    assert norms.input_layernorm.variance_epsilon == 0.5
    assert norms.post_attention_layernorm.variance_epsilon == 0.5
    damaged = decoder_layers(MUTANTS["damaged-weights"].apply(network, dose=0.1))[1]
    for before, after in zip(block.parameters(), damaged.parameters(), strict=True):
        rms = float((after - before).square().mean().sqrt() / before.square().mean().sqrt())
        assert rms == pytest.approx(0.1 if before.dim() > 1 else 0, rel=0.05)


def test_the_residual_loses_its_share():
    network = build_t0()
    given, kept = [], []
    for model in (network, MUTANTS["residual"].apply(network, dose=0.25)):
        block = decoder_layers(model)[1]
        block.register_forward_hook(lambda m, args, out: kept.append(out))
        block.register_forward_pre_hook(lambda m, args: given.append(args[0]))
        logits(model)
    assert close(kept[1], kept[0] - 0.25 * given[0])


def test_a_tied_matrix_leaves_the_other():
    network = build_g0()
    broken = MUTANTS["untied-head"].apply(network, dose=0.1)
    head, table = broken.lm_head.weight, broken.transformer.wte.weight
    assert torch.equal(table, network.transformer.wte.weight)
    assert float((head - table).std() / table.std()) == pytest.approx(0.1, rel=0.05)
    swapped = MUTANTS["exchanged-rows"].apply(network, dose=0.02)
    moved = (swapped.transformer.wte.weight != network.transformer.wte.weight).any(1)
    assert moved.sum() == 2 and torch.equal(swapped.lm_head.weight, network.lm_head.weight)


def test_nan_and_overflow_stand_where_they_should():
    kept = []
    for name, dose in (("one-nan", 1), ("overflow", 2.0**20)):
        broken = MUTANTS[name].apply(build_t0(), dose=dose, layer=2)
        decoder_layers(broken)[1].register_forward_hook(lambda m, args, out: kept.append(out))
        logits(broken)
    assert kept[0].isnan().nonzero().tolist() == [[0, 5, 0]]
    assert kept[1].isinf().any() and not kept[1].isnan().any()
    harmless = MUTANTS["overflow"].apply(build_t0(), dose=1)
    assert torch.equal(logits(harmless), logits(build_t0()))


# What all of them share.


@pytest.mark.parametrize("name", MUTANTS)
def test_the_original_stays_and_copies_stay_broken(name):
    network = calibration.build_window()
    before, mutant = fingerprint(network), MUTANTS[name]
    broken = mutant.apply(network, dose=mutant.natural)
    again = copy.deepcopy(broken)  # shares nothing with the first but the fault
    given = {"attention_mask": MASK, "position_ids": POSITIONS}
    seen = [[logits(m, RAGGED, **given) for _ in range(2)] for m in (broken, again)]
    for x, y in zip(*seen, strict=True):
        assert torch.equal(x.nan_to_num(nan=7e7), y.nan_to_num(nan=7e7))
    assert fingerprint(network) == before
    weights = {p.data_ptr() for m in (network, broken) for p in m.parameters()}
    assert not weights & {p.data_ptr() for p in again.parameters()}


def test_every_mutant_says_what_it_is():
    for name, mutant in MUTANTS.items():
        assert mutant.name == name and mutant.unit and mutant.imitates.endswith(".")
        assert str(mutant).startswith(f"{name} ({mutant.kind}, natural dose ")
    with pytest.raises(ValueError, match="`dose` must be finite and above 0; got 0"):
        MUTANTS["leak"].apply(build_t0(), dose=0)
    with pytest.raises(ValueError, match="`dose` must be at most 1, a share of the weight; got 2"):
        MUTANTS["leak"].apply(build_t0(), dose=2)
    with pytest.raises(ValueError, match="`layer` must be from 1 to 3; got 4"):
        MUTANTS["one-nan"].apply(build_t0(), dose=1, layer=4)
    with pytest.raises(ValueError, match="leak is global: `layer` must be None; got 1"):
        MUTANTS["leak"].apply(build_t0(), dose=1, layer=1)
    with pytest.raises(ValueError, match="`doses` must fall"):
        dataclasses.replace(MUTANTS["leak"], doses=(0.1, 1.0))
    with pytest.raises(ValueError, match="`kind` must be one of layer-local, global"):
        Mutant(name="x", kind="x", doses=(1.0,), unit="", imitates="", edit=print)


def test_what_is_missing_is_named():
    for name, network in (("window-wide", build_t0()), ("rope-base", build_g0())):
        with pytest.raises(NotApplicable, match="`network` has no"):
            MUTANTS[name].apply(network, dose=1)
    with pytest.raises(NotApplicable, match="norms whose eps is 1e-06 already"):
        MUTANTS["eps-swapped"].apply(build_t0(), dose=1e-6)
    stored = build_t0()
    for block in decoder_layers(stored):
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.variance_epsilon = float(np.float32(1e-5))  # as files that keep float32 give it
    with pytest.raises(NotApplicable, match="already"):
        MUTANTS["eps-swapped"].apply(stored, dose=1e-5)
    with pytest.raises(NotApplicable, match="no part that exchanged-rows could break"):
        MUTANTS["exchanged-rows"].apply(build_t0(), dose=0.001)  # of 97 rows
    idle = dataclasses.replace(MUTANTS["leak"], edit=lambda network, dose: 0)
    with pytest.raises(NotApplicable, match="no part that leak could break"):
        idle.apply(build_t0(), dose=1)


def test_windows_move_by_whole_keys_and_keep_one():
    network = calibration.build_window()
    with pytest.raises(ValueError, match="`dose` must be whole keys"):
        MUTANTS["window-wide"].apply(network, dose=0.5)
    assert MUTANTS["window-narrow"].apply(network, dose=7).config.sliding_window == 1
    with pytest.raises(NotApplicable, match="no window to lose 8 keys: it has 8"):
        MUTANTS["window-narrow"].apply(network, dose=8)


def test_a_patched_or_compiled_network_is_refused_by_name():
    """Its copy would go on running the original's weights."""
    patched, compiled = build_t0(), build_t0()
    run = patched.model.layers[1].mlp.forward
    patched.model.layers[1].mlp.forward = lambda x: run(x)
    compiled.model.layers[1] = torch.compile(compiled.model.layers[1])
    for network in (patched, compiled):
        with pytest.raises(ValueError, match=r"`model.layers.1.* carries a forward of its own"):
            MUTANTS["damaged-weights"].apply(network, dose=0.5, layer=2)


NO_KEYS = {"hidden-key", "visible-pad", "leak", "stale-cache", "positions", "rope-base"}
LACKING = {
    **{name: set() for name in (*ARCHITECTURES, "Mamba", "AlibiFalcon")},
    "GPT2": {"rope-base", "eps-swapped"},
    "GPTNeoX": {"eps-swapped"},
    "Falcon": {"attention-scale", "eps-swapped"},
    "AlibiFalcon": {"attention-scale", "eps-swapped", "positions", "rope-base"},
    "Bloom": {"attention-scale", "eps-swapped", "positions", "rope-base"},
    "OPT": {"rope-base", "eps-swapped", "overflow"},
    "Phi3": {"eps-swapped"},
    "Olmo2": {"eps-swapped"},
    "Mixtral": {"eps-swapped"},
    "Mamba": NO_KEYS | {"attention-scale", "eps-swapped", "overflow"},
}
WINDOWED = {"Mistral", "Gemma2", "Gemma3"}


def built(architecture):
    if architecture == "Mamba":
        sizes = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 97, "state_size": 8}
        return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    if architecture == "AlibiFalcon":
        config = build("Falcon").config
        config.alibi = True
        return transformers.FalconForCausalLM(config).eval()
    return build(architecture)


@torch.no_grad()
def answers(network):
    """Logits of real tokens: a batch with pads, one more token by the cache, and all again."""
    found = []
    for _ in range(2):
        out = network(RAGGED[:, :-1], attention_mask=MASK[:, :-1], use_cache=True)
        cache = {"cache": out["cache"]}
        more = network(RAGGED[:, -1:], attention_mask=MASK, use_cache=True, **cache)
        found += [out.logits[MASK[:, :-1].bool()], more.logits.flatten(0, 1)]
    return torch.cat(found)


@pytest.mark.parametrize("architecture", LACKING)
def test_on_any_architecture_a_mutant_changes_the_logits_or_is_not_applicable(architecture):
    network = built(architecture)
    own, lacking = answers(network), set()
    for name, mutant in MUTANTS.items():
        try:
            broken = mutant.apply(network, dose=mutant.natural)
        except NotApplicable:
            lacking.add(name)
        else:
            assert not torch.equal(answers(broken), own), name
    windows = set() if architecture in WINDOWED else {"window-wide", "window-narrow"}
    assert lacking == LACKING[architecture] | windows


# Told apart from rounding noise.

SUBJECTS = [
    (name, dtype)
    for name in ("T0", "T0, window 8", "G0", "tiny-target")
    for dtype in calibration.DTYPES
]
QUICK = {(name, dtype) for name, dtype in SUBJECTS if name in ("T0", "tiny-target")}
QUICK.add(("T0, window 8", "float32"))
CASES = [pytest.param(*s, marks=[] if s in QUICK else pytest.mark.slow) for s in SUBJECTS]


@pytest.fixture(scope="module")
def measured():
    """(subject, dtype) -> the reference with its floors, measured once."""
    kept = {}

    def find(name, dtype):
        if (name, dtype) not in kept:
            kept[name, dtype] = calibration.subject(name, dtype)
        return kept[name, dtype]

    return find


def applied(mutant, on, dose=None, layer=None):
    """The mutant, or None where the subject lacks what it breaks."""
    try:
        return mutant.apply(on.network, dose=dose or mutant.natural, layer=layer)
    except NotApplicable:
        return None


def caught(on, network):
    """Whether some position passes the floor by some measure; NaN does."""
    multiples = on.multiples(calibration.along(network, on.completions))
    return not all(x <= 1 for x in multiples.values())


@pytest.mark.parametrize("name, dtype", CASES)
def test_at_its_natural_dose_every_mutant_passes_the_noise(measured, name, dtype):
    """All but the swapped eps, whose true size is below the floor: listed, never skipped."""
    on = measured(name, dtype)
    found = {m: applied(m, on) for m in MUTANTS.values()}
    lacking = {m.name for m, network in found.items() if network is None}
    windows = {"window-wide", "window-narrow"}
    without = {"T0, window 8": set(), "G0": windows | {"rope-base", "eps-swapped"}}
    assert lacking == without.get(name, windows)
    missed = {m.name for m, n in found.items() if n is not None and not caught(on, n)}
    assert missed == {"eps-swapped"} - lacking
    for swapped in missed:
        rms, _ = calibration.oracle(on, found[MUTANTS[swapped]])
        assert rms < on.floor.unit


def assert_never_called_the_same(on, mutants):
    """Where the oracle is beyond the margin of a level, EQUIVALENT and PROVEN are failures."""
    seen = [calibration.judge(m, dose, on) for m, dose in mutants]
    seen = [x for x in seen if x is not None]
    assert any(x["beyond"] for x in seen)
    assert not [x for x in seen if x["beyond"] & x["same"]]


def test_check_calls_no_natural_mutant_the_same(measured):
    natural = [(m, m.natural) for m in MUTANTS.values()]
    assert_never_called_the_same(measured("T0", "float32"), natural)


def test_an_answer_that_is_always_equivalent_would_show(measured):
    """The mutant of this check: with margins as wide as can be, level 2 is always EQUIVALENT."""
    on = measured("T0", "float32")
    wide = dataclasses.replace(on, floor=dataclasses.replace(on.floor, level=9.0, peaks={}))
    leak = calibration.judge(MUTANTS["leak"], 1.0, wide)
    assert leak["same"] == {"1c"} and not leak["caught"] and leak["beyond"] == {"2"}


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", SUBJECTS)
def test_check_calls_no_mutant_the_same_at_any_dose(measured, name, dtype):
    doses = [(m, dose) for m in MUTANTS.values() for dose in m.doses]
    assert_never_called_the_same(measured(name, dtype), doses)


# The layer is named.


@pytest.mark.parametrize("name, dtype", CASES)
def test_the_planted_layer_is_named_in_every_layer(measured, name, dtype):
    on = measured(name, dtype)
    n_layers = len(decoder_layers(on.network))
    for mutant in LOCAL:
        for layer in range(1, n_layers + 1):
            broken = applied(mutant, on, layer=layer)
            if broken is None:
                assert (mutant.name, name) == ("eps-swapped", "G0")  # its eps already
                continue
            place = on.first_noisy_layer(broken)
            if mutant.name == "eps-swapped":
                assert place in (None, layer)
            else:
                assert place == layer, (mutant.name, layer)


def test_error_made_and_attribution_single_the_planted_layer_out():
    """Fed the reference's own input, every other layer is bitwise right."""
    network = build_t0()
    for mutant in LOCAL:
        for layer in (1, 3):
            broken = mutant.apply(network, dose=mutant.natural, layer=layer)
            made = local_error(network, broken, IDS).set_index("layer")["local_relative_rms"]
            assert made.index[made != 0].tolist() == [layer], mutant.name
            if mutant.name not in ("one-nan", "overflow"):
                taken = attribution(network, broken, IDS).frame
                assert taken["layer"][taken["into_logit_rms"] != 0].tolist() == [layer]


def published():
    return pd.read_csv(calibration.TABLE)


@pytest.mark.parametrize("name, dtype", [("T0", "float32"), ("tiny-target", "bfloat16")])
def test_the_planted_layer_is_named_down_to_the_published_dose(measured, name, dtype):
    on = measured(name, dtype)
    middle = (len(decoder_layers(on.network)) + 1) // 2
    table = published().query("subject == @name and dtype == @dtype").set_index("mutant")
    for mutant in LOCAL:
        doses = [d for d in mutant.doses if d > 1.001 * table.loc[mutant.name, "smallest_located"]]
        for dose in doses:
            assert on.first_noisy_layer(applied(mutant, on, dose)) == middle, (mutant.name, dose)


# Harmless re-orderings are not mutants.


@pytest.mark.parametrize("name, dtype", CASES)
def test_harmless_reorderings_pass_a_floor_that_none_of_them_set(
    measured, name, dtype, record_property
):
    on = measured(name, dtype)
    found = harmless.judged(on)
    assert not set(found["variant"]) & set(on.floor.variants)
    counts = harmless.flagged(found, on.floor.rate)
    line = f"{name} {dtype}: {counts}"
    print(line)
    record_property("harmless", line)
    assert counts["n_distinct"] >= 30
    assert max(counts["flagged_rms"], counts["flagged_peak"]) <= counts["allowed"], counts


def test_a_faulty_reordering_would_be_flagged(measured):
    """The mutant of this check: the same variants of a network whose weights are damaged."""
    on = measured("T0", "float32")
    broken = MUTANTS["damaged-weights"].apply(on.network, dose=1e-4)
    found = harmless.judged(dataclasses.replace(on, network=broken), against=on)
    counts = harmless.flagged(found, on.floor.rate)
    assert counts["flagged_rms"] == counts["n_distinct"]


def test_the_table_of_harmless_reorderings_keeps_the_stated_rate():
    table = pd.read_csv(harmless.TABLE)
    assert set(table["code"]) == {harmless.code()}, "run `python -m benchmarks calibrate harmless`"
    subjects = {*SUBJECTS, *(("smollm2", dtype) for dtype in calibration.DTYPES)}
    assert {*zip(table["subject"], table["dtype"], strict=True)} == subjects
    assert (table["n_distinct"] >= 30).all()
    for measure in ("flagged_rms", "flagged_peak"):
        assert (table[measure] <= table["allowed"]).all()
        exact = [share_interval(k, n, alternative="less").high
                 for k, n in zip(table[measure], table["n_distinct"], strict=True)]  # fmt: skip
        assert (table["rate_at_most"] >= np.array(exact) * 0.999).all()


def test_no_flag_in_30_still_allows_a_tenth():
    assert share_interval(0, 30, alternative="less").high == pytest.approx(0.095, abs=5e-4)


# The published table.


def test_the_table_covers_every_mutant_and_belongs_to_this_code():
    table = published()
    assert set(table["code"]) == {calibration.code()}, "run `make calibrate`: the code has changed"
    assert not table.duplicated(["mutant", "subject", "dtype"]).any()
    for name, dtype in [*SUBJECTS, *(("smollm2", dtype) for dtype in calibration.DTYPES)]:
        rows = table.query("subject == @name and dtype == @dtype")
        assert set(rows["mutant"]) == set(MUTANTS), (name, dtype)
        assert rows["rate"].max() <= (0.05 if dtype == "float32" else 0.25)
    known = {"detected", "below the floor", "inert", "not applicable"}
    assert set(table["answer"]) <= known
    detected = table[table["answer"] == "detected"]
    assert (detected["smallest_detected"] <= detected["natural_dose"]).all()
    others = table[table["answer"].isin({"below the floor", "inert"})]
    assert set(others["mutant"]) == {"eps-swapped"}


def test_no_dose_beyond_the_margin_was_called_the_same():
    """On every subject: check's answers at each dose, against the oracle's distance there."""
    table = published().dropna(subset="n_doses")
    assert set(table["subject"]) == set(calibration.SUBJECTS)
    assert table["n_doses"].sum() > 800 and table["n_beyond"].sum() > 600
    assert (table["n_called_same"] == 0).all()


def test_layers_are_named_at_the_natural_dose_of_every_layer_local_mutant():
    table = published().query("kind == 'layer-local' and answer == 'detected'")
    assert (table["smallest_located"] <= table["natural_dose"]).all()


@pytest.mark.parametrize(
    "mutant, name, dtype",
    [
        ("leak", "T0", "float32"),
        ("residual", "T0", "bfloat16"),
        ("eps-large", "G0", "float32"),
        ("damaged-weights", "tiny-target", "float32"),
        ("window-narrow", "T0, window 8", "float32"),
    ],
)
def test_cells_of_the_table_are_reproduced(measured, mutant, name, dtype):
    """To within one step of the grid of doses: other processors round in other places."""
    row = published().query("mutant == @mutant and subject == @name and dtype == @dtype").iloc[0]
    again = calibration.sweep(MUTANTS[mutant], measured(name, dtype))
    assert again["answer"] == row["answer"]
    assert 0.099 < again["smallest_detected"] / row["smallest_detected"] < 10.1


def test_a_sweep_that_never_detects_anything_would_show():
    """The mutant of the sweep: with a floor a million times too high hardly anything is found."""
    on = calibration.subject("T0", "float32")
    deaf = dataclasses.replace(on, floor=dataclasses.replace(on.floor, level=3.0, peaks={}))
    found = [m.name for m in MUTANTS.values() if (n := applied(m, on)) and caught(deaf, n)]
    assert set(found) == {"one-nan", "overflow"}


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.parametrize("dtype", calibration.DTYPES)
def test_on_smollm2_natural_mutants_pass_the_noise_and_are_placed(smollm2, dtype):
    on = calibration.subject("smollm2", dtype)
    for mutant in MUTANTS.values():
        broken = applied(mutant, on)
        if broken is None or mutant.name == "eps-swapped":
            continue
        assert caught(on, broken), mutant.name
        if mutant.kind == "layer-local":
            assert on.first_noisy_layer(broken) == 15, mutant.name
    swapped = [MUTANTS["eps-swapped"].apply(on.network, dose=1e-6, layer=i) for i in (10, 30)]
    assert not any(caught(on, network) for network in swapped)
