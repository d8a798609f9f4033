"""Task items: bundled sets, scoring against plain forwards, and what a comparison may conclude."""

import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from lossless_lab import models, paths
from lossless_lab.engines.decoding import Decoding
from lossless_lab.pipeline import check
from lossless_lab.pipeline.tasks import answer, choose, likelihood_shift, with_task_quality
from lossless_lab.prompts import PromptFileError
from lossless_lab.prompts.task_items import Task, read_tasks
from lossless_lab.semantic.items import COLUMNS
from lossless_lab.semantic.tasks import answer_scores, compare_tasks
from lossless_lab.stats.intervals import share_interval


@pytest.fixture(scope="module")
def tiny():
    return models.load("tiny-target")


def items(rng, n, accuracy, *, category="facts", groups=None, chance=0.25, shift=0.0):
    """Synthetic scored items; margins agree with who is right."""
    right = rng.random(n) < accuracy
    margin = np.where(right, 1, -1) * rng.gamma(2.0, 1.0, n) + shift
    ids = [f"{category}-{i}" for i in range(n)]
    group = ids if groups is None else [f"{category}-{i % groups}" for i in range(n)]
    columns = (ids, category, group, right, margin, chance)
    return pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))


def flipped(side, lost, gained):
    """The same items with so many right ones made wrong and wrong ones made right."""
    other = side.copy()
    for value, n in ((True, lost), (False, gained)):
        rows = side.index[side["right"] == value][:n]
        other.loc[rows, "right"] = not value
        other.loc[rows, "margin_nats"] = -side.loc[rows, "margin_nats"]
    return other


# --- the sets


def test_the_sets_are_large_enough_and_come_out_of_their_script(tmp_path):
    choice, free = read_tasks(), read_tasks(kind="free")
    groups = {(t.category, t.group or t.prompt) for t in choice}
    assert len(choice) >= 1500 and len(groups) >= 1500 and len(free) >= 300
    script = tmp_path / "make_tasks.py"
    script.write_text((paths.DATA / "tasks" / "make_tasks.py").read_text(encoding="utf-8"))
    subprocess.run([sys.executable, script], check=True)
    for name in ("choice.jsonl", "free.jsonl"):
        assert (tmp_path / name).read_bytes() == (paths.DATA / "tasks" / name).read_bytes()


def test_the_right_choice_is_not_given_away_by_place_or_length():
    choice = read_tasks()
    places = np.bincount([t.answer for t in choice if len(t.choices) == 4])
    for n in places:
        low, high = share_interval(int(n), int(places.sum()), confidence=0.999)
        assert low <= 0.25 <= high
    longest = [
        len(t.choices[t.answer]) > max(len(c) for i, c in enumerate(t.choices) if i != t.answer)
        for t in choice
    ]
    assert np.mean(longest) < 0.35


@pytest.mark.parametrize(
    "change, said",
    [
        ({"answer": 4}, "index of `choices`"),
        ({"answer": None}, "go together"),
        ({"choices": ["a"]}, "two or more"),
        ({"choices": ["a", "a"]}, "all different"),
        ({"answers": ["a"]}, "either `choices`"),
        ({"choices": None, "answer": None}, "either `choices`"),
        ({"choices": None, "answer": None, "answers": []}, "answers"),
        ({"category": "Facts!"}, "category"),
        ({"solution": 1}, "solution"),
    ],
)
def test_a_wrong_line_of_a_task_file_is_named(tmp_path, change, said):
    good = {"id": "a", "category": "facts", "language": "en", "prompt": "Q:", "answer": 0}
    good |= {"choices": ["x", "y"]}
    path = tmp_path / "tasks.jsonl"
    lines = [json.dumps(good), json.dumps(good | {"id": "b"} | change)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(PromptFileError, match=said) as raised:
        read_tasks(path)
    assert f"{path.name}:2" in str(raised.value)


# --- scoring


def test_choices_are_scored_as_by_plain_uncached_forwards(tiny):
    tasks = [t for t in read_tasks() if t.category in ("facts", "format", "zh-words")][::40]
    frame = choose(tiny, tasks, progress=False)
    for task, found in zip(tasks, frame["logprobs_nats"], strict=True):
        prompt = tiny.tokenizer(task.prompt)["input_ids"]
        for choice, value in zip(task.choices, found, strict=True):
            ending = tiny.tokenizer(choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = tiny.network(torch.tensor([prompt + ending]), use_cache=False).logits[0]
            logprobs = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
            truth = logprobs[range(len(ending)), ending].sum()
            assert value == pytest.approx(float(truth), abs=2e-4)


def test_the_order_of_items_and_of_choices_does_not_matter(tiny):
    tasks = [t for t in read_tasks() if t.category == "words"][:6]
    turned = [
        t.model_copy(update={"choices": t.choices[::-1], "answer": len(t.choices) - 1 - t.answer})
        for t in tasks[::-1]
    ]
    one = choose(tiny, tasks, progress=False).set_index("id")
    two = choose(tiny, turned, progress=False).set_index("id").loc[one.index]
    assert list(one["chosen"]) == list(two["chosen"])
    assert one["margin_nats"].to_numpy() == pytest.approx(two["margin_nats"].to_numpy(), abs=1e-4)


def test_free_answers_are_scored_by_their_words(tiny):
    frame = answer(tiny, read_tasks(kind="free")[:2], max_new_tokens=3)
    assert list(frame.columns[:6]) == list(COLUMNS) and frame["margin_nats"].isna().all()
    assert list(frame["right_answer"]) == ["Paris", "Berlin"] and "chosen" in frame
    assert answer_scores("Paris", ["paris."]) == {"exact": 1.0, "recall": 1.0, "f1": 1.0}
    assert answer_scores("the capital is Paris", ["Paris"])["f1"] == pytest.approx(0.5)
    assert answer_scores("首都是巴黎。", ["巴黎"])["recall"] == 1
    assert answer_scores("", ["x"]) == {"exact": 0.0, "recall": 0.0, "f1": 0.0}
    with pytest.raises(ValueError, match="at least one right answer"):
        answer_scores("x", [])


def test_the_shift_in_likelihood_is_that_of_plain_forwards(tiny):
    """The other side's answer under this model, Chinese included; equal texts shift by 0."""
    prompts = ["The cache holds", "缓存", "The cache holds"]
    own, other = [" keys and values", "保存键", " keys"], [" water", "没有水了", " keys"]
    frame = likelihood_shift(tiny, prompts, own, other)
    for i, texts in enumerate(zip(own, other, strict=True)):
        for name, text in zip(("own_nats", "other_nats"), texts, strict=True):
            ids = tiny.tokenizer(prompts[i])["input_ids"]
            end = tiny.tokenizer(text, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = tiny.network(torch.tensor([ids + end]), use_cache=False).logits[0]
            logprobs = logits[len(ids) - 1 : -1].double().log_softmax(-1)
            truth = float(logprobs[range(len(end)), end].mean())
            assert frame[name][i] == pytest.approx(truth, abs=2e-4)
    assert frame["shift_nats"][2] == 0
    assert frame["shift_nats"][0] == pytest.approx(frame["own_nats"][0] - frame["other_nats"][0])
    with pytest.raises(ValueError, match=r"`prompts` and `own` and `other` must .* got 3, 3, 2"):
        likelihood_shift(tiny, prompts, own, other[:2])
    with pytest.raises(ValueError, match="answers 0 must hold a token"):
        likelihood_shift(tiny, ["a"], [""], ["b"])


def test_items_of_the_wrong_kind_are_refused(tiny):
    with pytest.raises(ValueError, match="with `choices`"):
        choose(tiny, read_tasks(kind="free")[:1], progress=False)
    with pytest.raises(ValueError, match="with `answers`"):
        answer(tiny, read_tasks()[:1])
    with pytest.raises(ValueError, match="one or more"):
        choose(tiny, [], progress=False)


# --- comparing


def test_an_equal_candidate_is_equivalent_and_a_bad_one_is_not():
    rng = np.random.default_rng(1)
    base = items(rng, 1500, 0.7)
    control = flipped(base, 400, 0)
    same = compare_tasks(base, flipped(base, 20, 20), control=control)
    assert same.frame.iloc[-1]["word"] == "EQUIVALENT"
    assert "the same accuracy, not the same behaviour" in str(same)
    worse = compare_tasks(base, flipped(base, 120, 20), control=control)
    assert worse.frame.iloc[-1]["word"] == "DIFFERENT"
    assert worse.frame.iloc[-1]["margin_change_high"] < 0
    better = compare_tasks(base, flipped(base, 20, 120), control=control)
    assert better.frame.iloc[-1]["word"] == "EQUIVALENT"  # one-sided: better is not inferior


def test_the_finding_asks_what_a_reordering_flips():
    rng = np.random.default_rng(13)
    base = items(rng, 1500, 0.7)
    control, other = flipped(base, 400, 0), flipped(base, 20, 20)
    assert compare_tasks(base, other, control=control, reordered=base).finding
    shuffled = base.copy()
    shuffled.loc[rng.choice(base.index, 38, replace=False), "right"] ^= True
    found = compare_tasks(base, other, control=control, reordered=shuffled)
    assert found.finding == "" and "behaviour" not in str(found)
    for lost, gained in ((0, 0), (2, 2), (90, 20)):  # none, too few, and another accuracy
        assert not compare_tasks(base, flipped(base, lost, gained), control=control).finding


def test_the_worst_items_stand_side_by_side_lost_ones_first():
    base = items(np.random.default_rng(14), 60, 0.7)
    base = base.assign(prompt=[f"Q{i}" for i in base.index], right_answer="x", chosen="x")
    other = base.assign(margin_nats=base["margin_nats"] - base.index / 10)
    lost = base.index[base["right"]][:2]
    other.loc[lost, ["right", "chosen"]] = [False, "y"]
    worst = compare_tasks(base, other).worst
    assert len(worst) == 10 and set(worst["id"][:2]) == set(base.loc[lost, "id"])
    assert list(worst["candidate"][:2]) == ["y", "y"] and set(worst["reference"]) == {"x"}
    fallen = worst["candidate_margin_nats"] - worst["reference_margin_nats"]
    assert list(fallen[2:]) == pytest.approx([-5.9 + i / 10 for i in range(8)])
    assert len(compare_tasks(base, base).worst) == 0
    renamed = base.assign(prompt=["other", *base["prompt"][1:]])
    with pytest.raises(ValueError, match="item 'facts-0' has another prompt"):
        compare_tasks(base, renamed)


def test_without_assay_sensitivity_the_answer_is_inconclusive():
    rng = np.random.default_rng(2)
    base, guess = items(rng, 400, 0.7), items(rng, 400, 0.25, category="riddles")
    both = pd.concat([base, guess])
    control = pd.concat([flipped(base, 150, 0), guess])
    found = compare_tasks(both, both, control=control).frame.set_index("category")
    assert found.loc["facts", "word"] == "EQUIVALENT" and found.loc["all", "n_items"] == 400
    assert "does not beat chance" in found.loc["riddles", "why"]
    blunt = compare_tasks(base, base, control=base)
    assert "is not told" in blunt.frame.iloc[0]["why"] and blunt.table is None
    assert str(blunt) == "INCONCLUSIVE: no assay sensitivity"


def test_variants_of_one_text_count_once():
    rng = np.random.default_rng(3)
    base = items(rng, 1200, 0.7, groups=40)
    found = compare_tasks(base, base).frame.iloc[0]
    assert (found["n_items"], found["n_groups"]) == (1200, 40)
    assert found["word"] == "INCONCLUSIVE"  # 40 groups cannot show two points


def test_swapping_the_runs_mirrors_what_has_a_direction():
    rng = np.random.default_rng(4)
    base = items(rng, 600, 0.7)
    other = flipped(base, 30, 10)
    one, two = (compare_tasks(*pair).frame.iloc[0] for pair in ((base, other), (other, base)))
    assert (one["lost"], one["gained"]) == (two["gained"], two["lost"]) == (30, 10)
    assert one["mcnemar_p"] == pytest.approx(two["mcnemar_p"])
    assert one["low"] == pytest.approx(-two["high"], abs=1e-7)
    assert one["margin_change_nats"] == pytest.approx(-two["margin_change_nats"])


def test_categories_are_corrected_for_their_number():
    rng = np.random.default_rng(5)
    sides = [items(rng, 100, 0.7, category=f"c{chr(97 + i)}") for i in range(8)]
    other = [flipped(sides[0], 12, 3), *sides[1:]]
    found = compare_tasks(pd.concat(sides), pd.concat(other)).frame
    assert found["mcnemar_p"][0] < 0.05 < found["holm_p"][0]


def test_items_that_do_not_match_are_refused():
    rng = np.random.default_rng(6)
    base = items(rng, 40, 0.7)
    with pytest.raises(ValueError, match=r"not shared: .*facts-39"):
        compare_tasks(base, base[:-1])
    with pytest.raises(ValueError, match="'facts-0' more than once"):
        compare_tasks(base, pd.concat([base, base[:1]]))
    with pytest.raises(ValueError, match="at least one item"):
        compare_tasks(base[:0], base)
    with pytest.raises(ValueError, match="lacks"):
        compare_tasks(base.drop(columns="chance"), base)
    with pytest.raises(ValueError, match="`margin`"):
        compare_tasks(base, base, margin=0)


def test_a_task_is_frozen():
    task = Task(id="a", category="facts", language="en", prompt="Q", answers=["x"])
    with pytest.raises(ValueError, match="frozen"):
        task.prompt = "other"


def test_the_verdict_takes_its_third_answer_from_the_items(tiny):
    rng = np.random.default_rng(8)
    base = items(rng, 1500, 0.7)
    control = flipped(base, 400, 0)
    ids = {"a": [1, 2, 3], "b": [4, 5, 6]}
    same = compare_tasks(base, flipped(base, 20, 18), control=control)
    kwargs = {"n_variants": 0, "progress": False, "decoding": Decoding(max_new_tokens=2)}
    candidate = models.load("tiny-target", dtype="bfloat16")
    verdict = check(tiny, candidate, ids, tasks=same, **kwargs)
    third = verdict["3"]
    assert (third.word, third.n, third.margin) == ("EQUIVALENT", 1500, 2.0)
    assert "the same answers (the same accuracy, not the same behaviour)" in third.not_shown
    assert third.estimate == pytest.approx(100 * (18 - 20) / 1500)
    assert third.confidence_interval[0] < third.estimate < third.confidence_interval[1]
    assert "task points" in third.size and check(tiny, candidate, ids, **kwargs)["3"].n == 0
    void = check(tiny, tiny, ids, tasks=same, **kwargs)
    assert {a.word for a in void.answers} == {"VACUOUS"}
    verdict = check(tiny, candidate, ids, **kwargs)
    worse = with_task_quality(verdict, compare_tasks(base, flipped(base, 120, 0), control=control))
    assert worse["3"].word == "DIFFERENT" and worse["1b"] == verdict["1b"]
    blunt = with_task_quality(verdict, compare_tasks(base, base, control=base))
    assert blunt["3"].word == "INCONCLUSIVE" and "could have shown harm" in blunt["3"].not_shown


def test_without_a_control_no_candidate_is_cleared_and_harm_is_still_told():
    rng = np.random.default_rng(9)
    base = items(rng, 1500, 0.7)
    same = compare_tasks(base, flipped(base, 20, 20)).frame.iloc[-1]
    assert (same["word"], "no known-bad control" in same["why"]) == ("INCONCLUSIVE", True)
    assert compare_tasks(base, flipped(base, 200, 0)).frame.iloc[-1]["word"] == "DIFFERENT"


def test_a_control_must_lose_answers_not_only_margin():
    rng = np.random.default_rng(10)
    base = items(rng, 1500, 0.7)
    fainter = base.assign(margin_nats=base["margin_nats"] * (1 - 1e-6))
    found = compare_tasks(base, base, control=fainter)
    assert found.table is None and "is not told" in found.frame.iloc[0]["why"]


@pytest.mark.parametrize(
    "column, value, said",
    [
        ("right", "maybe", "has right 'maybe'"),
        ("right", np.nan, "has right nan"),
        ("right", 0.4, "has right 0.4"),
        ("margin_nats", "abc", "has margin_nats 'abc'"),
        ("margin_nats", np.inf, "has margin_nats inf"),
        ("chance", np.nan, "has chance nan"),
        ("chance", 1.5, "has chance 1.5"),
        ("category", np.nan, "has category nan"),
        ("category", "others", "another category"),
        ("chance", 0.5, "another chance"),
    ],
)
def test_values_that_are_no_answer_are_refused_by_name(column, value, said):
    base = items(np.random.default_rng(11), 60, 0.7)
    broken = base.astype({column: object})
    broken.loc[3, column] = value
    with pytest.raises(ValueError, match=f"item 'facts-3' .*{re.escape(said)}"):
        compare_tasks(base, broken)


def test_words_for_true_and_false_are_read_as_such():
    base = items(np.random.default_rng(12), 400, 0.85)
    spelt = base.assign(right=base["right"].map(str))
    wrong = spelt.assign(right="False")
    assert compare_tasks(spelt, wrong).frame.iloc[-1]["word"] == "DIFFERENT"
