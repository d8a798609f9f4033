"""Failures that others met in sampling, statistics, text metrics and number formats.

Each small input has an oracle that is not this package (fractions, mpmath, scipy, sacrebleu,
transformers, torch, or by hand), and a mutant: the usual wrong way, which the oracle tells apart.
"""

import json
import math
import unicodedata
from fractions import Fraction
from types import SimpleNamespace

import mpmath
import numpy as np
import pandas as pd
import pytest
import sacrebleu
import scipy.spatial
import scipy.special
import scipy.stats
import torch
from conftest import build_g0, build_t0
from torch import nn
from torch.nn.utils import parametrizations, prune

from lossless_lab.number_formats import FORMATS, round_to
from lossless_lab.optimizations import find
from lossless_lab.optimizations.adapters import merged, with_adapters
from lossless_lab.optimizations.entry import WARNING
from lossless_lab.optimizations.pruning import sparsity
from lossless_lab.semantic.lm_eval import read_lm_eval
from lossless_lab.semantic.paired import (
    PairedTable,
    items_needed,
    mcnemar,
    non_inferiority,
    paired_table,
    smallest_margin,
)
from lossless_lab.semantic.tasks import answer_scores, compare_tasks
from lossless_lab.semantic.text import similarity, text_scores, words
from lossless_lab.statistical.censored import kl_lower_bound
from lossless_lab.statistical.distances import MEASURES
from lossless_lab.statistical.divergences import by_prompt, divergences
from lossless_lab.statistical.laws import from_probs, js_divergence, kl_divergence, total_variation
from lossless_lab.statistical.sampler_laws import ORDERS, penalised, sampler_probs
from lossless_lab.statistical.speculative import (
    Position,
    Roles,
    Rule,
    joint_law,
    output_law,
    processed,
)
from lossless_lab.statistical.summary import distance_summary
from lossless_lab.stats.intervals import share_interval

P, Q = ("7/10", "1/5", "1/10"), ("1/5", "1/2", "3/10")  # target and draft


# --- speculative sampling


def by_hand(drawn, draft, target, rest):
    """Law that a round emits, in fractions: drawn tokens judged by min(1, target/draft)."""
    drawn, draft, target, rest = ([*map(Fraction, x)] for x in (drawn, draft, target, rest))
    kept = [d * min(Fraction(1), p / q) for d, q, p in zip(drawn, draft, target, strict=True)]
    lost, total = 1 - sum(kept), sum(rest)
    return [float(k + (lost * r / total if total else 0)) for k, r in zip(kept, rest, strict=True)]


def floats(law):
    return np.array([float(Fraction(x)) for x in law])


def rule_of(**changed):
    """A rule with some of its laws replaced by other ones."""

    def roles(at):
        p, q = at.target_probs, at.draft_probs
        own = {"drawn": q, "draft": q, "target": p, "rest": np.maximum(p - q, 0), "bonus": p}
        return Roles(**own | {name: f(p, q) for name, f in changed.items()})

    return Rule(name="changed", roles=roles)


@pytest.mark.parametrize("draft", [P, Q, ("0", "1", "0"), ("0", "1/2", "1/2")])
@pytest.mark.parametrize("target", [P, ("0", "1", "0"), ("1", "0", "0"), ("1/2", "1/2", "0")])
def test_nothing_left_to_replace_from_is_no_nan(target, draft):
    """The mutant divides (p − q)+ by its sum, which is 0 where both agree."""
    found = output_law(floats(target), floats(draft))
    assert found == pytest.approx(floats(target), abs=1e-15)
    if target == draft:
        left = np.maximum(floats(target) - floats(draft), 0)
        with np.errstate(invalid="ignore"):
            assert np.isnan(left / left.sum()).all()


@pytest.mark.parametrize(
    "changed, law",
    [
        ({"rest": lambda p, q: p}, by_hand(Q, Q, P, P)),  # replaced from the target
        ({"rest": lambda p, q: np.ones(3)}, by_hand(Q, Q, P, (1, 1, 1))),
        # judged by the square of what was drawn from: a temperature on one side only
        (
            {"draft": lambda p, q: q**2 / (q**2).sum()},
            by_hand(Q, ("4/38", "25/38", "9/38"), P, ("1/2", "0", "0")),
        ),
        # the target's top-2 for the ratio, the draft's whole law for the draw
        (
            {"target": lambda p, q: np.array([7 / 9, 2 / 9, 0])},
            by_hand(Q, Q, ("7/9", "2/9", "0"), ("1/2", "0", "0")),
        ),
    ],
)
def test_broken_rounds_have_the_law_found_by_hand(changed, law):
    found = output_law(floats(P), floats(Q), rule=rule_of(**changed))
    assert found == pytest.approx(law, abs=1e-14)
    tv = float(total_variation(from_probs(floats(P)), from_probs(found)))
    assert tv == pytest.approx(np.abs(np.array(law) - floats(P)).sum() / 2, abs=1e-14)
    assert tv > 0.04, "and the correct round beside it is the target's law"
    assert output_law(floats(P), floats(Q)) == pytest.approx(floats(P), abs=1e-15)


def test_a_bonus_token_from_the_draft_shows_in_the_second_token_only():
    p, q = floats(P), floats(Q)
    after = Position(target_probs=[p] * 3, draft_probs=[q] * 3)
    first = Position(target_probs=p, draft_probs=q)
    broken = joint_law([first, after], gamma=1, rule=rule_of(bonus=lambda p, q: q))
    assert broken.sum(1) == pytest.approx(p, abs=1e-14), "one token alone cannot see it"
    kept = sum(min(Fraction(a), Fraction(b)) for a, b in zip(P, Q, strict=True))
    second = [
        float(kept * Fraction(b) + (1 - kept) * Fraction(a)) for a, b in zip(P, Q, strict=True)
    ]
    assert broken.sum(0) == pytest.approx(second, abs=1e-14)
    assert joint_law([first, after], gamma=1) == pytest.approx(np.outer(p, p), abs=1e-14)


def test_filters_belong_on_both_sides_or_on_the_target():
    """A draft outside the target's set is slower, never wrong; raw target in the ratio is wrong."""
    rng = np.random.default_rng(7)
    target, draft = rng.normal(size=(2, 6))
    own = processed(target[None], draft[None], top_k=2, temperature=0.7)
    raw = sampler_probs(torch.tensor(draft)).numpy()
    assert output_law(own.target_probs[0], raw) == pytest.approx(own.target_probs[0], abs=1e-12)
    unfiltered = sampler_probs(torch.tensor(target)).numpy()
    assert np.abs(output_law(unfiltered, raw) - own.target_probs[0]).sum() / 2 > 0.1


def test_vocabularies_that_differ_are_refused_and_a_padded_one_is_not():
    with pytest.raises(ValueError, match="must have the target's vocabulary, 5 tokens; it has 3"):
        output_law([*floats(P), 0, 0], floats(Q))
    padded = output_law([*floats(P), 0, 0], [*floats(Q), 0, 0])
    assert padded == pytest.approx([0.7, 0.2, 0.1, 0, 0], abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_laws_in_half_precision_are_told_from_what_is_none(dtype):
    exact = torch.tensor([0.5, 0.25, 0.25], dtype=dtype, requires_grad=True)
    assert output_law(exact, exact).tolist() == [0.5, 0.25, 0.25]
    with pytest.raises(ValueError, match="`target_probs` row 0 sums to"):
        output_law(exact * 1.01, exact)


# --- decoding parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("temperature", [0.7, 1e-3, 1e-7, 1e-30, 1e-40, 1e-310])
def test_a_tiny_temperature_gives_the_law_not_nan(temperature, dtype):
    row = torch.tensor([[10.0, 9.0, 10.0, -math.inf]], dtype=dtype)
    powers = [mpmath.exp((mpmath.mpf(x) - 10) / mpmath.mpf(temperature)) for x in (10, 9, 10)]
    right = [float(x / sum(powers)) for x in powers] + [0.0]
    found = sampler_probs(row, temperature=temperature)
    assert found[0].tolist() == pytest.approx(right, rel=1e-6)
    assert sampler_probs(row - 20, temperature=temperature)[0].tolist() == pytest.approx(right)
    if temperature <= 1e-40:
        assert torch.softmax(row.float() / temperature, -1).isnan().any(), "the mutant"


def test_the_token_that_crosses_top_p_stays_in():
    """The mutant keeps cumulative sums up to p only; the oracle is transformers' own warper."""
    from transformers import TopPLogitsWarper

    laws = [[0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.15, 0.05], [0.25] * 4, [0.97, 0.01, 0.01, 0.01]]
    narrower = 0
    for law in laws:
        for p in (1e-9, 0.3, 0.55, 0.65, 0.85, 0.999999, 1.0):
            row = torch.tensor([law]).log()
            kept = (sampler_probs(row, top_p=p) > 0)[0].tolist()
            warped = TopPLogitsWarper(p)(None, row) if p < 1 else row
            assert kept == torch.isfinite(warped)[0].tolist()
            narrower += int((np.cumsum(law) <= p).sum()) < sum(kept)
    assert narrower > 10


def test_top_k_beyond_the_vocabulary_keeps_all_and_ties_stay():
    row = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    everything = torch.softmax(row, -1)[0].tolist()
    for k in (0, 4, 50, 50.0, np.int64(151_936)):
        assert sampler_probs(row, top_k=k)[0].tolist() == pytest.approx(everything)
    assert (sampler_probs(row, top_k=2) > 0)[0].tolist() == [True, True, True, False]


def test_min_p_before_or_after_the_temperature_are_two_laws():
    row = torch.tensor([[math.log(0.6), math.log(0.3), math.log(0.1)]], dtype=torch.float64)
    flat = np.sqrt([0.6, 0.3, 0.1])  # temperature 2
    own = {"temperature": 2.0, "min_p": 0.4}
    after = sampler_probs(row, **own)[0].numpy()
    assert after == pytest.approx(flat / flat.sum(), rel=1e-12), "√(1/6) is above .4"
    before = sampler_probs(row, **own, order=ORDERS["llama.cpp"])[0].numpy()
    assert before == pytest.approx([*flat[:2] / flat[:2].sum(), 0], rel=1e-12)


@pytest.mark.parametrize(
    "setting, rule",
    [
        ({"temperature": "0.7"}, "`temperature` must be 0"),
        ({"temperature": math.nan}, "`temperature` must be 0"),
        ({"top_k": None}, "`top_k` must be a whole number"),
        ({"top_k": -1}, "`top_k` must be a whole number"),
        ({"top_p": 0.0}, "`top_p` must be above 0"),
        ({"min_p": 1.5}, "`min_p` must be at least 0"),
    ],
)
def test_settings_that_mean_nothing_are_named(setting, rule):
    with pytest.raises(ValueError, match=rule):
        sampler_probs(torch.zeros(1, 3), **setting)


@pytest.mark.parametrize("order", [("top_k", "top_p", "min_p"), ("temprature",), ()])
def test_an_order_that_leaves_a_setting_out_is_refused(order):
    """The mutant gives the law of temperature 1, whatever was asked for."""
    with pytest.raises(ValueError, match="`order` must hold temperature, top_k, top_p, min_p; got"):
        sampler_probs(torch.zeros(1, 3), temperature=2.0, order=order)


def test_the_repetition_penalty_of_nothing_seen_yet_is_none():
    rows = torch.tensor([[2.0, -2.0, 1.0]] * 2)
    assert penalised(rows, [], [1, 0], 2.0).tolist() == [[2, -2, 1], [2, -4, 1]]


def test_what_is_no_row_of_logits_is_named():
    for nothing in (torch.tensor(1.0), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match=r"`logits` must be \[..., vocab_size\]"):
            sampler_probs(nothing)


# --- distances and statistics


def test_direction_log_target_and_square_root():
    p, q = np.array([0.5, 0.4, 0.1]), np.array([0.2, 0.2, 0.6])
    forward = scipy.special.rel_entr(p, q).sum()
    found = float(kl_divergence(from_probs(p), from_probs(q)))
    assert found == pytest.approx(forward, rel=1e-12)
    as_torch = nn.functional.kl_div(
        *(torch.tensor(x).log()[None] for x in (q, p)), log_target=True, reduction="batchmean"
    )
    assert found == pytest.approx(float(as_torch), rel=1e-12)
    js = float(js_divergence(from_probs(p), from_probs(q)))
    distance = scipy.spatial.distance.jensenshannon(p, q)
    assert js == pytest.approx(distance**2, rel=1e-12)
    swapped = float(kl_divergence(from_probs(q), from_probs(p)))
    assert min(abs(x - found) for x in (swapped, forward / 3, distance)) > 0.01, "the mutants"


def test_probabilities_that_float32_loses_still_count():
    """e^-150 is 0 in float32, so that the mutant, a KL of float32 probabilities, is infinite."""
    a, b = torch.tensor([[0.0, -150.0]]), torch.tensor([[-150.0, 0.0]])
    found = divergences(a, b).frame[MEASURES[0]][0]
    with mpmath.workdps(50):
        tail = mpmath.exp(-150) / (1 + mpmath.exp(-150))
        right = (1 - 2 * tail) * 150
    assert found == pytest.approx(float(right), rel=1e-6)
    assert float(kl_divergence(*(from_probs(torch.softmax(x, -1)) for x in (a, b)))[0]) == math.inf


def test_perplexity_weighs_tokens_not_documents():
    """The mutants: the mean of the documents' perplexities, and of their mean log-probs."""
    rng = np.random.default_rng(3)
    sizes, frames, every, mutants = (3, 40), [], [], [[], []]
    for name, n in zip("ab", sizes, strict=True):
        logits = torch.tensor(rng.normal(size=(n, 11)) * (3 if n < 10 else 1))
        ids = rng.integers(0, 11, n)
        frame = divergences(logits, logits, prompt_id=name, correct_ids=ids).frame
        lost = -torch.log_softmax(logits, -1)[torch.arange(n), torch.tensor(ids)].numpy()
        frames, every = [*frames, frame], [*every, *lost]
        mutants = [[*mutants[0], math.exp(lost.mean())], [*mutants[1], lost.mean()]]
    found = distance_summary(pd.concat(frames, ignore_index=True)).value("PPL reference")
    assert found == pytest.approx(math.exp(np.mean(every)), rel=1e-9)
    assert abs(np.mean(mutants[0]) - found) > 0.3 < abs(math.exp(np.mean(mutants[1])) - found)
    assert by_prompt(pd.concat(frames))["n_positions"].tolist() == [*sizes]


def test_a_log_probability_that_was_not_reported_is_no_number():
    for missing in (None, math.nan):
        with pytest.raises(ValueError, match="`candidate_top` must hold ln p of one law"):
            kl_lower_bound([(0, -0.1)], [(0, missing)])
    impossible = kl_lower_bound([(0, -0.1), (1, -math.inf)], [(0, -0.1), (1, -3.0)], rounding=0.0)
    rest = 1 - math.exp(-0.1)
    assert impossible.nats == pytest.approx(rest * math.log(rest / (rest - math.exp(-3))), rel=1e-9)


@pytest.mark.parametrize("n", [1, 10, 25])
def test_a_perfect_score_is_no_perfect_certainty(n):
    """p̂ ± z √(p̂(1 − p̂)/n) has no width at all there, and no bootstrap has."""
    low, high = share_interval(n, n)
    assert low == pytest.approx(0.025 ** (1 / n), rel=1e-9) and high == 1
    assert share_interval(0, n) == pytest.approx((0, 1 - low), rel=1e-9)


@pytest.mark.parametrize("lost", [3, 1000, 5000, 10**6])
def test_a_pvalue_is_never_zero(lost):
    table = PairedTable(both=5, only_reference=lost, only_candidate=0, neither=0)
    right = max(mpmath.mpf(2) ** (1 - lost), np.finfo(float).tiny)
    assert mcnemar(table) == pytest.approx(float(right), rel=1e-9)
    assert "p = 0)" not in str(table)
    assert scipy.stats.binomtest(0, 5000).pvalue == 0, "what it was made of"


# --- answers and texts


@pytest.mark.parametrize("missing", [math.nan, None, "", "n/a", 0.5, pd.NA])
def test_an_item_without_an_answer_is_neither_right_nor_wrong(missing):
    """The mutant is numpy's bool, by which NaN, "False" and 0.5 are right."""
    with pytest.raises(ValueError, match=r"`reference`\[1\] must be true or false; got"):
        paired_table([True, missing], [True, True])
    assert np.asarray([math.nan, "False", 0.5], object).astype(bool).all()
    read = paired_table(["True", "False", 1.0, "0"], pd.Series([1, 0, True, False]))
    assert (read.both, read.neither) == (2, 2)


def test_a_confidence_in_per_cent_decides_nothing():
    """The mutant's normal quantile of 95 is NaN, which no limit is above."""
    table = PairedTable(both=900, only_reference=0, only_candidate=0, neither=100)
    assert non_inferiority(table, margin=0.02) == "EQUIVALENT"
    for call in (
        lambda: non_inferiority(table, margin=0.02, confidence=95),
        lambda: items_needed(0.01, 0.05, power=1),
        lambda: smallest_margin(300, 0.05, confidence=1),
        lambda: smallest_margin(0, 0.05),
    ):
        with pytest.raises(ValueError, match=r"`(confidence|power|n)` must be"):
            call()
    assert math.isnan(scipy.stats.norm.ppf(95))


def table(right, **other):
    n = len(right)
    own = {"id": range(n), "category": "c", "group": range(n), "right": right}
    return pd.DataFrame(own | {"margin_nats": 0.0, "chance": 0.25} | other)


def test_tables_of_items_say_what_they_must_hold():
    right = table([1.0, 0.0, 1.0])
    assert compare_tasks(right, table([True, False, True])).frame["lost"][0] == 0
    for value in (math.nan, 2.0, "yes"):
        with pytest.raises(ValueError, match=r"item 1 has right .*; must be true or false"):
            compare_tasks(right, table([1.0, value, 1.0]))
    with pytest.raises(ValueError, match="`candidate` must hold the reference's items"):
        compare_tasks(right, table([1, 0, 1], id=["0", "1", "2"]))


def test_equal_likelihoods_are_won_by_the_first_as_in_the_harness(tmp_path):
    """argmax takes the first of ties, so that a tie lost to an earlier choice is wrong."""
    nats = [["-2.5", "False"], ["-1.5", "False"], ["-1.5", "True"]]
    sample = {
        "doc_id": 0, "target": "2", "filter": "none", "acc": 0.0, "prompt_hash": "x",
        "arguments": {f"gen_args_{c}": {"arg_0": "q", "arg_1": f" {c}"} for c in "abc"},
        "resps": [[x] for x in nats], "filtered_resps": nats,
    }  # fmt: skip
    path = tmp_path / "samples_task_2026-01-01T00-00-00.0.jsonl"
    path.write_text(json.dumps(sample) + "\n")
    row = read_lm_eval(path).iloc[0]
    assert (row["right"], row["margin_nats"], row["chosen"]) == (False, 0.0, " b")
    assert int(np.argmax([-2.5, -1.5, -1.5])) == 1


@pytest.mark.parametrize(
    "text, answer, exact",
    [
        ("The Paris.", "paris", 1),
        ("1,000", "1000", 1),
        ("Straße", "STRASSE", 1),
        ("cafe\u0301", "café", 1),  # two Unicode forms of one text
        ("−5", "–5", 1),
        ("well-known", "well known", 1),
        ("**42**", "42", 1),
        ("-5", "5", 0),
        (".5", "5", 0),
        ("3.14", "3 14", 0),
        ("1/2", "1 2", 0),
        ("C++", "C", 0),
        ("x < 5", "x > 5", 0),
        ("👍", "👎", 0),
        ("cafe\u0301", "cafe", 0),
        ("दिन", "दीन", 0),  # day, poor
        ("ไก่", "ไก", 0),
        ("a", "the", 0),
        ("...", "?", 0),
    ],
)
def test_exact_is_exact_after_normalisation(text, answer, exact):
    for pair in ((text, answer), (answer, text)):
        scores = answer_scores(pair[0], [pair[1]])
        assert scores["exact"] == exact
        assert (scores["f1"] == 1) >= exact and scores["recall"] >= scores["exact"]
    assert answer_scores(text, [text]) == {"exact": 1, "recall": 1, "f1": 1}


@pytest.mark.parametrize("text", ["-5", "it is −5", ".5", "0.5", "5/2", "15"])
def test_a_number_that_ends_in_the_right_one_does_not_hold_it(text):
    """Free answers count as right by recall, so that "-5" must not contain "5"."""
    assert answer_scores(text, ["5"])["recall"] == 0
    assert answer_scores("it is 5.", ["5"])["recall"] == 1


def test_the_mutant_without_marks_takes_two_words_for_one():
    import re

    runs = [re.findall(r"[^\W_]+", text) for text in ("दिन", "दीन")]
    assert runs[0] == runs[1] and words("दिन") != words("दीन")
    assert words("यह एक दिन है") == ["यह", "एक", "दिन", "है"]
    assert words(unicodedata.normalize("NFD", "Café Ångström")) == ["café", "ångström"]


@pytest.mark.parametrize(
    "reference, candidate",
    [
        ("これはテストです。", "これはテストでした。"),
        ("นี่คือการทดสอบ", "นี่คือการทดลอบ"),
        ("이것은시험입니다", "이것은시험이다"),
        ("𠀀𠀁𠀂𠀃𠀄", "𠀀𠀁𠀂𠀃𠀅"),
    ],
)
def test_scripts_without_blanks_are_scored_by_character(reference, candidate):
    """sacrebleu's zh splits Chinese alone: by it all else is one word, right or wrong."""
    found = text_scores(reference, candidate)
    by = [
        sacrebleu.sentence_bleu(candidate, [reference], tokenize=name).score
        for name in ("char", "zh")
    ]
    assert found.bleu == pytest.approx(by[0]) and "tok:char" in found.signature
    assert by[1] < by[0] - 10 and 0.4 < found.rouge[2] < 1


def test_one_text_in_two_unicode_forms_is_said_to_be_that():
    a = "naïve café"
    found = text_scores(a, unicodedata.normalize("NFD", a))
    assert not found.equal and found.rouge == (1, 1, 1) and "two Unicode forms" in found.note
    assert text_scores(a, a).note == text_scores(a, "naive tea").note == ""


@pytest.mark.parametrize(
    "a, b, value",
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]), 2 / 3),
        (torch.tensor([1, 2]), [1, 2], 1),
        ([torch.tensor(1), torch.tensor(2)], np.array([1, 2]), 1),
        ([2**61 - 1, 5], [0, 5], 1 / 2),  # their hashes are equal
        ([-1, 7], [-2, 7], 1 / 2),
        (["a", "b"], ["a", "c"], 1 / 2),
        ([], [], 1),
    ],
)
def test_ids_are_compared_by_value_whatever_holds_them(a, b, value):
    assert similarity(a, b) == similarity(b, a) == pytest.approx(value)
    assert hash(2**61 - 1) == hash(0)


# --- NaN, overflow, quantisation, pruning, adapters

QUIET = {"zero": 0.0, "minus zero": -0.0, "equal": 0.3, "all negative": -5.0}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_without_a_spread_come_back_finite(name):
    """The mutant: x / (largest / top), NaN for a row of zeros, as pruning makes them."""
    for value in QUIET.values():
        x = torch.full((2, 128), value)
        x[1] = torch.linspace(-1, 1, 128)
        back = round_to(x, name)
        assert back.isfinite().all() and (back[0] - value).abs().max() <= abs(value) / 4 + 1e-6
        alone = round_to(x[:1], name)
        assert alone.isfinite().all() and (value or not alone.any())
    zeros = torch.zeros(4)
    assert (zeros / (zeros.abs().max() / 7) * 0).isnan().all()


def test_one_outlier_costs_its_row_and_groups_contain_it():
    """By hand: scale 127/127 = 1 rounds .4 to 0; without the outlier it is .4/127."""
    row = torch.full((1, 64), 0.4)
    row[0, 0] = 127.0
    lost = (round_to(row, "int8-channel") - row).abs()[0]
    assert lost[0] == 0 and lost[1:].tolist() == pytest.approx([0.4] * 63)
    grouped = (round_to(row, "int8-group32") - row).abs()[0]
    assert grouped[1:32].min() > 0.39 and grouped[32:].max() < 1e-3


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_0", "nf4-double"])
def test_weights_beyond_a_blocks_scale_are_refused_not_made_nan(name):
    x = torch.full((1, 128), 3e38)
    with pytest.raises(ValueError, match=f"within what scales of {name} can hold; .* values are"):
        round_to(x, name)
    assert round_to(x / 1e38, name).isfinite().all()
    assert torch.tensor(3e38 / 127).half().isinf(), "the scale"


def test_values_beyond_a_grid_saturate_and_never_become_nan():
    """A plain cast to e4m3 has no infinity to go to: the mutant."""
    block = torch.tensor([[7.9] + [1.0] * 31])  # scale 2^(2 − 2), so that the top is 6
    assert round_to(block, "mxfp4")[0, :2].tolist() == [6.0, 1.0]
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert np.isnan(np.float32(1000).astype(ml_dtypes.float8_e4m3fn))
    big = torch.tensor([[1000.0] + [1.0] * 31])
    assert round_to(big, "mxfp8-e4m3")[0, 0] == 896  # 448 times 2^(9 − 8)


@pytest.mark.parametrize("x", [[[1.0]], torch.tensor(1.0), torch.zeros(0, 8)])
def test_what_is_no_matrix_of_weights_is_named(x):
    with pytest.raises(ValueError, match="`x` must be a tensor"):
        round_to(x, "int8-channel")


def masked(network, share=0.5):
    """torch's own pruning: the weight is made of weight_orig and a mask before each pass."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            prune.l1_unstructured(module, "weight", share)
    return network


@pytest.mark.parametrize("name", ["int2-group32", "2:4", "magnitude-70", "int8-channel"])
def test_weights_that_are_made_anew_are_refused(name):
    """What is written to them is gone with the next pass: the mutant changes no logit."""
    network, ids = masked(build_t0()), torch.arange(8)[None]
    with torch.no_grad():
        before = network(ids, use_cache=False).logits
        for module in network.modules():
            if hasattr(module, "weight_mask"):
                module.weight.mul_(0.5)
        assert torch.equal(network(ids, use_cache=False).logits, before)
    with pytest.raises(ValueError, match=r"is made anew before each pass .* make it permanent"):
        find(name).apply(network)
    normed = build_t0()
    parametrizations.weight_norm(normed.model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match=r"mlp\.up_proj` is made anew"):
        find(name).apply(normed)
    for module in network.modules():
        if hasattr(module, "weight_mask"):
            prune.remove(module, "weight")
    changed = find(name).apply(network).network
    with torch.no_grad():
        assert not torch.equal(changed(ids, use_cache=False).logits, before)


def test_a_mask_counts_as_zeros():
    network = masked(build_t0())
    kept = sparsity(network)
    stored = sum(int((w == 0).sum()) for w in network.parameters())
    for module in network.modules():
        if hasattr(module, "weight_mask"):
            prune.remove(module, "weight")
    assert kept == sparsity(network) > 0.4
    assert stored / sum(w.numel() for w in network.parameters()) < 0.01, "the mutant"


def test_half_of_the_weights_zero_is_not_two_of_four():
    """The mutant counts zeros only, and half of them lie in other places."""
    entry, network = find("2:4"), build_t0()
    pruned = entry.apply(network).network
    assert "% zero" in entry.witness(SimpleNamespace(network=pruned))
    half = find("magnitude-50").apply(network).network
    assert sparsity(half) == pytest.approx(sparsity(pruned), rel=0.01)
    assert entry.witness(SimpleNamespace(network=half)) == ""
    for name, module in pruned.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            zeros = (module.weight == 0).reshape(-1, 4).sum(1)
            assert (zeros == 2).all()
    stored = find("2:4").apply(build_g0()).network.transformer.h[0].mlp.c_fc.weight  # [in, out]
    assert ((stored.T == 0).reshape(-1, 4).sum(1) == 2).all()


def test_merging_scales_by_alpha_over_r():
    """The mutants: alpha alone, and alpha/√r where the adapter was not trained so."""
    network = with_adapters(build_t0(torch.float64), r=8, alpha=32.0, modules=["v_proj"])
    layer = network.model.layers[0].self_attn.v_proj
    w, a, b = (x.detach().numpy() for x in (layer.base_layer.weight, layer.lora_A, layer.lora_B))
    right = w + 32 / 8 * b @ a
    made = merged().apply(network).network.model.layers[0].self_attn.v_proj.weight
    assert made.detach().numpy() == pytest.approx(right, abs=1e-15), "float64 stays float64"
    for scaling in (32, 32 / math.sqrt(8)):
        assert np.abs(w + scaling * b @ a - right).max() > 0.1
    with pytest.raises(ValueError, match="`r` must be at least 1; got 0"):
        with_adapters(build_t0(), r=0)


def test_an_adapter_merged_into_a_pruned_base_fills_its_zeros():
    entry = merged()

    def said(base):
        changed = entry.apply(with_adapters(base)).network
        return entry.witness(SimpleNamespace(network=changed)), sparsity(changed)

    whole, pruned = build_t0(), find("magnitude-50").apply(build_t0()).network
    assert said(whole)[0] == "9 adapters merged, none left"
    text, left = said(pruned)
    assert (
        f"{WARNING}the base's zeros: 50% of the weights" in text and left < sparsity(pruned) - 0.05
    )


def test_zeros_of_pruned_weights_stay_in_every_format_that_has_a_zero():
    """llama.cpp's q4_1 and q5_1 store a smallest value and steps from there, seldom to 0."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(8, 256, generator=rng) + 0.3
    x[torch.rand(x.shape, generator=rng) < 0.5] = 0
    lost = {name for name in FORMATS if ((round_to(x, name) != 0) & (x == 0)).any()}
    assert lost == {"q4_1", "q5_1"}


def test_weights_beyond_float16_are_named():
    network = build_t0()
    entry = find("float16")

    def said(candidate):
        seen = {"dtypes": ("float16",), "computed": ("float16",)}
        return entry.witness(SimpleNamespace(network=candidate.network, **seen))

    assert said(entry.apply(network)) == "parameters in float16"
    with torch.no_grad():
        network.model.layers[1].mlp.down_proj.weight[0, :3] = 1e5
    assert f"{WARNING}what finite weights give: 3 are beyond float16" in said(entry.apply(network))
    assert torch.tensor(1e5).half().isinf() and torch.tensor(1e5).bfloat16().isfinite()
