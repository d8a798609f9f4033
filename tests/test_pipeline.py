"""`check` on T0 and the tiny pair: the answers that other means say are right."""

import copy
import dataclasses
import inspect
import itertools
import json
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_t0
from safetensors.torch import load_file, save_file

from lossless_lab import models, optimizations, runs
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.engines.protocol import score_batches
from lossless_lab.mutants import MUTANTS
from lossless_lab.optimizations import compilation
from lossless_lab.pipeline import NotEvidence, Study, check, controls, speed_up
from lossless_lab.prompts import Prompt

GREEDY = Decoding(max_new_tokens=12)


def rows(n, seed=0):
    """Random prompts of 4 to 12 ids."""
    dice = random.Random(seed)
    return [[1] + [dice.randrange(2, 97) for _ in range(dice.randrange(3, 12))] for _ in range(n)]


def asked(n):
    return [Prompt(id=f"p{i}", ids=tuple(ids)) for i, ids in enumerate(rows(n))]


def ask(reference, candidate, prompts=(PROMPT_S, PROMPT_L), decoding=GREEDY, **options):
    return check(reference, candidate, prompts, decoding=decoding, progress=False, **options)


def words(verdict):
    return {a.level: a.word for a in verdict.answers}


def changed(network, change, method="forward"):
    """A copy whose class, not object, changes what `method` returns."""
    copied = copy.deepcopy(network)
    base = type(copied)
    original = getattr(base, method)

    def replaced(self, *args, **kwargs):
        return change(original(self, *args, **kwargs))

    replaced.__signature__ = inspect.signature(original)
    copied.__class__ = type("Changed", (base,), {method: replaced})
    return copied


def on_logits(network, change):
    """A copy with `change` applied to its logits."""

    def whole(output):
        output.logits = change(output.logits.clone())
        return output

    return changed(network, whole)


class Scaled(torch.nn.Module):
    """Logits times a factor, as a change of temperature would make them."""

    def __init__(self, head, factor):
        super().__init__()
        self.head, self.factor = head, factor
        self.weight = head.weight

    def forward(self, x):
        return self.head(x) * self.factor


def scaled(network, factor=1.2):
    changed = copy.deepcopy(network)
    changed.lm_head = Scaled(changed.lm_head, factor)
    return changed


def test_a_model_loaded_twice_is_proven_everywhere_and_says_what_it_did_not_see(t0):
    verdict = ask(t0, build_t0())
    assert words(verdict) == dict.fromkeys(("1a", "1b", "1c", "2"), "PROVEN") | {"3": "NOT TESTED"}
    assert "differences after token 12" in verdict.sentence
    assert "no witness" in verdict.sentence


@pytest.mark.slow
def test_scaling_keeps_the_ids_and_breaks_the_law_in_one_verdict(t0):
    verdict = ask(t0, scaled(t0), rows(59), n_variants=1)
    assert words(verdict)["1b"] == "EQUIVALENT"
    assert words(verdict)["2"] == "DIFFERENT"
    assert verdict["1b"].estimate == 0


@pytest.mark.slow
def test_the_same_evidence_gives_the_same_answer_in_every_form(t0, tmp_path):
    other = scaled(t0)
    prompts = asked(59)
    as_modules = ask(t0, other, prompts, n_variants=1)
    as_functions = ask(lambda ids: t0(ids).logits, lambda ids: other(ids).logits, prompts)
    folders = []
    for name, network in (("a", t0), ("b", other)):
        engine = TransformersEngine(network)
        runs.record(tmp_path / name, engine, prompts, GREEDY, save_logits=True, progress=False)
        folders.append(tmp_path / name)
    as_folders = ask(*folders, None, None)
    files = []
    for folder in folders:
        run = runs.Run(folder)
        held = {}
        for prompt in prompts:
            held[f"ids/{prompt.id}"], held[f"logits/{prompt.id}"] = run.logits(prompt.id)
        save_file(held, tmp_path / f"{folder.name}.safetensors")
        files.append(tmp_path / f"{folder.name}.safetensors")
    as_files = ask(*files, None, None)
    mixed = ask(t0, folders[1], None, n_variants=1)
    judged = ("1a", "1b", "2")
    for verdict in (as_functions, as_folders, as_files, mixed):
        assert [verdict[k].word for k in judged] == [as_modules[k].word for k in judged]
        assert verdict["2"].estimate == pytest.approx(as_modules["2"].estimate, rel=1e-3)
        assert verdict["1b"].n == 59
    assert as_modules["1a"].word == "DIFFERENT"


def test_the_poorer_side_caps_the_claim(t0, tmp_path):
    prompts = asked(3)
    runs.record(tmp_path / "ids", TransformersEngine(t0), prompts, GREEDY, progress=False)
    verdict = ask(tmp_path / "ids", t0, None, None)
    assert words(verdict)["1a"] == words(verdict)["2"] == "NOT TESTED"
    assert words(verdict)["1b"] == "INCONCLUSIVE"  # 3 equal prompts say little
    assert "59 identical prompts" in verdict.sentence
    for name in ("before.txt", "after.txt"):
        (tmp_path / name).write_text("yes\nno\n")
    text = ask(tmp_path / "before.txt", tmp_path / "after.txt", None, None)
    assert set(words(text).values()) == {"NOT TESTED"}
    assert "equal texts do not show equal ids" in text.sentence
    assert text.supporting["exact share"] == 1.0
    (tmp_path / "after.txt").write_text("yes\nnope\n")
    text = ask(tmp_path / "before.txt", tmp_path / "after.txt", None, None)
    assert words(text)["1b"] == "DIFFERENT" and text["1b"].estimate == 0.5
    assert text.cause == "texts differ, so ids do"
    assert "ids equal" not in str(text)


def draft_of(network, dtype):
    """The one-layer draft of B04."""
    from transformers import LlamaForCausalLM

    config = copy.deepcopy(network.config)
    config.num_hidden_layers = 1
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return LlamaForCausalLM(config).eval().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_assisted_decoding_that_departs_is_a_near_tie_not_a_bug(t0, dtype):
    """B04: which route departs depends on the processor's kernels; what it is called does not."""
    network = build_t0(dtype)
    decoding = Decoding(max_new_tokens=40)
    for route in (
        {"assistant": draft_of(t0, dtype)},
        {"generate_options": {"assistant_early_exit": 1}},
        {"generate_options": {"prompt_lookup_num_tokens": 4}},
    ):
        candidate = TransformersEngine(network, **route)
        allowed = ("launch_arguments",)
        verdict = ask(network, candidate, [PROMPT_S], decoding, under_test=allowed, n_variants=1)
        if dtype == torch.float32:
            assert verdict["1b"].estimate == 0
        if verdict["1b"].word == "DIFFERENT":
            assert verdict.cause.startswith("near tie, rounding in")
            assert "(control: 1 of 1 differing prompts identical in float32)" in verdict.cause


@pytest.mark.slow
def test_half_precision_flips_are_near_ties_with_their_margin(t0):
    """Enough prompts for a flip on any machine: cached against uncached in bfloat16."""
    half = build_t0(torch.bfloat16)
    uncached = TransformersEngine(half, cache="none")
    decoding = Decoding(max_new_tokens=24)
    verdict = ask(half, uncached, rows(16), decoding, under_test=("cache",), n_variants=1)
    flips = verdict.evidence["tokens"].dropna(subset="first_divergence")
    assert verdict["1b"].word == "DIFFERENT"
    assert verdict.cause.startswith("near tie, rounding in bfloat16")
    assert len(flips) > 0
    for row in flips.itertuples():  # a flip needs a margin that the difference can bridge
        assert 0 <= row.reference_margin <= 2 * row.logit_difference


def test_compile_applied_the_way_that_does_nothing_is_vacuous(t0):
    verdict = ask(t0, "compile-ineffective")
    assert set(words(verdict).values()) == {"VACUOUS"}
    bare = ask(t0, torch.compile(t0))
    assert set(words(bare).values()) == {"VACUOUS"}


@pytest.mark.slow
def test_a_garbage_backend_applied_the_right_way_is_different(t0):
    verdict = ask(t0, compilation.whole(compilation.zeros), n_variants=1)
    assert words(verdict)["1b"] == "DIFFERENT"
    assert "calls of compiled code" in verdict.witness
    harmless = ask(t0, compilation.whole(lambda graph, inputs: graph), n_variants=1)
    assert words(harmless)["1b"] != "DIFFERENT"


def change_weights(network):
    with torch.no_grad():
        network.lm_head.weight.mul_(1.01)
    return network, {}


def patch_forward(network):
    original = network.forward
    network.forward = lambda *args, **kwargs: original(*args, **kwargs)
    network.model.layers[0].mlp.forward = lambda x: x * 0
    return network, {}


@pytest.mark.parametrize("transform", [change_weights, patch_forward])
def test_an_entry_that_changes_the_reference_in_place_is_invalid(transform):
    entry = dataclasses.replace(
        optimizations.find("bfloat16"), name="in place", transform=transform
    )
    verdict = ask(build_t0(), entry)
    assert set(words(verdict).values()) == {"INVALID"}
    assert "changed the reference" in verdict.cause


def test_a_candidate_that_changes_the_reference_while_it_runs_is_invalid():
    network = build_t0()

    def vandal(ids):
        logits = network(ids).logits
        with torch.no_grad():
            network.model.norm.weight.mul_(1.001)
        return logits

    verdict = ask(network, vandal)
    assert words(verdict)["1a"] == "INVALID"
    assert "while the candidate ran" in verdict.cause


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch-8", "static-cache", "float16", "compile-mlp"])
def test_every_poisoned_twin_changes_the_verdict(t0, name):
    entry = optimizations.find(name)
    healthy, broken = (ask(t0, e, rows(8), n_variants=2) for e in (entry, entry.poisoned()))
    assert words(healthy) != words(broken)
    assert words(broken)["1b"] == "DIFFERENT"
    assert healthy.witness != "none"


def test_harmless_entries_stay_within_a_floor_that_they_did_not_set(t0):
    study = Study(t0, rows(8), decoding=GREEDY, n_variants=19, progress=False)
    for name in ("batch-8", "static-cache"):  # at most 1 in 20 harmless ones passes the floor
        assert words(study.add(name))["1c"] in ("EQUIVALENT", "PROVEN")
    floor = study.verdicts["batch-8"].evidence["noise_floor"]
    assert 10 <= len(floor) <= 20
    assert not floor["variant"].str.contains("batches|companion").any()


def test_a_batch_of_one_prompt_never_was_a_batch(t0):
    assert set(words(ask(t0, "batch-8", [PROMPT_S])).values()) == {"VACUOUS"}


def test_what_no_position_depended_on_is_not_exercised(t0):
    verdict = ask(t0, "static-cache", decoding=Decoding(max_new_tokens=1))
    assert words(verdict)["1b"] == "NOT EXERCISED"
    assert verdict.supporting["exercised"] == "0 of 2 positions"


def test_triage_names_the_setting_that_differs(t0, tmp_path):
    prompts = asked(2)
    for name, decoding in (("a", Decoding(max_new_tokens=4)), ("b", Decoding(max_new_tokens=5))):
        runs.record(tmp_path / name, TransformersEngine(t0), prompts, decoding, progress=False)
    verdict = ask(tmp_path / "a", tmp_path / "b", None, None)
    assert words(verdict)["1b"] == "INVALID"
    assert "max_new_tokens is 4 and 5" in verdict.cause
    batched = ask(t0, TransformersEngine(t0, batch_size=2))
    assert "batch_size is 1 and 2" in batched.cause
    allowed = ask(t0, TransformersEngine(t0, batch_size=2), under_test=("batch_size",))
    assert words(allowed)["1b"] != "INVALID"


def test_seed_without_sampling_is_not_a_difference(t0, tmp_path):
    for seed in (0, 1):
        decoding = Decoding(max_new_tokens=4, seed=seed)
        engine = TransformersEngine(t0)
        runs.record(tmp_path / str(seed), engine, asked(2), decoding, progress=False)
    assert words(ask(tmp_path / "0", tmp_path / "1", None, None))["1b"] == "INCONCLUSIVE"


def test_stop_sets_that_differ_are_named(t0, tmp_path):
    """B03: the two sides agree up to the stop."""
    for name, stop in (("a", (77, 96)), ("b", (96,))):
        decoding = Decoding(max_new_tokens=12, stop_token_ids=stop)
        prompts = [Prompt(id="s", ids=PROMPT_S), Prompt(id="l", ids=PROMPT_L)]
        runs.record(tmp_path / name, TransformersEngine(t0), prompts, decoding, progress=False)
    verdict = ask(tmp_path / "a", tmp_path / "b", None, None)
    assert "stop_token_ids is [77, 96] and [96]" in verdict.cause
    assert "outputs agree up to the stop" in verdict.cause


def test_vocabularies_and_prompts_that_do_not_match(t0, tmp_path):
    other = build_t0(vocab_size=101)
    assert "vocab" in ask(t0, other).cause
    runs.record(tmp_path / "a", TransformersEngine(t0), asked(2), GREEDY, progress=False)
    runs.record(tmp_path / "b", TransformersEngine(t0), asked(3), GREEDY, progress=False)
    assert words(ask(tmp_path / "a", tmp_path / "b", None, None))["1b"] == "INVALID"


def test_new_nan_is_located(t0):
    """B39 on logits: only the candidate, from the second token on."""

    def broken(ids):
        logits = t0(ids).logits.clone()
        logits[:, len(PROMPT_S) :, 3] = float("nan")
        return logits

    verdict = ask(lambda ids: t0(ids).logits, broken, [PROMPT_S])
    assert "first at prompt 'prompt-0', position 1: 1 NaN" in verdict.cause
    assert words(verdict)["1a"] == words(verdict)["2"] == "DIFFERENT"


def test_bad_input_is_named(t0, tmp_path):
    with pytest.raises(KeyError, match="did you mean 'bfloat16'"):
        ask(t0, "bfloat6")
    with pytest.raises(NotEvidence, match="got int"):
        check(t0, 3, [PROMPT_S])
    with pytest.raises(ValueError, match="at least one prompt"):
        ask(t0, t0, [])
    with pytest.raises(ValueError, match="context"):
        ask(t0, build_t0(), [list(range(1, 90)) * 4])
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(NotEvidence, match="ids they belong to"):
        check(tmp_path / "x.npy", t0, [PROMPT_S])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        check(tmp_path / "run", t0)


def test_sampled_runs_under_one_seed_agree_with_themselves(t0):
    decoding = Decoding(max_new_tokens=6, temperature=1.0, n_samples=3, seed=4)
    verdict = ask(t0, build_t0(), [PROMPT_S], decoding)
    assert words(verdict)["1a"] == words(verdict)["2"] == "PROVEN"
    assert len(verdict.evidence["tokens"]) == 3


def test_the_record_is_strict_json_and_html_is_escaped(t0):
    verdict = ask(t0, lambda ids: t0(ids).logits * float("nan"))
    record = json.loads(verdict.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert {a["level"] for a in record["answers"]} == {"1a", "1b", "1c", "2", "3"}
    hostile = dataclasses.replace(verdict, candidate="<script>alert(1)</script>")
    assert "<script>" not in hostile._repr_html_()
    assert verdict.to_latex().startswith("\\begin{tabular}")
    assert "| level |" in verdict.to_markdown().splitlines()[0].replace("  ", "").replace(
        "|level", "| level"
    )


# What a fresh reader could make it say wrongly


def test_one_object_on_both_sides_is_vacuous_however_it_is_handed_in():
    network = build_t0()
    engine = TransformersEngine(network)
    for reference, candidate in (
        (network, network),
        (network, network.to(torch.bfloat16)),
        (engine, network),
        (copy.copy(engine), engine),
    ):
        verdict = ask(reference, candidate)
        assert set(words(verdict).values()) == {"VACUOUS"}
        assert "one and the same network" in verdict.cause

    loaded = models.load("tiny-draft")  # hashed by its files here, by its tensors below
    assert set(words(ask(loaded, loaded.network)).values()) == {"VACUOUS"}

    def function(ids):
        return network(ids).logits

    assert "one and the same function" in ask(function, function).cause
    batched = TransformersEngine(network, batch_size=2)
    assert words(ask(network, batched, under_test=["batch_size"]))["1b"] != "VACUOUS"


def test_a_patched_reference_is_refused_with_what_to_do(t0):
    with pytest.raises(ValueError, match="apply the optimisation first"):
        ask(patch_forward(build_t0())[0], "bfloat16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reference_without_laws_judges_nothing(t0, value):
    def spoilt(logits):
        logits[..., 5] = value
        return logits

    verdict = ask(on_logits(t0, spoilt), on_logits(t0, spoilt))
    assert words(verdict)["1c"] == words(verdict)["2"] == "INVALID"
    assert "logits of the reference are no law at" in verdict.cause
    assert "PROVEN" not in (verdict["1c"].word, verdict["2"].word)


def test_one_moved_token_is_seen_beside_an_rms_that_dilutes_it():
    """A floor whose RMS hides it: only the peak at that token tells."""
    half = build_t0(torch.bfloat16, vocab_size=4096)

    def push(logits):
        logits[..., 300] += 0.9
        return logits

    verdict = ask(half, on_logits(half, push), n_variants=19)
    each = verdict.cause.partition("noise floor (")[2]
    rms, peak = (float(part.split()[-1 if i == 0 else 4]) for i, part in
                 enumerate(each.split(" times")[0].split(", ")))  # fmt: skip
    assert rms < 1 < peak
    assert words(verdict)["1c"] == "DIFFERENT"
    assert verdict["1c"].estimate == pytest.approx(peak, rel=1e-2)


def without_mask(network):
    """A copy that reads pad columns as text."""
    copied = copy.deepcopy(network)

    class Blind(type(copied)):
        def forward(self, *args, attention_mask=None, position_ids=None, **kwargs):
            return super().forward(*args, **kwargs)

    Blind.forward.__signature__ = inspect.signature(type(network).forward)
    copied.__class__ = Blind
    return copied


@pytest.mark.parametrize("twins", [True, False])
def test_a_reference_that_is_not_invariant_sets_no_floor(t0, monkeypatch, twins):
    if not twins:
        monkeypatch.setattr(controls, "_twin_variants", lambda *args, **kwargs: iter(()))
    blind = without_mask(t0)
    verdict = ask(blind, on_logits(blind, lambda logits: logits * 1.05))
    assert words(verdict)["1c"] == "NOT TESTED"
    assert "the reference is not invariant to" in verdict["1c"].not_shown
    assert "pad column" in verdict["1c"].not_shown
    assert "twin" not in verdict["1c"].not_shown


def test_the_mean_says_what_it_hides(t0):
    """One position of 12 turned round; the mean alone would be a tenth of it."""

    def turn(output):
        if output.logits.shape[1] == 1 and next(steps) % 12 == 6:
            output.logits = -output.logits
        return output

    steps = itertools.count()
    verdict = ask(t0, changed(t0, turn), n_variants=0)
    positions = verdict.evidence["positions"]
    worst = positions["total_variation"].max()
    assert f"TV up to {worst:.2g} at one position" in verdict.sentence
    whole = min(1, 12 * verdict["2"].estimate)
    assert f"up to {whole:.2g} over a sequence of 12 tokens" in verdict.sentence


def test_repeated_prompts_count_once(t0, tmp_path):
    same = [Prompt(id=f"p{i}", ids=PROMPT_S) for i in range(60)]
    with pytest.warns(UserWarning, match="58 of 60 prompts repeat"):
        verdict = ask(t0, build_t0(), [*same[:59], Prompt(id="l", ids=PROMPT_L)])
    assert verdict["1b"].n == 2
    for name in ("a", "b"):
        engine = TransformersEngine(t0)
        runs.record(tmp_path / name, engine, same[:3], GREEDY, progress=False)
    with pytest.warns(UserWarning, match="2 of 3"):
        assert ask(tmp_path / "a", tmp_path / "b", None, None)["1b"].n == 1
    with pytest.warns(UserWarning, match="2 of 3"):
        assert ask(tmp_path / "a", t0, None, None)["1b"].n == 1


class Lines:
    """A recorded run whose outputs.jsonl can be spoilt."""

    def __init__(self, folder, network, n=4, **options):
        engine = TransformersEngine(network)
        runs.record(folder, engine, asked(n), GREEDY, progress=False, **options)
        self.folder, self.path = folder, folder / "outputs.jsonl"
        self.lines = self.path.read_bytes().splitlines(keepends=True)

    def write(self, lines):
        self.path.write_bytes(b"".join(lines))
        return self.folder


def test_stored_sides_that_lost_outputs_are_refused(t0, tmp_path):
    whole, held = Lines(tmp_path / "a", t0), Lines(tmp_path / "b", t0)
    for reference, candidate in ((whole.folder, held.folder), (held.folder, whole.folder)):
        held.write(held.lines[:3])
        with pytest.raises(ValueError, match=r"holds 3 of the 4 outputs .* 1 are missing$"):
            ask(reference, candidate, None, None)
        held.write([*held.lines, held.lines[1]])
        with pytest.raises(ValueError, match=r":5 is damaged: .*'p1'.* more than once"):
            ask(reference, candidate, None, None)
        swapped = held.lines[0].replace(b'"prompt_ids": [1', b'"prompt_ids": [2')
        held.write([swapped, *held.lines[1:]])
        with pytest.raises(ValueError, match="damaged: its outputs answer other prompts"):
            ask(reference, candidate, None, None)
    (held.folder / "metrics.json").unlink()
    held.write(held.lines[:2])
    with pytest.raises(ValueError, match="2 are missing; the run is unfinished"):
        ask(whole.folder, held.folder, None, None)


def test_files_of_logits_must_hold_the_same_outputs(t0, tmp_path):
    run = Lines(tmp_path / "a", t0, save_logits=True)
    held = load_file(run.folder / "logits.safetensors")
    save_file(held, tmp_path / "all.safetensors")
    save_file({k: v for k, v in held.items() if "p3" not in k}, tmp_path / "few.safetensors")
    sides = [tmp_path / "all.safetensors", tmp_path / "few.safetensors"]
    for pair in (sides, sides[::-1]):
        with pytest.raises(ValueError, match=r"few lacks 1 of 4 outputs: p3 \(sample 0\)"):
            ask(*pair, None, None)


def test_logits_that_contradict_the_outputs_are_damage(t0, tmp_path):
    run = Lines(tmp_path / "a", t0, save_logits=True)
    path = run.folder / "logits.safetensors"
    held = load_file(path)
    held["ids/p2"][3] += 1
    save_file(held, path)
    with pytest.raises(ValueError, match=r"damaged: logits.safetensors and outputs.jsonl .* 'p2'"):
        ask(run.folder, run.folder, None, None)


def test_a_recorded_claim_without_a_witness_is_said(t0, tmp_path):
    runs.record(tmp_path / "a", TransformersEngine(t0), asked(2), GREEDY, progress=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    record = json.loads((tmp_path / "b" / "manifest.json").read_text())
    for name in ("float16", "batch-x", "batch-1", "of another version"):
        record["optimization"] = name
        (tmp_path / "b" / "manifest.json").write_text(json.dumps(record))
        verdict = ask(tmp_path / "a", tmp_path / "b", None, None)
        assert f"ran: the manifest claims {name}, its run recorded none" in verdict.sentence


def test_signs_of_zero_are_bits():
    def zeros(ids):
        return torch.zeros(1, ids.shape[1], 7)

    assert words(ask(zeros, lambda ids: -zeros(ids)))["1a"] == "DIFFERENT"
    assert words(ask(zeros, lambda ids: zeros(ids) + 0))["1a"] == "PROVEN"


def test_a_loaded_model_and_its_deep_copy_are_bitwise_the_same(tiny_target):
    verdict = ask(tiny_target, copy.deepcopy(tiny_target.network), rows(3))
    assert words(verdict)["1a"] == "PROVEN"


def test_a_change_of_the_engine_alone_moves_no_layer(t0):
    study = Study(t0, rows(3), decoding=GREEDY, n_variants=0, keep_logits=True, progress=False)
    for name in ("batch-8", "bfloat16"):
        study.add(name)
    reference = study.reference.name
    assert study.layers((reference, "batch-8"), "prompt-0") is None
    assert study.layers((reference, "bfloat16"), "prompt-0") is not None
    assert "layers" not in study.frames((reference, "batch-8"), "prompt-0")


SAMPLED = Decoding(max_new_tokens=8, temperature=1.0, stop_token_ids=())


def hidden_temperature(network):
    def colder(processors):
        processors.append(lambda ids, scores: scores * 3)
        return processors

    return changed(network, colder, "_get_logits_processor")


def test_a_sampler_is_judged_by_its_tokens_not_by_its_logits(tiny_target):
    network = tiny_target.network
    prompts = [list(range(3 + i, 20 + i)) for i in range(30)]
    broken = ask(network, hidden_temperature(network), prompts, SAMPLED, n_variants=0)
    assert words(broken)["2"] == "DIFFERENT"
    assert broken["2"].estimate < 1e-4
    assert "do not follow the law of the candidate's own logits: 240 tokens" in broken.cause
    other = TransformersEngine(copy.deepcopy(network), batch_size=2)
    honest = ask(network, other, prompts, SAMPLED, n_variants=0, under_test=["batch_size"])
    assert words(honest)["2"] == "INCONCLUSIVE"
    assert "the sampler was tried on 240" in honest["2"].not_shown
    assert "which bounds nothing" in honest.sentence
    assert "near tie" not in honest.sentence + broken.sentence


@pytest.mark.slow
def test_a_broken_speculative_rule_is_different(tiny_target, tiny_draft, monkeypatch):
    from transformers.generation import utils

    prompts = [list(range(3 + i, 20 + i)) for i in range(30)]
    sides = TransformersEngine(tiny_target), TransformersEngine(tiny_target, assistant=tiny_draft)
    allowed = {"under_test": ("launch_arguments",), "n_variants": 0}
    right = ask(*sides, prompts, SAMPLED, **allowed)
    assert words(right)["2"] == "INCONCLUSIVE"
    original = utils._speculative_sampling

    def sharpened(a, b, c, new_logits, **rest):
        return original(a, b, c, new_logits * 5, **rest)

    monkeypatch.setattr(utils, "_speculative_sampling", sharpened)
    wrong = ask(*sides, prompts, SAMPLED, **allowed)
    assert words(wrong)["2"] == "DIFFERENT" and "near tie" not in wrong.cause


def test_every_filter_is_part_of_the_law_that_a_sampler_is_held_to(t0):
    decoding = Decoding(
        max_new_tokens=20, temperature=0.8, top_k=30, top_p=0.95, min_p=0.01,
        repetition_penalty=1.2, n_samples=4,
    )  # fmt: skip
    engine = TransformersEngine(build_t0(), batch_size=4)
    verdict = ask(t0, engine, rows(4), decoding, under_test=["batch_size"], n_variants=0)
    assert words(verdict)["2"] == "INCONCLUSIVE"
    assert "impossible" not in verdict["2"].not_shown


def test_a_flip_beyond_the_floor_is_no_near_tie(t0):
    def ban(logits):
        logits[..., 5:60] -= 50
        return logits

    verdict = ask(t0, on_logits(t0, ban), n_variants=4)
    assert verdict.cause.startswith("not explained by the noise floor")
    assert "beyond the noise floor (RMS" in verdict.cause


def planted(sizes, monkeypatch):
    """Harmless variants that lower the top logit of every position by these amounts."""

    def lowered(network, size):
        def scored(prompts, outputs):
            own = score_batches(TransformersEngine(network, keep_logits=True), prompts, outputs)
            return [x.scatter_add(1, x.argmax(1, keepdim=True), x.new_full((len(x), 1), -size))
                    for x in own]  # fmt: skip

        return scored

    def variants(engine, under_test):
        return iter([(f"lowered by {s}", lowered(engine.network, s)) for s in sizes])

    monkeypatch.setattr(controls, "_admissible", variants)


def nudged(network, by):
    """Every second id gains `by` over the others."""

    def change(logits):
        logits[..., ::2] += by
        return logits

    return on_logits(network, change)


def test_flips_are_set_against_planted_noise(t0, monkeypatch):
    """Margins by numpy, probabilities by counting: every number of the cause has an oracle."""
    sizes = (0.01, 0.02, 0.05, 0.2)
    planted(sizes, monkeypatch)
    prompts = rows(12)
    verdict = ask(t0, nudged(t0, 0.06), prompts)
    found, risk = verdict.evidence["first_divergences"], []
    parted = verdict.evidence["tokens"].set_index("prompt_id")["first_divergence"].dropna()
    assert 0 < len(found) == len(parted) < 12
    engine = TransformersEngine(t0, keep_logits=True)
    for i, c in enumerate(engine.generate(prompts, engine.resolve(GREEDY), seed=0)):
        two = np.sort(c.logits.double().numpy(), axis=1)[:, -2:]
        margin = two[:, 1] - two[:, 0]
        p = (np.array(sizes)[:, None] > margin).mean(0)  # everywhere the same noise
        risk.append(1 - np.prod(1 - p))
        if f"prompt-{i}" in parted:
            at = parted[f"prompt-{i}"]
            row = found.set_index("prompt_id").loc[f"prompt-{i}"]
            assert row["position"] == at and row["margin"] == pytest.approx(margin[at], abs=1e-4)
            assert row["flip_probability"] == pytest.approx(p[at])
            assert row["noise"] == pytest.approx(np.sqrt(np.mean(np.square(sizes))), rel=1e-4)
            assert row["word"] == ("near tie" if p[at] else "beyond the noise")
    assert f"noise alone makes {sum(risk):.2g} of 12 prompts differ" in verdict.cause
    assert f"{len(parted)} do" in verdict.cause and "more than" not in verdict.cause
    curve = verdict.evidence["survival"]
    left = [sum(parted.get(f"prompt-{i}", 99) >= t for i in range(12)) for t in curve["n_tokens"]]
    assert (curve["observed_share"] * 12).tolist() == pytest.approx(left)
    assert curve["expected_share"].iloc[-1] == pytest.approx(1 - sum(risk) / 12)


def test_flips_that_the_noise_cannot_make_are_no_near_ties(t0, monkeypatch):
    planted((1e-4, 2e-4), monkeypatch)
    verdict = ask(t0, nudged(t0, 1.0), rows(12))
    assert verdict.cause.startswith("not explained by the noise floor; noise alone makes")
    assert "more than noise explains" in verdict.cause
    assert "flip probability 0, beyond the noise" in verdict.cause
    assert "more such places" in verdict.cause
    planted((5.0, 5.0), monkeypatch)
    assert ask(t0, nudged(t0, 0.06), rows(12)).cause.startswith("near tie by the noise floor;")


def test_a_mutant_in_half_precision_parts_in_float32_too():
    half = build_t0(torch.bfloat16)
    broken = MUTANTS["attention-scale"].apply(half, dose=1.0)
    verdict = ask(half, broken, rows(6), n_variants=2)
    assert verdict.cause.startswith("not rounding in bfloat16 alone (control: ")
    words_found = set(verdict.evidence["first_divergences"]["word"])
    assert "not rounding" in words_found
    compiled = ask(half, "compile-mlp", rows(6), n_variants=2)  # no copy in float32 of what it is
    if compiled["1b"].estimate and compiled.cause.startswith("near tie"):
        assert "(no control in float32 could be run)" in compiled.cause


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"margins": {"1B": 0.1}}, "`margins` must be one of 1b, 2; got '1B'"),
        ({"margins": {"1b": -0.1}}, r"`margins\['1b'\]` must be a number above 0"),
        ({"margins": {"2": "0.1"}}, r"`margins\['2'\]` must be a number above 0"),
        ({"margins": {"2": float("nan")}}, "at most 1; got nan"),
        ({"under_test": ("dtipe",)}, "did you mean 'dtype'"),
        ({"under_test": "dtype"}, "`under_test` must be a list of field names; got 'dtype'"),
        ({"n_variants": -1}, "`n_variants` must be a whole number of at least 0; got -1"),
        ({"prompts": 5}, "`prompts` must be a path, texts.*; got int"),
        ({"prompts": "def f(x):"}, r"for a single text give a list: \[text\]"),
        ({"prompts": [1, 2, 3]}, r"`prompts\[0\]` must be a text, a list.*; got 1"),
        ({"prompts": [PROMPT_S, [1.7, 2]]}, r"`prompts\[1\]` must be a text"),
        ({"prompts": [PROMPT_S, []]}, r"`prompts\[1\]`: `ids` must hold at least one token id"),
        ({"prompts": [""]}, r"`prompts\[0\]`: `text` must hold more than white space"),
        ({"prompts": [[-1, 2]]}, r"`prompts\[0\]`: `ids.0` .*greater than or equal to 0"),
        ({"prompts": {"a b": [1, 2]}}, "must be 1 to 64 of the characters"),
        ({"prompts": [Prompt(id="a", ids=(1,)), Prompt(id="a", ids=(2,))]}, "unique ids.* a$"),
        ({"decoding": Decoding(max_new_tokens=10**9)}, "more than half of"),
        ({"candidate": "tiny-draft"}, r"pass `models.load\('tiny-draft'\)`"),
        ({"reference": "tiny-target"}, r"pass `models.load\('tiny-target'\)`"),
    ],
)
def test_wrong_options_are_named(t0, options, said):
    given = {"reference": t0, "candidate": "bfloat16", "prompts": [PROMPT_S], "decoding": GREEDY}
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        check(**given | options, progress=False)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda logits: None, "`function` must return .*; got NoneType"),
        (lambda logits: logits.long(), "`function` must return .*; got torch.int64 .1, 4, 97."),
        (lambda logits: logits[0, 0], r"`function` must return .*; got torch.float32 \(97,\)"),
        (lambda logits: "text", "`function` must return .*; got str"),
    ],
)
def test_functions_that_return_no_logits_are_named(t0, returned, said):
    with pytest.raises(ValueError, match=said):
        ask(t0, lambda ids: returned(t0(ids).logits))


def test_functions_may_return_what_a_model_returns_and_take_over_end_ids():
    network = build_t0(eos_token_id=62)
    for pair in ((network, lambda ids: network(ids)), (lambda ids: network(ids), network)):
        verdict = ask(*pair, decoding=Decoding(max_new_tokens=20))
        assert verdict["1b"].estimate == 0
        assert (verdict.evidence["tokens"]["n_reference"] < 20).any()


def test_outputs_that_are_all_empty_divide_nothing(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("\n\n")
    verdict = ask(tmp_path / "a.txt", tmp_path / "b.txt", None, None)
    assert words(verdict)["1b"] == "NOT TESTED"

    class Silent(TransformersEngine):
        def generate(self, prompts, decoding, *, seed):
            return [dataclasses.replace(c, output_ids=(), logprobs=(), logits=None)
                    for c in super().generate(prompts, decoding, seed=seed)]  # fmt: skip

    for name in ("a", "b"):
        engine = Silent(build_t0())
        runs.record(tmp_path / name, engine, asked(2), GREEDY, progress=False)
    assert words(ask(tmp_path / "a", tmp_path / "b", None, None))["1a"] == "NOT TESTED"


def test_speeds_are_measured_in_turn(t0):
    sides = {"again": build_t0(), "batch-8": "batch-8"}
    frame = speed_up(t0, sides, rows(4), Decoding(max_new_tokens=3), repeats=2)
    assert frame["side"].tolist()[1:] == ["again", "batch-8"]
    assert frame.loc[0, "speed_up"] == 1
    assert (frame["slowest_tokens_per_s"] <= frame["tokens_per_s"]).all()
    assert (frame["tokens_per_s"] <= frame["fastest_tokens_per_s"]).all()
    for repeats, other in ((0, t0), (1, "nowhere")):
        with pytest.raises((ValueError, KeyError)):
            speed_up(t0, {"x": other}, rows(2), repeats=repeats)


@pytest.mark.slow
def test_a_healthy_compiled_candidate_is_not_judged_by_poisoned_code(t0):
    """More compilations of one function than Dynamo keeps: then it falls back, or reuses."""
    for _ in range(10):
        poisoned = compilation.whole(compilation.zeros).apply(t0).network
        assert not poisoned(torch.tensor([PROMPT_S])).logits.any()
    healthy = ask(t0, compilation.whole("aot_eager"), [PROMPT_S], n_variants=0)
    assert healthy["1b"].estimate == 0 and "compiled code" in healthy.witness
