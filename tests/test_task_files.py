"""Task items from CSV files, and samples that lm-evaluation-harness logged.

tests/cases/lm_eval holds what lm-evaluation-harness 0.4.13 wrote for a scripted model: four choice
items, and three free ones under two filters.
"""

import json
import re

import numpy as np
import pandas as pd
import pytest

from lossless_lab import paths
from lossless_lab.cli import main
from lossless_lab.prompts import PromptFileError
from lossless_lab.prompts.task_items import read_tasks
from lossless_lab.semantic.lm_eval import read_lm_eval
from lossless_lab.semantic.tasks import compare_tasks

LOGS = paths.PACKAGE.parent / "tests" / "cases" / "lm_eval"
HEADER = "id,category,language,prompt,choices_0,choices_1,answer,answers_0"
GOOD = "a,facts,en,Q:,x,y,0,"


def csv_file(folder, *lines, name="tasks.csv", encoding="utf-8"):
    path = folder / name
    path.write_bytes("\r\n".join(lines).encode(encoding))
    return path


# --- CSV


def test_the_example_of_the_documentation_is_read_as_it_says(tmp_path):
    text = (paths.DATA / "tasks" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```csv\n(.*?)```", text, re.DOTALL)
    first, second, third = read_tasks(csv_file(tmp_path, block))
    assert first.choices == [" 14", " 30", " 90"] and first.answer == 1
    assert first.prompt.endswith("coat?\nAnswer:") and first.answers is None
    assert second.choices == ["需要", "不需要"] and second.category == "refunds"
    assert third.answers == ["Oslo", "Oslo, Norway"] and third.choices is None


def test_csv_and_jsonl_say_the_same(tmp_path):
    free = [t.model_copy(update={"id": f"free-{t.id}"}) for t in read_tasks(kind="free")[::60]]
    tasks = [*read_tasks()[::200], *free]
    rows = []
    for task in tasks:
        row = task.model_dump(exclude_none=True)
        for kind in ("choices", "answers"):
            row |= {f"{kind}_{i}": text for i, text in enumerate(row.pop(kind, []))}
        rows.append(row)
    frame = pd.DataFrame(rows).astype({"answer": "Int64"})
    for encoding in ("utf-8", "utf-8-sig"):  # Excel writes a mark
        frame.to_csv(tmp_path / "tasks.csv", index=False, encoding=encoding)
        assert read_tasks(tmp_path / "tasks.csv") == tasks


@pytest.mark.parametrize(
    "lines, place, said",
    [
        ([], "tasks.csv:", "the file is empty"),
        ([HEADER], "tasks.csv:1", "at least one task"),
        ([HEADER.replace("prompt", "promt"), GOOD], "tasks.csv:1", "the nearest is 'prompt'"),
        ([HEADER.replace("prompt", "promt"), GOOD], "tasks.csv:1", "'prompt' is required"),
        ([HEADER + ",id", GOOD + ",b"], "tasks.csv:1", "'id' is here twice"),
        ([HEADER.replace("choices_1", "choices_2"), GOOD], ":1", "the nearest is 'choices_"),
        ([HEADER.replace("choices_0,choices_1", "choices,answer_text"), GOOD], ":1", "unknown"),
        ([HEADER, GOOD, "b,facts,en,Q:,x,y,B,"], "tasks.csv:3", "`answer`.*valid integer.*'B'"),
        ([HEADER, GOOD, "b,facts,en,Q:,x,y,-1,"], "tasks.csv:3", "`answer`.*'-1'"),
        ([HEADER, GOOD, "b,facts,en,Q:,x,y,2,"], "tasks.csv:3", "index of `choices`; got 2"),
        ([HEADER, GOOD, "b,facts,en,Q:,,y,0,"], "tasks.csv:3", "`choices.0`"),
        ([HEADER, GOOD, "b,facts,en,Q:,,,0,"], "tasks.csv:3", "either `choices`"),
        ([HEADER, GOOD, "b,facts,en,,x,y,0,"], "tasks.csv:3", "`prompt` is required"),
        (
            [HEADER, GOOD, "b,facts,fr,Q:,x,y,0,"],
            "tasks.csv:3",
            "`language`.*en, zh or code|en, zh",
        ),
        ([HEADER, GOOD, "b,facts,en,Q:,x,y,0"], "tasks.csv:3", "8 cells; received 7"),
        ([HEADER, GOOD, "", ""], "tasks.csv:3", "8 cells; received 0"),
        ([HEADER, GOOD, GOOD], "tasks.csv:3", "must be unique; 'a' is on line 2"),
        ([HEADER, 'b,facts,en,"Q\n:",x,y,0,', 'a,facts,en,"Q'], "tasks.csv:4", "must be CSV"),
        ([HEADER, 'b,facts,en,"Q\n:",x,y,0,', "c,facts,en,Q,x,x,0,"], "tasks.csv:4", "different"),
        ([HEADER.replace(",", ";"), GOOD.replace(",", ";")], "tasks.csv:1", "unknown"),
    ],
)
def test_a_wrong_csv_file_is_named_by_line_and_rule(tmp_path, capsys, lines, place, said):
    path = csv_file(tmp_path, *lines)
    with pytest.raises(PromptFileError, match=re.compile(f"{place}.*{said}", re.DOTALL)):
        read_tasks(path)
    assert main(["answer", str(tmp_path / "out.csv"), "--tasks", str(path)]) == 3
    assert place in capsys.readouterr().err and not (tmp_path / "out.csv").exists()


def test_columns_may_stand_in_any_order(tmp_path):
    swapped = csv_file(
        tmp_path, "choices_1,choices_0,id,answer,prompt,language,category", "y,x,a,0,Q:,en,facts"
    )
    assert read_tasks(swapped)[0].choices == ["x", "y"]


def test_a_csv_file_in_another_encoding_is_refused(tmp_path):
    path = csv_file(tmp_path, HEADER, "b,facts,zh,问题,是,否,0,", encoding="gbk")
    with pytest.raises(PromptFileError, match=r"tasks\.csv:2: must be UTF-8; received bytes"):
        read_tasks(path)


def test_a_shifted_answer_would_be_seen(tmp_path):
    """The mutant: dropping empty cells anywhere would move the right answer to another choice."""
    path = csv_file(tmp_path, HEADER + ",choices_2", "b,facts,en,Q:,x,,1,,y")
    with pytest.raises(PromptFileError, match=r"`choices\.1`"):
        read_tasks(path)


def test_csv_items_are_answered_and_compared_on_the_command_line(tmp_path, capsys):
    rows = [f"i{i},facts,en,Question {i}:, one, two,{i % 2}," for i in range(4)]
    path = csv_file(tmp_path, HEADER, *rows, "f,orders,en,City?,,,,Oslo")
    out = tmp_path / "out.csv"
    assert main(["answer", str(out), "--model", "tiny-target", "--tasks", str(path)]) == 0
    frame = pd.read_csv(out)
    assert list(frame["id"]) == ["i0", "i1", "i2", "i3", "f"]
    assert list(frame["right_answer"]) == [" one", " two", " one", " two", "Oslo"]
    assert "of 5 items right" in capsys.readouterr().out


# --- lm-evaluation-harness


def test_samples_become_the_table_that_the_script_was_written_for():
    """Margins by hand from the scripted log-likelihoods; the harness itself said who was right."""
    frame = read_lm_eval(LOGS / "reference").set_index("id")
    choice = frame[frame["category"] == "lab_choice"]
    assert list(choice["right"]) == [True] * 4 and set(choice["chance"]) == {1 / 3}
    assert list(choice["margin_nats"]) == [2.5, 0.25, 2.0, 2.0]
    assert list(choice["chosen"]) == list(choice["right_answer"])
    assert list(choice["chosen"]) == [" Paris", " five", " 硬", " wet"]
    free = frame[frame["category"] == "lab_free:strict-match"]
    assert list(free["right"]) == [True, False, False] and set(free["chance"]) == {0}
    assert free["margin_nats"].isna().all() and free.loc["lab_free-1", "chosen"] == " 巴黎"


def test_another_filter_and_another_metric_are_taken_where_named():
    free, choice = (
        sorted(LOGS.glob(f"candidate/samples_lab_{x}_*"))[0] for x in ("free", "choice")
    )
    flexible = read_lm_eval(free, filter="flexible-extract")
    assert list(flexible["right"]) == [False, True, True]
    assert set(flexible["category"]) == {"lab_free:flexible-extract"}
    assert list(read_lm_eval(choice)["right"]) == [True, False, True, True]
    assert list(read_lm_eval(choice, metric="acc_norm")["right"]) == [True] * 4
    assert read_lm_eval(choice)["margin_nats"][1] == -0.5
    with pytest.raises(ValueError, match=r"of filter 'x'; there are \['strict-match', 'flexible"):
        read_lm_eval(free, filter="x")
    with pytest.raises(ValueError, match=r"free.*:1: .*must have the field 'acc_norm'"):
        read_lm_eval(free, metric="acc_norm")


def test_two_harness_runs_are_compared_as_paired():
    found = compare_tasks(*(read_lm_eval(LOGS / side) for side in ("reference", "candidate")))
    rows = found.frame.set_index("category")
    assert (rows.loc["lab_choice", "lost"], rows.loc["lab_choice", "gained"]) == (1, 0)
    # the four margins moved by -0.25, -0.75, -0.5 and +1 nats
    assert rows.loc["lab_choice", "margin_change_nats"] == pytest.approx(-0.125)
    worst = found.worst
    assert list(worst["id"][:2]) == ["lab_choice-1", "lab_free-0"], "items lost come first"
    first = worst.iloc[0]
    assert (first["prompt"], first["right_answer"]) == ("Two plus three is", " five")
    assert (first["reference"], first["candidate"]) == (" five", " six")
    assert (first["reference_margin_nats"], first["candidate_margin_nats"]) == (0.25, -0.5)
    assert worst.iloc[1]["candidate"] == " the answer is 6"


def scaled(folder, name, changes, times=100):
    """A harness log of 100 times the choice items: `changes` of them are scripted as wrong."""
    (source,) = LOGS.glob("reference/samples_lab_choice_*")
    first = json.loads(source.read_text(encoding="utf-8").split("\n")[0])
    lines = []
    for i in range(times):
        sample = first | {"doc_id": i, "prompt_hash": f"{i:064x}", "acc": 1.0}
        if i < changes:
            sample |= {
                "acc": 0.0,
                "filtered_resps": [["-1.0", "False"], *first["filtered_resps"][1:]],
            }
        lines.append(json.dumps(sample, ensure_ascii=False) + "\n")
    path = folder / f"samples_{name}_2026-01-02T03-04-05.678901.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("lost, code, word", [(0, 0, "EQUIVALENT"), (40, 1, "DIFFERENT")])
def test_harness_logs_gate_from_the_command_line(tmp_path, capsys, lost, code, word):
    before = tmp_path / "before"
    for folder in (before, tmp_path / "after"):  # recorded twice: a copy would be vacuous
        assert main(["run", str(folder), "--limit", "1", "--max-new-tokens", "2"]) == 0
    logs = []
    for side, changes in (("a", 0), ("b", lost), ("c", 90)):
        (tmp_path / side).mkdir()
        logs.append(scaled(tmp_path / side, "big", changes, times=200))
    command = ["check", str(before), str(tmp_path / "after"), "--require", "semantic", "--items"]
    assert main([*command, *map(str, logs)]) == code
    assert word in capsys.readouterr().out
    assert main([*command, *(str(path.parent) for path in logs)]) == code


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "at least one sample; the file is empty"),
        ("{", r":1: must be a logged sample"),
        ("[]", r":1: must be a logged sample"),
        ('{"doc_id": 0}', r":1: .*must have the field 'filter'"),
    ],
)
def test_what_is_no_log_is_named_by_line(tmp_path, text, said):
    path = tmp_path / "samples_x_2026-01-02T03-04-05.6.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_lm_eval(path)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"acc": 0.5}, "`acc` must be 0 or 1; received 0.5"),
        ({"filtered_resps": [["nan", "False"], ["-1", "False"], ["-2", "False"]]}, "finite"),
        ({"prompt_hash": None}, "has group"),
    ],
)
def test_values_that_are_no_answer_are_refused(tmp_path, change, said):
    path = scaled(tmp_path, "x", 0, times=2)
    lines = [json.loads(line) | change for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        compare_tasks(*[read_lm_eval(path)] * 2)


def test_other_prompts_and_missing_items_are_refused(tmp_path):
    path = scaled(tmp_path, "x", 0, times=5)
    ours = read_lm_eval(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(f"{3:064x}", "f" * 64), encoding="utf-8")
    with pytest.raises(ValueError, match="item 'x-3' has another group"):
        compare_tasks(ours, read_lm_eval(path))
    path.write_text("".join(text.splitlines(keepends=True)[:-1]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"not shared.*'x-4'"):
        compare_tasks(ours, read_lm_eval(path))
    with pytest.raises(ValueError, match="must be or hold samples_"):
        read_lm_eval(tmp_path / "none.jsonl")


def test_the_right_choice_is_found_or_left_open(tmp_path):
    """A target that is a text; one that the log leaves open; two choices, known from `acc`."""
    path = scaled(tmp_path, "x", 0, times=1)
    sample = json.loads(path.read_text(encoding="utf-8"))

    def margin(**change):
        path.write_text(json.dumps(sample | change), encoding="utf-8")
        return read_lm_eval(path)["margin_nats"][0]

    assert margin() == margin(target="Paris") == margin(target=" Paris") == 2.5
    assert np.isnan(margin(target="[0, 1]")) and np.isnan(margin(target="Lyon"))
    assert np.isnan(margin(target="0")), "it contradicts `acc`, so it is no index"
    two = {"filtered_resps": [["-4.0", "False"], ["-1.5", "False"]], "target": " is the capital"}
    assert margin(**two) == 2.5 and margin(**two, acc=0.0) == -2.5
