"""The command line on real runs: what it prints and writes, its exit codes, and wrong usage."""

import json
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import build_t0
from safetensors.torch import load_file, save_file

from lossless_lab import kv_cache, runs
from lossless_lab.cli import main, options
from lossless_lab.verdict import REQUIREMENTS

SHORT = ("--max-new-tokens", "3")
PROMPTS = [
    {"id": "one", "text": "def add(a, b):"},
    {"id": "endless", "text": "x y z " * 800},
    {"id": "two", "text": "import os"},
    {"id": "three", "text": "for i in range"},
]


def strict(path):
    return json.loads(path.read_text("utf-8"), parse_constant=lambda name: pytest.fail(name))


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Prompt files and runs that several tests compare; read-only."""
    root = tmp_path_factory.mktemp("cli")
    prompts = lines(root / "prompts.jsonl", [PROMPTS[0], PROMPTS[2], PROMPTS[3]])
    lines(root / "long.jsonl", PROMPTS)
    lines(root / "other.jsonl", PROMPTS[2:])
    given = ["--prompts", str(prompts), *SHORT]
    for name, more in {
        "before": ["--save-logits"],
        "again": ["--save-logits"],
        "draft": ["--model", "tiny-draft"],
        "batched": ["--optimization", "batch-8"],
        "ignored": ["--optimization", "compile-ineffective"],
        "rows": ["--batch-size", "2"],
    }.items():
        assert main(["run", str(root / name), *given, *more]) == 0
    assert main(["run", str(root / "others"), "--prompts", str(root / "other.jsonl"), *SHORT]) == 0
    (root / "before.txt").write_text("yes\nno\n", "utf-8")
    (root / "after.txt").write_text("yes\nnope\n", "utf-8")
    (root / "fewer.txt").write_text("yes\n", "utf-8")
    shutil.copy(root / "before" / "logits.safetensors", root / "before.safetensors")
    held = load_file(root / "before.safetensors")
    tilted = {k: v * 1.5 if k.startswith("logits") else v for k, v in held.items()}
    save_file(tilted, root / "tilted.safetensors")
    return root


@pytest.mark.parametrize(
    ("reference", "candidate", "more", "code", "word"),
    [
        ("before", "again", [], 0, "PROVEN"),
        ("before", "again", ["--require", "statistical"], 0, "PROVEN"),
        ("before.safetensors", "before.safetensors", [], 0, "PROVEN"),
        ("before", "before.safetensors", [], 0, "PROVEN"),
        ("before", "draft", [], 1, "DIFFERENT"),
        ("before", "draft", ["--require", "semantic"], 2, "level 3 (no task items"),
        ("before", "batched", [], 2, "INCONCLUSIVE"),
        ("before", "batched", ["--margin-prompts", "0.9"], 0, "EQUIVALENT"),
        ("before", "ignored", [], 2, "VACUOUS"),
        ("before.txt", "after.txt", [], 1, "texts differ, so ids do"),
        ("before.txt", "before.txt", [], 2, "NOT TESTED"),
        ("before", "rows", [], 3, "INVALID"),
        ("before", "rows", ["--under-test", "batch_size"], 2, "INCONCLUSIVE"),
        ("before", "others", [], 3, "INVALID"),
        ("before.txt", "fewer.txt", [], 3, "INVALID"),
    ],
)
def test_exit_codes_follow_the_answer(there, capsys, reference, candidate, more, code, word):
    assert main(["compare", str(there / reference), str(there / candidate), *more]) == code
    told = capsys.readouterr()
    assert word in told.out
    assert told.err.count("\n") == (code == 3)  # one line on what is wrong, else nothing


def test_a_changed_law_with_equal_ids_differs_at_level_2(there, tmp_path, capsys):
    """Logits times 1.5, against the same softmax in numpy; margins come from the command line."""
    files = [str(there / f"{name}.safetensors") for name in ("before", "tilted")]
    tolerant = ["--require", "statistical", "--margin-tv", "0.99", "--margin-prompts", "0.9"]
    assert main(["compare", *files, *tolerant]) == 0
    out = tmp_path / "out"
    assert main(["compare", *files, "--require", "statistical", "--out", str(out)]) in (1, 2)
    law = {a["level"]: a for a in strict(out / "verdict.json")["answers"]}["2"]
    by_prompt = []
    for name, logits in load_file(files[0]).items():
        if name.startswith("logits"):
            x = logits.double().numpy()
            p, q = (np.exp(z - z.max(-1, keepdims=True)) for z in (x, 1.5 * x))
            p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
            by_prompt.append((abs(p - q).sum(-1) / 2).mean())
    assert law["estimate"] == pytest.approx(np.mean(by_prompt), rel=1e-5)
    capsys.readouterr()


def test_out_writes_both_records_as_strict_json(there, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    assert main(["compare", str(there / "before.txt"), str(there / "after.txt"),
                 "--out", str(out)]) == 1  # fmt: skip
    metrics, verdict = strict(out / "metrics.json"), strict(out / "verdict.json")
    assert metrics["n_samples"] == 2
    assert metrics["exact_share"] == 0.5
    # "no" in "nope": longest common subsequence 2 of 2 + 4 characters, so 2 * 2 / 6
    assert metrics["mean_character_similarity"] == pytest.approx((1 + 4 / 6) / 2)
    assert [row["exact"] for row in metrics["samples"]] == [True, False]
    assert [row["prompt_id"] for row in metrics["samples"]] == ["line-1", "line-2"]
    words = {a["level"]: a["word"] for a in verdict["answers"]}
    assert words.pop("1b") == "DIFFERENT" and set(words.values()) == {"NOT TESTED"}
    assert "exact share 50 %, mean text similarity 83.3 %" in capsys.readouterr().out
    assert main(["compare", str(there / "before"), str(there / "draft"), "--out", str(out)]) == 1
    metrics = strict(out / "metrics.json")
    assert metrics["answers"]["1b"] == "DIFFERENT"
    records = [runs.Run(there / name).records for name in ("before", "draft")]
    equal = [a.output_ids == b.output_ids for a, b in zip(*records, strict=True)]
    assert [row["exact"] for row in metrics["samples"]] == equal
    for row, a, b in zip(metrics["samples"], *records, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a.output_ids, b.output_ids, strict=False))
                      if x != y), None)  # fmt: skip
        assert row["first_divergence"] == first
    assert main(["compare", str(there / "before"), str(there / "others"), "--out", str(out)]) == 3
    assert strict(out / "metrics.json")["answers"]["1b"] == "INVALID"


@pytest.mark.parametrize(
    ("form", "begins"),
    [("json", "{"), ("latex", "\\begin{tabular}"), ("markdown", "| level"), ("text", "again ")],
)
def test_formats(there, capsys, form, begins):
    sides = [str(there / name) for name in ("before", "again")]
    assert main(["compare", *sides, "--format", form]) == 0
    out = capsys.readouterr().out
    assert out.startswith(begins)
    if form == "json":
        assert json.loads(out)["answers"][1]["word"] == "PROVEN"


def test_a_run_keeps_proof_that_its_optimisation_ran(there, capsys):
    assert runs.Run(there / "batched").metrics["witness"] == "3 rows in one pass"
    assert runs.Run(there / "batched").metrics["exercised"] == 9
    assert runs.Run(there / "ignored").metrics["witness"] == ""
    assert runs.Run(there / "before").metrics["witness"] is None
    main(["compare", str(there / "before"), str(there / "batched")])
    said = capsys.readouterr().out
    assert "exercised 9 of 9 positions" in said
    assert "no witness" not in said


def test_the_limit_counts_prompts_that_are_really_run(there, tmp_path, capsys):
    given = ["--prompts", str(there / "long.jsonl"), *SHORT]
    assert main(["run", str(tmp_path / "two"), *given, "--limit", "2"]) == 0
    assert [r.prompt_id for r in runs.Run(tmp_path / "two").records] == ["one", "two"]
    told = capsys.readouterr()
    assert "2 outputs in" in told.out
    assert told.err.startswith("lossless-lab: 1 of 3 prompts have more than ")
    assert "endless (4801)" in told.err
    assert main(["run", str(tmp_path / "one"), *given, "--limit", "1"]) == 0
    assert capsys.readouterr().err == ""  # nothing was left out before the first
    assert main(["run", str(tmp_path / "all"), *given, "--limit", "99"]) == 0
    assert len(runs.Run(tmp_path / "all").records) == 3


def test_an_unfinished_run_is_resumed_and_another_refused(there, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(there / "batched", folder)
    whole = (folder / "outputs.jsonl").read_bytes()
    (folder / "outputs.jsonl").write_bytes(whole[: len(whole) // 2])
    (folder / "metrics.json").unlink()
    given = ["--prompts", str(there / "prompts.jsonl"), *SHORT]
    assert main(["run", str(folder), *given, "--optimization", "batch-8"]) == 0
    resumed, first = (runs.Run(f).records for f in (folder, there / "batched"))
    assert [r.output_ids for r in resumed] == [r.output_ids for r in first]
    assert runs.Run(folder).metrics["witness"] == "3 rows in one pass"
    before = (folder / "outputs.jsonl").read_bytes()
    assert main(["run", str(folder), *given, "--seed", "1"]) == 3
    assert (
        "holds another run: `optimization` was 'batch-8' and is 'none'" in capsys.readouterr().err
    )
    assert (folder / "outputs.jsonl").read_bytes() == before


def test_the_table_of_runs_is_kept_between_its_markers(there, tmp_path, capsys):
    page = tmp_path / "RUNS.md"
    page.write_text("# Runs\n\n<!-- runs: begin -->\nold\n<!-- runs: end -->\n\nbelow\n", "utf-8")
    for _ in range(2):
        assert main(["runs", "--root", str(there), "--write", str(page)]) == 0
        once = page.read_text("utf-8")
        assert page.read_text("utf-8") == once
    assert once.startswith("# Runs\n\n<!-- runs: begin -->")
    assert once.endswith("<!-- runs: end -->\n\nbelow\n")
    assert "old" not in once
    assert "batch-8" in once
    capsys.readouterr()
    assert main(["runs", "--root", str(there)]) == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 1 + 7
    assert "3 rows in one pass" in table
    assert "nan" not in table.lower()
    assert "<NA>" not in table
    (tmp_path / "none").mkdir()
    assert main(["runs", "--root", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.startswith("no runs under")


def damaged(there, tmp_path, file, text):
    folder = tmp_path / "damaged"
    shutil.copytree(there / "before", folder)
    (folder / file).write_text(text, "utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rnu", "did you mean 'run'?"),
        ("", "required: COMMAND"),
        ("run", "required: folder"),
        ("run NEW --modle x", "unknown option '--modle'; did you mean '--model'?"),
        ("run NEW --limit -2", "--limit: must be a whole number of at least 1; got '-2'"),
        ("run NEW --model tiny-targt", "did you mean 'tiny-target'?"),
        ("run NEW --optimization bflat16", "did you mean 'bfloat16'?"),
        ("run NEW --dtype floa32", "did you mean 'float32'?"),
        ("run NEW --attention eagre", "did you mean 'eager'?"),
        ("run NEW --device moon", "none that torch knows; give cpu"),
        ("run NEW --device cdua:0", "did you mean 'cuda'?"),
        ("run NEW --limit 2 --n-samples 10000000000", "more than half of the"),
        ("run NEW --limit 2 --n-samples 9999999 --save-logits", "more than half of the"),
        ("run NEW --prompts NESTED", "line must be one JSON object"),
        ("run before.txt --limit 2", "before.txt is a file; a run needs a folder"),
        ("run NEW --temperature -1", "`temperature` must be at least 0"),
        ("run NEW --max-new-tokens 9000", "leaves no room for a prompt in the context of 1024"),
        ("run NEW --prompts nowhere.jsonl", "there is no prompt file 'nowhere.jsonl'"),
        ("run NEW --prompts EMPTY", "`text` must hold more than white space"),
        ("run NEW --prompts ENDLESS", "leaves out all: endless (4801)"),
        ("compare before", "required: candidate"),
        ("compare before nowhere", "there is no run folder or file"),
        ("compare before again --require numericl", "did you mean 'numerical'?"),
        ("compare before again --under-test batchsize", "did you mean 'batch_size'?"),
        ("compare before again --margin-tv 7", "above 0 and at most 1; got '7'"),
        ("compare before JUNK", "is damaged, or no file of logits"),
        ("compare before again/outputs.jsonl", "is a part of a run; give the folder"),
        ("runs --write nowhere/RUNS.md", "there is no folder nowhere"),
        ("runs --root nowhere", "there is no folder"),
        ("models fetch", "needs a name"),
        ("models fetch smolm", "did you mean 'smollm2'?"),
        ("models lst", "did you mean 'list'?"),
        ("doctor now", "unknown argument 'now'"),
        ("kv-cache smolm2-135", "near it are smollm2-135m"),
        ("kv-cache smollm2-135m --engine vlm", "`engine` 'vlm' is unknown"),
        ("kv-cache smollm2-135m --dtype bfloat", "`dtype` 'bfloat' is unknown"),
        ("kv-cache smollm2-135m --context 0", "at least 1; got '0'"),
        ("kv-cache smollm2-135m --tp 7", "`tensor_parallel` 7"),
        ("kv-cache LIST", "must hold a JSON object; got [1]"),
        ("kv-cache EMPTY", "cannot estimate: `model_type`"),
        ("kv-cache JUNK", "JUNK.safetensors"),
    ],
)
def test_wrong_usage_is_met_with_one_clear_line(there, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(there)
    stand_ins = {
        "NEW": str(tmp_path / "new"),
        "EMPTY": str(lines(tmp_path / "empty.jsonl", [{"id": "a", "text": " "}])),
        "ENDLESS": str(lines(tmp_path / "endless.jsonl", PROMPTS[1:2])),
        "LIST": str(lines(tmp_path / "list.json", [[1]])),
        "NESTED": str(tmp_path / "nested.jsonl"),
        "JUNK": str(tmp_path / "JUNK.safetensors"),
    }
    (tmp_path / "JUNK.safetensors").write_text("{", "utf-8")
    (tmp_path / "nested.jsonl").write_text("[" * 100_000 + "\n", "utf-8")
    try:
        code = main([stand_ins.get(word, word) for word in words.split()])
    except SystemExit as stop:
        code = stop.code
    told = capsys.readouterr()
    assert code == 3
    assert said in told.err
    assert told.err.startswith("lossless-lab")
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert not (tmp_path / "new").exists()  # nothing half-made


def test_damaged_runs_are_named_and_left_alone(there, tmp_path, capsys):
    for file, text in (
        ("manifest.json", "{"), ("outputs.jsonl", "{\n"), ("outputs.jsonl", "[" * 100_000 + "\n"),
        ("metrics.json", "{"), ("metrics.json", "[]"), ("metrics.json", "[" * 100_000),
    ):  # fmt: skip
        shutil.rmtree(tmp_path / file, ignore_errors=True)
        folder = damaged(there, tmp_path / file, file, text)
        before = {p.name: p.read_bytes() for p in sorted((tmp_path / file / "damaged").iterdir())}
        assert main(["compare", str(there / "before"), folder]) == 3
        told = capsys.readouterr().err
        assert f"{file}" in told
        assert "damaged" in told
        after = {p.name: p.read_bytes() for p in sorted((tmp_path / file / "damaged").iterdir())}
        assert after == before


def test_vocabularies_that_differ_are_invalid(there, tmp_path, capsys):
    ids = lines(tmp_path / "ids.jsonl", [{"id": "a", "ids": [1, 5, 9, 13]}])
    folders = []
    for vocab_size in (97, 101):
        model = tmp_path / f"model-{vocab_size}"
        build_t0(vocab_size=vocab_size).save_pretrained(model)
        folders.append(str(tmp_path / f"run-{vocab_size}"))
        given = ["--prompts", str(ids), "--model", str(model)]
        assert main(["run", folders[-1], *given, *SHORT]) == 0
    assert main(["compare", *folders]) == 3
    assert "different vocabularies: vocab_size is 97 and 101" in capsys.readouterr().err
    text = ["--prompts", str(there / "prompts.jsonl"), "--model", str(tmp_path / "model-97")]
    assert main(["run", str(tmp_path / "x"), *text]) == 3
    assert "prompt 'one': 'model-97' has no tokenizer; give `ids`" in capsys.readouterr().err


def test_kv_cache_by_hand_and_as_json(capsys):
    """SmolLM2: 30 layers x 2 (K, V) x 3 heads x 64 wide x 2 bytes x 1,024 tokens x 2 sequences."""
    asked = ["kv-cache", "smollm2-135m", "--context", "1024", "--batch", "2"]
    assert main([*asked, "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bytes"] == 30 * 2 * 3 * 64 * 2 * 1024 * 2
    assert record["bytes_per_token"] == 23040
    assert main([*asked, "--tp", "3", "--engine", "vllm 0.11", "--dtype", "fp8"]) == 0
    text = capsys.readouterr().out
    assert "on each of 3 GPUs" in text
    assert f"({30 * 2 * 1 * 64 * 1 * 1024 * 2:,} B)" in text
    assert "vllm 0.11" in text
    assert main(["kv-cache", "list"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in kv_cache.models()["model"])


def test_models_and_doctor_tell_what_is_here(capsys):
    assert main(["models", "list"]) == 0
    assert "tiny-target" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    for item in ("Python", "memory", "torch", "packages", "NVIDIA driver", "GPU", "smollm2"):
        assert item in told
    import torch

    assert torch.__version__ in told


def test_doctor_names_what_is_missing(monkeypatch):
    from lossless_lab import doctor

    needs = ["numpy>=1", "no-such-package>=2", "numpy<1; extra == 'x'", "torch>=999"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: needs)
    found, advice = doctor._packages()
    assert found == "missing: no-such-package>=2, torch>=999"
    assert advice == "pip install 'no-such-package>=2' 'torch>=999'"


def test_an_interruption_is_no_traceback(there, tmp_path, monkeypatch, capsys):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "record", stop)
    assert main(["run", str(tmp_path / "x"), "--prompts", str(there / "prompts.jsonl")]) == 130
    assert "goes on from there" in capsys.readouterr().err


def test_levels_that_can_be_required_are_those_of_the_verdict():
    assert tuple(REQUIREMENTS) == options.LEVELS


@pytest.mark.slow
def test_the_command_as_its_own_process(there, tmp_path):
    def ask(*words):
        command = [sys.executable, "-m", "lossless_lab.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=there, timeout=120)

    shown = ask("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("run", "runs", "compare", "kv-cache", "doctor"))
    run = ask("run", str(tmp_path / "run"), "--prompts", "prompts.jsonl", *SHORT, "--save-logits")
    assert (run.returncode, run.stdout) == (0, f"3 outputs in {tmp_path / 'run'}\n")
    assert run.stderr == ""
    done = ask("compare", "before", str(tmp_path / "run"))
    assert done.returncode == 0
    assert done.stdout.startswith("run against before: 1a logits bitwise equal: PROVEN")


@pytest.mark.parametrize(
    "command", ["run", "runs", "answer", "compare", "models", "kv-cache", "doctor"]
)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert told.startswith(f"usage: lossless-lab {command}")
    assert "Exit code" in told or command != "compare"


# --- the gate: task items, JUnit


def scored(path, n, wrong):
    """A table of `answer`: the first `wrong` of n items are wrong."""
    rows = [f"i{k},facts,g{k},{k >= wrong},{1.0 if k >= wrong else -1.0},0.25\n" for k in range(n)]
    path.write_text("id,category,group,right,margin_nats,chance\n" + "".join(rows), "utf-8")
    return str(path)


@pytest.mark.parametrize("wrong, code, word", [(100, 0, "EQUIVALENT"), (220, 1, "DIFFERENT")])
def test_task_items_answer_level_3(there, tmp_path, capsys, wrong, code, word):
    sides = [scored(tmp_path / f"{n}.csv", 1500, n) for n in (100, wrong, 700)]
    runs_ = [str(there / "before"), str(there / "batched")]
    assert main(["check", *runs_, "--require", "semantic", "--items", *sides]) == code
    assert f"3 same task quality: {word}" in capsys.readouterr().out
    main(["check", *runs_, "--require", "semantic", "--items", *sides, "--margin-points", "50"])
    assert "3 same task quality: EQUIVALENT" in capsys.readouterr().out


def test_without_items_or_assay_sensitivity_the_gate_does_not_open(there, tmp_path, capsys):
    runs_ = [str(there / "before"), str(there / "batched")]
    assert main(["check", *runs_, "--require", "semantic"]) == 2
    sides = [scored(tmp_path / f"{n}.csv", 200, 20) for n in "abc"]  # the control is no worse
    assert main(["check", *runs_, "--require", "semantic", "--items", *sides]) == 2
    assert "no item could have shown harm" in capsys.readouterr().out
    assert main(["check", *runs_, "--items", sides[0]]) == 3
    assert "takes two tables" in capsys.readouterr().err


@pytest.mark.parametrize("old, new", [("0.25", ""), ("1.0", "abc"), ("True", "yes"), ("id,", "x,")])
def test_a_damaged_table_of_items_is_no_difference(there, tmp_path, capsys, old, new):
    good = scored(tmp_path / "good.csv", 50, 10)
    bad = tmp_path / "bad.csv"
    bad.write_text((tmp_path / "good.csv").read_text("utf-8").replace(old, new, 1), "utf-8")
    asked = ["check", str(there / "before"), str(there / "again"), "--items", good, str(bad)]
    assert main(asked) == 3
    assert "`candidate`" in capsys.readouterr().err
    (tmp_path / "bad.csv").write_text("", "utf-8")
    assert main(asked) == 3
    assert "bad.csv is no table" in capsys.readouterr().err


def test_junit_says_what_the_exit_code_says(there, capsys):
    for other, code in (("again", 0), ("batched", 2), ("draft", 1)):
        asked = ["check", str(there / "before"), str(there / other), "--format", "junit"]
        assert main(asked) == code
        suite = ElementTree.fromstring(capsys.readouterr().out)
        assert int(suite.get("failures")) == len(suite.findall("testcase/failure")) == (code > 0)
        assert len(suite.findall("testcase")) == int(suite.get("tests")) == 5
        assert len(suite.findall("testcase/skipped")) == int(suite.get("skipped"))


def test_answer_writes_one_row_per_item(tmp_path, capsys):
    tasks = lines(
        tmp_path / "tasks.jsonl",
        [
            {"id": "a", "category": "facts", "language": "en", "prompt": "def", "answer": 0,
             "choices": [" f", " 7"]},
            {"id": "b", "category": "free", "language": "en", "prompt": "x =", "answers": ["1"]},
        ],
    )  # fmt: skip
    assert main(["answer", str(tmp_path / "out" / "a.csv"), "--tasks", str(tasks)]) == 0
    table = (tmp_path / "out" / "a.csv").read_text("utf-8").splitlines()
    assert len(table) == 3 and table[0].startswith("id,category,group,right,margin_nats,chance")
    assert "of 2 items right" in capsys.readouterr().out
    missing = str(tmp_path / "none.jsonl")
    assert main(["answer", str(tmp_path / "b.csv"), "--tasks", missing]) == 3
