"""`check` on T0 and the tiny pair: the answers that other means say are right."""

import copy
import dataclasses
import json
import random

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_t0
from safetensors.torch import save_file

from lossless_lab import optimizations, runs
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.optimizations import compilation
from lossless_lab.pipeline import NotEvidence, Study, check
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


def test_a_model_against_itself_is_proven_everywhere_and_says_what_it_did_not_see(t0):
    verdict = ask(t0, t0)
    assert words(verdict) == dict.fromkeys(("1a", "1b", "1c", "2"), "PROVEN") | {"3": "NOT TESTED"}
    assert "differences after token 12" in verdict.sentence
    assert "no witness" in verdict.sentence


def test_scaling_keeps_the_ids_and_breaks_the_law_in_one_verdict(t0):
    verdict = ask(t0, scaled(t0), rows(59), n_variants=1)
    assert words(verdict)["1b"] == "EQUIVALENT"
    assert words(verdict)["2"] == "DIFFERENT"
    assert verdict["1b"].estimate == 0


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
    assert text.supporting["exact share"] == 1.0


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
        ask(t0, t0, [list(range(1, 90)) * 4])
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(NotEvidence, match="ids they belong to"):
        check(tmp_path / "x.npy", t0, [PROMPT_S])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        check(tmp_path / "run", t0)


def test_sampled_runs_under_one_seed_agree_with_themselves(t0):
    decoding = Decoding(max_new_tokens=6, temperature=1.0, n_samples=3, seed=4)
    verdict = ask(t0, t0, [PROMPT_S], decoding)
    assert words(verdict)["1a"] == "PROVEN"
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
