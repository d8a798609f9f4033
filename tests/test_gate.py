"""The gate as CI runs it: real runs and real task tables through `check` in processes."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from json import decoder, encoder, scanner
from xml.etree import ElementTree

import pytest
import torch
import yaml

from lossless_lab import models, runs
from lossless_lab.cli import main, options
from lossless_lab.optimizations import find
from lossless_lab.pipeline.recognition import as_subject
from lossless_lab.verdict import LEVELS, Answer

MARGINS = {"numerical": "--margin-prompts", "statistical": "--margin-tv",
           "semantic": "--margin-points"}  # fmt: skip


def tasks_of(model, n=150):
    """Lines of code, cut at a token: the model's own likeliest next token against its eighth."""
    code = "".join(inspect.getsource(module) for module in (decoder, encoder, scanner))
    lines = sorted({line for line in code.splitlines() if len(line) > 24})
    encode, decode = model.tokenizer.encode, model.tokenizer.decode
    found = {}
    for ids in (encode(line)[:8] for line in lines):
        if len(found) == n:
            break
        with torch.no_grad():
            best = model.network(torch.tensor([ids])).logits[0, -1].topk(8).indices.tolist()
        prompt, choices = decode(ids, skip_special_tokens=True), [decode(best[i]) for i in (0, 7)]
        apart = [encode(c, add_special_tokens=False) for c in choices]
        if encode(prompt) == ids and apart == [[best[0]], [best[7]]]:
            found[prompt] = choices
    return [
        {"id": f"i{i}", "category": "code", "language": "code", "prompt": prompt,
         "choices": choices[:: -1 if i % 2 else 1], "answer": i % 2}
        for i, (prompt, choices) in enumerate(found.items())
    ]  # fmt: skip


@pytest.fixture(scope="module")
def there(tmp_path_factory, tiny_target):
    """Runs of the tiny pair and tables of task items; read-only."""
    root = tmp_path_factory.mktemp("gate")
    tasks = tasks_of(tiny_target)
    items = root / "tasks.jsonl"
    items.write_text("".join(json.dumps(t) + "\n" for t in tasks), "utf-8")
    prompts = root / "prompts.jsonl"
    asked = [{"id": t["id"], "text": t["prompt"]} for t in tasks[:64]]
    prompts.write_text("".join(json.dumps(p) + "\n" for p in asked), "utf-8")
    for name, more in {
        "before": ["--save-logits"],
        "again": ["--save-logits"],
        "bf16": ["--save-logits", "--optimization", "bfloat16"],
        "lookup": ["--save-logits", "--optimization", "prompt-lookup-10"],
        "draft": ["--save-logits", "--model", "tiny-draft"],
        "few": ["--save-logits", "--limit", "8"],
    }.items():
        given = ["--prompts", str(prompts), "--max-new-tokens", "6", *more]
        assert main(["run", str(root / name), *given]) == 0
    shutil.copytree(root / "again", root / "bare")
    (root / "bare" / "logits.safetensors").unlink()
    for name, more in {
        "before": [],
        "after": ["--optimization", "bfloat16"],
        "worse": ["--model", "tiny-draft"],
        "bad": ["--optimization", "int2-group32"],
    }.items():
        assert main(["answer", str(root / f"{name}.csv"), "--tasks", str(items), *more]) == 0
    table = (root / "before.csv").read_text("utf-8").splitlines(keepends=True)
    (root / "shorter.csv").write_text("".join(table[:-1]), "utf-8")
    (root / "doubled.csv").write_text("".join([*table, table[-1]]), "utf-8")
    (root / "other.csv").write_text("".join(table).replace("\ni1,", "\nj1,"), "utf-8")
    (root / "empty.csv").write_text(table[0], "utf-8")
    (root / "column.csv").write_text("".join(table).replace("margin_nats", "margin", 1), "utf-8")
    (root / "torn.csv").write_text("".join(table)[: len("".join(table)) // 2] + ',"', "utf-8")
    (root / "bytes.csv").write_bytes(b"\x00\xff\xfe" + b"\x80" * 99)
    return root


ITEMS = ("--items", "before.csv")
# level, candidate, options, exit code, word: all codes at all levels
GATE = [
    ("numerical", "again", [], 0, "PROVEN"),
    ("numerical", "lookup", [], 0, "EQUIVALENT"),
    ("numerical", "bf16", [], 1, "DIFFERENT"),
    ("numerical", "lookup", ["--margin-prompts", "0.01"], 2, "INCONCLUSIVE"),
    ("numerical", "few", [], 3, "INVALID"),
    ("statistical", "bf16", ["--margin-tv", "0.1"], 0, "EQUIVALENT"),
    ("statistical", "draft", [], 1, "DIFFERENT"),
    ("statistical", "bf16", [], 2, "INCONCLUSIVE"),
    ("statistical", "bare", [], 2, "NOT TESTED"),
    ("statistical", "few", [], 3, "INVALID"),
    ("semantic", "bf16", [*ITEMS, "after.csv", "bad.csv"], 0, "EQUIVALENT"),
    ("semantic", "draft", [*ITEMS, "worse.csv", "bad.csv"], 1, "DIFFERENT"),
    ("semantic", "draft", [*ITEMS, "worse.csv", "bad.csv", "--margin-points", "50"], 0, "EQUIV"),
    ("semantic", "bf16", [*ITEMS, "after.csv"], 2, "INCONCLUSIVE"),
    ("semantic", "bf16", [*ITEMS, "after.csv", "after.csv"], 2, "INCONCLUSIVE"),
    ("semantic", "few", [*ITEMS, "after.csv", "bad.csv"], 3, "INVALID"),
]
LEVEL = {"numerical": "1b", "statistical": "2", "semantic": "3"}


@pytest.mark.parametrize(("level", "candidate", "more", "code", "word"), GATE)
def test_codes_and_markdown_by_level(
    there, monkeypatch, capsys, level, candidate, more, code, word
):
    monkeypatch.chdir(there)
    asked = ["check", "before", candidate, "--require", level, *more, "--format", "markdown"]
    assert main(asked) == code
    table, _, text = capsys.readouterr().out.partition("\n\n")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    assert {len(row) for row in rows} == {9} and [row[0] for row in rows[2:]] == list(LEVELS)
    answer = next(row for row in rows if row[0] == LEVEL[level])
    assert answer[2].startswith(word)
    assert text.startswith(f"{candidate} against before: ")


def ask(there, *words):
    command = [sys.executable, "-m", "lossless_lab.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=there, timeout=600)


@pytest.mark.slow
def test_the_gate_in_processes_of_its_own_with_junit(there):
    """Codes 0 to 3 at each level; the XML is read by a parser and says what the code says."""
    few = [case for i, case in enumerate(GATE) if i in (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 13, 15)]
    asked = [
        ("check", "before", candidate, "--require", level, *more, "--format", "junit")
        for level, candidate, more, _, _ in few
    ]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda words: ask(there, *words), asked))
    for (level, _, _, code, word), process in zip(few, done, strict=True):
        assert process.returncode == code, process.stderr
        assert process.stderr.count("\n") == (code == 3) and "Traceback" not in process.stderr
        suite = ElementTree.fromstring(process.stdout)
        cases = {case.get("name")[6:].split(":")[0]: case for case in suite}
        assert list(cases) == list(LEVELS)
        failures = [name for name, case in cases.items() if case.find("failure") is not None]
        assert failures == ([LEVEL[level]] if code else [])
        assert f": {word}" in cases[LEVEL[level]].find("system-out").text
    assert {(case[0], case[3]) for case in few} == {(n, code) for n in LEVEL for code in range(4)}


BAD = [
    ("again --margin-prompts 0", "--margin-prompts: must be a number above 0"),
    ("again --margin-tv -0.1", "--margin-tv: must be a number above 0"),
    ("again --margin-points 0", "--margin-points: must be above 0 and below 100 points; got '0'"),
    ("again --margin-points nan", "--margin-points: must be above 0 and below 100 points"),
    ("nowhere", "there is no run folder or file nowhere"),
    ("again --items before.csv", "takes two tables"),
    ("again --items before.csv nowhere.csv", "nowhere.csv"),
    ("again --items before.csv shorter.csv", "must hold the reference's items; not shared: ['i"),
    ("again --items shorter.csv before.csv", "must hold the reference's items; not shared: ['i"),
    ("again --items before.csv doubled.csv", "more than once"),
    ("again --items before.csv other.csv", "not shared: ['i1', 'j1']"),
    ("again --items before.csv after.csv other.csv", "`control`"),
    ("again --items empty.csv empty.csv", "at least one item"),
    ("again --items before.csv column.csv", "lacks ['margin_nats']"),
    ("again --items before.csv torn.csv", "torn.csv"),
    ("again --items before.csv bytes.csv", "bytes.csv"),
    ("again --out before", "`--out`: before is a run"),
]


def refused(code, out, err, said):
    assert code == 3 and out == ""
    assert err.startswith("lossless-lab") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_input_is_one_line_and_code_3(there, monkeypatch, capsys, words, said):
    monkeypatch.chdir(there)
    try:
        code = main(["check", "before", *words.split()])
    except SystemExit as stop:
        code = stop.code
    told = capsys.readouterr()
    refused(code, told.out, told.err, said)
    assert not (there / "before" / "verdict.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("words", "said"), [BAD[2], BAD[4], BAD[9], BAD[15]])
def test_bad_input_in_a_process_of_its_own(there, words, said):
    done = ask(there, "check", "before", *words.split())
    refused(done.returncode, done.stdout, done.stderr, said)


def test_swapping_the_runs_keeps_what_is_symmetric_and_turns_the_rest(there, monkeypatch, capsys):
    monkeypatch.chdir(there)
    found = {}
    for sides in (("before", "draft"), ("draft", "before")):
        items = {"before": "before.csv", "draft": "worse.csv"}
        asked = ["check", *sides, "--items", *(items[s] for s in sides), "--format", "json"]
        assert main([*asked, "--out", f"out-{sides[0]}"]) == 1
        record = json.loads(capsys.readouterr().out)
        metrics = json.loads((there / f"out-{sides[0]}" / "metrics.json").read_text("utf-8"))
        found[sides[0]] = record, metrics, {a["level"]: a for a in record["answers"]}
    (a, one, first), (b, two, second) = found.values()
    assert (a["reference"], a["candidate"]) == (b["candidate"], b["reference"])
    assert a["supporting"] == pytest.approx(b["supporting"])
    for level in ("1a", "1b", "2"):  # shares and total variation have no direction
        for name in ("word", "n", "estimate", "confidence_interval"):
            assert second[level][name] == pytest.approx(first[level][name]), (level, name)
    assert second["3"]["estimate"] == pytest.approx(-first["3"]["estimate"]) != 0
    low, high = first["3"]["confidence_interval"]
    assert second["3"]["confidence_interval"] == pytest.approx([-high, -low], abs=1e-6)
    assert [d[1:3] for d in a["differences"]] == [d[2:0:-1] for d in b["differences"]]
    assert one["mean_character_similarity"] == pytest.approx(two["mean_character_similarity"])
    for x, y in zip(one["samples"], two["samples"], strict=True):
        assert x["first_divergence"] == y["first_divergence"]
        assert x["reference_token_id"] == y["candidate_token_id"]


def test_swapping_turns_kl_and_keeps_tv_and_js(there):
    from lossless_lab import check

    sides = [str(there / name) for name in ("before", "draft")]
    one, two = (check(*pair, progress=False).evidence["positions"] for pair in (sides, sides[::-1]))
    turned = {"kl_reference_candidate_nats": "kl_candidate_reference_nats",
              "reference_top_id": "candidate_top_id",
              "reference_entropy_nats": "candidate_entropy_nats"}  # fmt: skip
    same = ("prompt_id", "position", "js_nats", "total_variation", "hellinger", "top1_agree")
    for name in same:
        assert one[name].tolist() == pytest.approx(two[name].tolist(), abs=1e-6), name
    for name, other in turned.items():
        assert one[name].tolist() == pytest.approx(two[other].tolist(), abs=1e-6), name
    assert one["kl_reference_candidate_nats"].mean() != pytest.approx(
        two["kl_reference_candidate_nats"].mean(), rel=1e-3
    )


# --- what a DIFFERENT answer rests on


def test_a_difference_inside_its_margin_says_why_it_is_one():
    numbers = {"n": 12, "estimate": 1 / 12, "confidence_interval": (0.004, 0.34), "margin": 0.05}
    seen = Answer(level="1b", word="DIFFERENT", **numbers).size
    assert seen.endswith(
        "margin 5 %: DIFFERENT because outputs were seen to differ; the margin decides only "
        "EQUIVALENT, which needs the upper limit within it"
    )
    assert "because" not in Answer(level="1b", word="INCONCLUSIVE", **numbers).size
    beyond = numbers | {"confidence_interval": (0.06, 0.34)}
    assert Answer(level="1b", word="DIFFERENT", **beyond).size.endswith("margin 5 %")
    drawn = Answer(level="2", word="DIFFERENT", **numbers).size
    assert "DIFFERENT by the test of the tokens drawn, not by this interval" in drawn
    assert Answer(level="2", word="DIFFERENT", **beyond).size.endswith("margin 0.05")


# --- stored runs of entries with a parameter


NAMES = ["prompt-lookup-10", "early-exit-0.25", "assisted-by-tiny-target", "magnitude-30",
         "top-neurons-12.5", "drop-layers-1-3", "merge-adapters-nf4", "kv-kivi-int3",
         "kv-int3-channel", "int4-channel-act-int8-dynamic", "int8-channel-act-int8-static",
         "float64", "batch-3", "int2-group32", "prompt-lookup-7 (poisoned)"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_an_entry_gives_it_back(name):
    assert find(name).name == name


@pytest.mark.parametrize("name", ["prompt-lookup-0", "prompt-lookup-010", "early-exit-2",
                                  "magnitude-x", "kv-x", "drop-layers--", "none"])  # fmt: skip
def test_a_name_that_no_entry_has_is_refused(name):
    with pytest.raises(KeyError, match="no optimisation"):
        find(name)


def test_a_stored_run_is_recognised_by_its_entry(there):
    run = as_subject(there / "lookup")
    assert run.optimization.name == "prompt-lookup-10" and "acceptance" in run.optimization.rule
    assert runs.Run(there / "lookup").manifest.launch_arguments == {"prompt_lookup_num_tokens": 10}


# --- the example in the README


def readme():
    return (models.places.paths.CHECKOUT / "README.md").read_text("utf-8")


def commands(text):
    """Every `lossless-lab …` of a text, placeholders of a shell and a workflow filled in."""
    for line in re.findall(r"(?:bin/)?lossless-lab ((?:run|answer|check|compare|report) .*)", text):
        words = line.split(" > ")[0].split("`")[0]
        words = words.replace("$given", GIVEN if line.startswith(("check", "report")) else "")
        yield words.replace("$side", "x").split()


GIVEN = "--require semantic --items a.csv b.csv c.csv"


def test_the_commands_of_the_readme_are_understood():
    found = list(commands(readme()))
    assert {words[0] for words in found} >= {"run", "answer", "check", "compare", "report"}
    for words in found:
        assert options.parse(words).command in ("run", "answer", "compare", "report"), words


def steps(**matrix):
    """The scripts of the README's workflow by name, for one entry of its matrix."""
    text = re.search(r"```yaml\n(.*?)```", readme(), re.DOTALL)[1]
    jobs = yaml.safe_load(text)["jobs"]["gate"]
    assert matrix in jobs["strategy"]["matrix"]["include"]
    named = {step["name"]: step["run"] for step in jobs["steps"] if "name" in step}
    for name, value in matrix.items():
        named = {k: run.replace("${{ matrix." + name + " }}", value) for k, run in named.items()}
    assert not any("${{" in run for run in named.values())
    return named


def test_the_workflow_has_the_three_triggers():
    for changed, require in (("engine", "numerical"), ("quantization", "statistical"),
                             ("model", "semantic")):  # fmt: skip
        assert (
            f"cp new/{changed}.txt"
            in steps(changed=f"{changed}.txt", require=require)["change one thing"]
        )


@pytest.mark.slow
def test_the_workflow_runs_as_it_stands(there, tmp_path):
    """Every step but the installation, on the tiny pair, with a quantization that shows."""
    scripts = steps(changed="quantization.txt", require="statistical")
    for side, entry in (("before", "none"), ("new", "int4-group32")):
        (tmp_path / side).mkdir()
        files = {"engine": "", "quantization": entry, "model": "tiny-target"}
        for name, text in files.items():
            (tmp_path / side / f"{name}.txt").write_text(text + "\n", "utf-8")
        for name in ("prompts", "tasks"):
            lines = (there / f"{name}.jsonl").read_text("utf-8").splitlines(keepends=True)
            (tmp_path / side / f"{name}.jsonl").write_text("".join(lines[:40]), "utf-8")
    for side in ("before", "after"):
        script = tmp_path / f"env-{side}" / "bin" / "lossless-lab"
        script.parent.mkdir(parents=True)
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m lossless_lab.cli "$@"\n', "utf-8")
        script.chmod(0o755)
    codes = {}
    for name, script in scripts.items():
        if not name.startswith("install"):
            done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True)
            codes[name] = done.returncode
            assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert codes == {"change one thing": 0, "record both sides, and a known-bad control": 0,
                     "gate": 1, "report": 1}  # fmt: skip
    suite = ElementTree.parse(tmp_path / "lossless.xml").getroot()
    assert suite.get("failures") == "1"
    assert "DIFFERENT" in suite.find("testcase/failure").get("message")
    assert (tmp_path / "report" / "divergences.png").is_file()
