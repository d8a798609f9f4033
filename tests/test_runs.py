"""Run folders: what is written, what resumes, what is refused; tables and text files."""

import dataclasses
import json
import random

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_t0
from hypothesis import given
from hypothesis import strategies as st

from lossless_lab import runs
from lossless_lab.engines import Completion, Decoding, TransformersEngine, leaks
from lossless_lab.numerical.tokens import compare_tokens
from lossless_lab.prompts import Prompt
from lossless_lab.runs.folder import json_line
from lossless_lab.runs.text_files import escape, unescape

PROMPTS = {"s": PROMPT_S, "l": PROMPT_L, "one": (3,), "two": (1, 2), "six": (5,) * 6}
SAMPLED = Decoding(max_new_tokens=5, temperature=1.1, n_samples=3, stop_token_ids=(22, 30, 61, 95))


def record(folder, engine, decoding=SAMPLED, **options):
    return runs.record(folder, engine, PROMPTS, decoding, progress=False, **options)


def told(run):
    """Records without what the clock says."""
    return [r.model_dump(exclude={"timings"}) for r in run.records]


@pytest.fixture(scope="module")
def engine(t0):
    return TransformersEngine(t0, batch_size=4, top_logprobs=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, engine):
    """An uninterrupted run with logits."""
    return record(tmp_path_factory.mktemp("whole"), engine, save_logits=True)


def test_a_run_holds_what_went_in_and_what_came_out(whole, engine):
    manifest, records, metrics = whole.manifest, whole.records, whole.metrics
    assert manifest.decoding == SAMPLED and manifest.n_prompts == 5 and manifest.dtype == "float32"
    assert [(r.prompt_id, r.sample_index) for r in records] == [
        (name, k) for name in PROMPTS for k in range(3)
    ]
    assert all(r.prompt_ids == PROMPTS[r.prompt_id] for r in records)
    assert {r.finish_reason for r in records} == {"stop", "length"}
    assert metrics["n_outputs"] == 15 and metrics["n_tokens"] == sum(
        len(r.output_ids) for r in records
    )
    assert (
        0 < metrics["first_token_ms_p50"] <= metrics["latency_ms_p50"] <= metrics["latency_ms_p95"]
    )
    assert metrics["tokens_per_s"] > 0 and metrics["peak_rss_bytes"] > 2**20
    assert metrics["witness"] is None and metrics["nonfinite_logprobs"] == 0
    for r in records:
        ids, logits = whole.logits(r.prompt_id, r.sample_index)
        assert tuple(ids.tolist()) == r.output_ids and logits.shape == (len(ids), 97)
        logprobs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(r.logprobs), logprobs)
    assert whole.complete
    assert len(whole.to_frame()) == 15
    with pytest.raises(KeyError, match="no logits of 'nobody'"):
        whole.logits("nobody")
    assert {p.name for p in whole.folder.iterdir()} == {
        "manifest.json", "outputs.jsonl", "metrics.json", "logits.safetensors",
    }  # fmt: skip


def test_recording_again_changes_nothing(whole, engine):
    before = {p.name: p.read_bytes() for p in whole.folder.iterdir()}
    record(whole.folder, engine, save_logits=True)
    assert {p.name: p.read_bytes() for p in whole.folder.iterdir()} == before


def test_the_partition_depends_on_prompts_and_batch_size_alone(whole, engine, tmp_path):
    torch.manual_seed(5)  # the global state plays no part, and is left as it was
    state = torch.get_rng_state()
    again = record(tmp_path / "again", engine)
    assert told(again) == told(whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.logits("s") is None


@pytest.mark.parametrize("save_logits", [False, True])
def test_cut_off_anywhere_it_resumes_to_the_same(whole, engine, tmp_path, save_logits):
    full = (whole.folder / "outputs.jsonl").read_bytes()
    chance = random.Random("cut off anywhere")
    cuts = [0, 1, len(full) - 1, full.index(b"\n"), full.index(b"\n") + 1]
    cuts += [chance.randrange(len(full)) for _ in range(7)]
    for number, cut in enumerate(cuts):
        folder = tmp_path / str(number)
        record(folder, engine, save_logits=save_logits)
        content = (folder / "outputs.jsonl").read_bytes()
        (folder / "outputs.jsonl").write_bytes(content[: min(cut, len(content) - 1)])
        (folder / "metrics.json").unlink()
        assert not runs.Run(folder).complete and len(runs.Run(folder).records) < 15
        resumed = record(folder, engine, save_logits=save_logits)
        assert told(resumed) == told(whole) and resumed.complete
        if save_logits:
            for r in resumed.records:
                pair = zip(
                    resumed.logits(r.prompt_id, r.sample_index),
                    whole.logits(r.prompt_id, r.sample_index),
                    strict=True,
                )
                assert all(torch.equal(a, b) for a, b in pair)


def test_only_what_is_missing_is_done_again(engine, tmp_path):
    run = record(tmp_path / "run", engine)
    path = run.folder / "outputs.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:9]) + lines[9][:20])
    (run.folder / "metrics.json").unlink()
    counted = Counted(engine)
    record(run.folder, counted)
    assert counted.batches == [4, 3]  # rows 8 to 11 whole, though row 8 was there; then the rest
    assert path.read_bytes().splitlines(keepends=True)[:8] == lines[:8]


class Counted:
    """Passes everything on and notes the size of each batch."""

    def __init__(self, engine):
        self.engine, self.batches = engine, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, prompts, decoding, *, seed):
        self.batches.append(len(prompts))
        return self.engine.generate(prompts, decoding, seed=seed)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "`seed` was 0 and is 1"),
        ({"temperature": 0.9}, "`temperature` was 1.1 and is 0.9"),
        ({"stop_token_ids": (1,)}, r"`stop_token_ids` was .* and is \[1\]"),
    ],
)
def test_another_runs_folder_is_refused_by_name(whole, engine, change, field):
    with pytest.raises(runs.RunError, match=field):
        record(whole.folder, engine, dataclasses.replace(SAMPLED, **change), save_logits=True)


def test_other_prompts_engine_or_optimization_are_refused(whole, engine, tmp_path):
    with pytest.raises(runs.RunError, match="`batch_size` was 4 and is 2"):
        record(whole.folder, dataclasses.replace(engine, batch_size=2), save_logits=True)
    with pytest.raises(runs.RunError, match="`optimization` was 'none' and is 'static'"):
        record(whole.folder, engine, optimization="static", save_logits=True)
    with pytest.raises(runs.RunError, match="`save_logits` was True and is False"):
        record(whole.folder, engine)
    with pytest.raises(runs.RunError, match="`prompt_set_sha256` was"):
        runs.record(whole.folder, engine, {"s": (1, 2)}, SAMPLED, save_logits=True, progress=False)
    assert len(whole.records) == 15
    (tmp_path / "outputs.jsonl").write_text("{}")
    with pytest.raises(runs.RunError, match="outputs without a manifest"):
        record(tmp_path, engine)


def test_bad_prompts_leave_no_folder(engine, tmp_path):
    bad = [
        ({"a": (1, 200)}, "must be an id from 0 to 96"),
        ({"a": (1,) * 256}, "the context"),
        ([Prompt(id="a", text="hello")], r"without ids \(tokenize them first\): a"),
        ([Prompt(id="a", ids=(1,)), Prompt(id="a", ids=(2,))], "more than one is a"),
        ({}, "at least one prompt"),
    ]
    for prompts, message in bad:
        with pytest.raises(ValueError, match=message):
            runs.record(tmp_path / "none", engine, prompts, progress=False)
    assert not (tmp_path / "none").exists()


def test_damage_is_named_and_nothing_is_lost(engine, tmp_path):
    run = record(tmp_path / "run", engine, Decoding(max_new_tokens=2))
    with pytest.raises(runs.RunError, match=r"holds no manifest\.json"):
        runs.Run(tmp_path)
    manifest = run.folder / "manifest.json"
    good = manifest.read_bytes()
    for broken, message in (
        (good[:-30], "is damaged"),
        (good.replace(b'"dtype": "float32"', b'"dtype": 32'), "is damaged: dtype"),
        (good.replace(b'"dtype"', b'"dtipe"'), "is damaged: dtipe"),
        (good.replace(b'"temperature": 0.0', b'"temperature": -1'), "is damaged: decoding"),
    ):
        manifest.write_bytes(broken)
        with pytest.raises(runs.RunError, match=message):
            runs.Run(run.folder)
        with pytest.raises(runs.RunError, match=message):
            record(run.folder, engine, Decoding(max_new_tokens=2))
    table = runs.table(tmp_path)
    assert table["state"][0].startswith("damaged: decoding")
    manifest.write_bytes(good)
    outputs = run.folder / "outputs.jsonl"
    lines = outputs.read_bytes().splitlines(keepends=True)
    outputs.write_bytes(lines[0] + b'{"prompt_id": 1}\n' + b"".join(lines[2:]))
    with pytest.raises(runs.RunError, match=r"outputs\.jsonl:2 is damaged"):
        _ = runs.Run(run.folder).records


# What awkward outputs become


class Awkward:
    """An engine whose outputs are empty, not finite, constant, or full of line breaks."""

    batch_size = 2
    OUTPUTS = (
        ((), "", ()),
        ((7, 8), "a\u2028b\x85c\r\nd\ud83d\ufffd 中文", (float("nan"), float("-inf"))),
        ((5,) * 9, "!!!!!!!!!", (-0.1,) * 9),
    )

    def describe(self):
        return {"engine": "awkward", "device": {"where": "/home/someone/secret"}, "batch_size": 2}

    def resolve(self, decoding):
        return dataclasses.replace(decoding, stop_token_ids=())

    def generate(self, prompts, decoding, *, seed):
        return [
            Completion(
                prompt_ids=tuple(p), output_ids=ids, text=text, finish_reason="length", logprobs=lp
            )
            for p, (ids, text, lp) in ((p, self.OUTPUTS[p[0]]) for p in prompts)
        ]


def test_awkward_outputs_stay_strict_json(tmp_path):
    prompts = {"empty": (0,), "strange": (1,), "constant": (2,)}
    run = runs.record(tmp_path / "run", Awkward(), prompts, progress=False)
    empty, strange, constant = run.records
    assert empty.output_ids == () and empty.text == "" and empty.logprobs == ()
    assert (
        strange.logprobs == (None, None) and strange.text == "a\u2028b\x85c\r\nd\ufffd\ufffd 中文"
    )
    assert constant.output_ids == (5,) * 9
    metrics = run.metrics
    assert metrics["nonfinite_logprobs"] == 2 and metrics["empty_outputs"] == 1
    assert metrics["constant_outputs"] == ["constant"] and metrics["tokens_per_s"] is None
    text = (run.folder / "outputs.jsonl").read_bytes().decode()
    assert len(text.splitlines()) == 3 and "中文" in text
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert "/home" not in (run.folder / "manifest.json").read_text()
    with pytest.raises(ValueError, match="keeps its logits"):
        runs.record(tmp_path / "logits", Awkward(), prompts, save_logits=True, progress=False)


@given(st.text(st.characters(codec=None), max_size=30))
def test_any_text_is_one_line_of_json(text):
    line = json_line({"text": text}).decode()
    assert line.splitlines(keepends=True) == [line] and json.loads(line) == {"text": text}


def test_metrics_can_be_added(engine, tmp_path):
    run = record(tmp_path / "run", engine, Decoding(max_new_tokens=2))
    run.add_metrics(witness="saw it", exercised=7)
    assert run.metrics["witness"] == "saw it" and run.metrics["n_outputs"] == 5


# Comparing what went in


def test_hash_and_differences(whole, engine, tmp_path):
    base = whole.manifest
    assert runs.differences(base, base).empty
    later = base.model_copy(update={"created": "later", "git_commit": "other", "model_id": "copy"})
    assert runs.configuration_hash(later) == runs.configuration_hash(base)
    changes = {
        "decoding": (dataclasses.replace(base.decoding, top_p=0.9), "top_p", "sampling"),
        "prompt_set_sha256": ("x", "prompt_set_sha256", "prompts"),
        "cache": ("static", "cache", "scheduling"),
        "batch_size": (8, "batch_size", "scheduling"),
        "threads": (64, "threads", "scheduling"),
        "dtype": ("bfloat16", "dtype", "subject"),
        "weights_sha256": ("state:x", "weights_sha256", "subject"),
        "device": ({"kind": "cuda"}, "device", "subject"),
        "optimization": ("compiled", "optimization", "subject"),
    }
    for field, (value, name, kind) in changes.items():
        other = base.model_copy(update={field: value})
        (row,) = runs.differences(base, other).to_dict("records")
        assert (row["field"], row["kind"], row["effect"]) == (name, kind, "possible")
        assert runs.configuration_hash(other) != runs.configuration_hash(base)


def test_differences_say_what_cannot_matter(t0):
    engine = TransformersEngine(t0)
    prompts = [Prompt(id="s", ids=PROMPT_S)]
    a, b = (runs.facts(engine, prompts, Decoding(seed=seed)) for seed in (0, 1))
    (row,) = runs.differences(a, b).to_dict("records")
    assert row["kind"] == "seed" and row["effect"] == "none: greedy on both sides"
    a, b = (runs.facts(engine, prompts, Decoding(seed=s, temperature=1.0)) for s in (0, 1))
    (row,) = runs.differences(a, b).to_dict("records")
    assert row["kind"] == "seed" and row["effect"] == "possible"
    unknown = runs.differences(a, {"engine": "someone's"})
    assert set(unknown.loc[unknown["kind"] == "sampling", "effect"]) == {"unknown"}


def test_b28_manifests_show_what_the_checkpoint_would_have_imposed(tmp_path):
    network = build_t0()
    network.generation_config.repetition_penalty = 1.5
    run = record(tmp_path / "run", TransformersEngine(network), Decoding(max_new_tokens=2))
    shown = leaks(run.manifest.checkpoint_decoding, run.manifest.decoding)
    assert shown.to_dict("records") == [
        {"field": "repetition_penalty", "effective": 1.0, "checkpoint": 1.5}
    ]
    plain = record(tmp_path / "plain", TransformersEngine(build_t0()), Decoding(max_new_tokens=2))
    (row,) = runs.differences(plain.manifest, run.manifest).to_dict("records")
    assert row["field"] == "checkpoint_decoding" and row["effect"] == "none: never applied"


def test_b20_another_bos_is_seen_in_the_prompts_before_any_output(t0, tmp_path):
    engine = TransformersEngine(t0)
    sides = [
        runs.record(tmp_path / name, engine, {"p": ids}, Decoding(max_new_tokens=2), progress=False)
        for name, ids in (("one", (1, 5, 9)), ("two", (1, 1, 5, 9)))
    ]
    (row,) = runs.differences(*(side.manifest for side in sides)).to_dict("records")
    assert row["kind"] == "prompts"
    with pytest.raises(ValueError, match=r"prompts differ at position 1 \(extra BOS\)"):
        compare_tokens(*(side.records for side in sides))


# The table


def test_table_lists_all_runs_side_by_side(whole, engine, tmp_path):
    record(tmp_path / "greedy", engine, Decoding(max_new_tokens=2))
    record(tmp_path / "deep" / "sampled", engine, SAMPLED, optimization="a|b")
    unfinished = record(tmp_path / "unfinished", engine, Decoding(max_new_tokens=3))
    (unfinished.folder / "metrics.json").unlink()
    table = runs.table(tmp_path).set_index("run")
    assert set(table.index) == {"greedy", "deep/sampled", "unfinished"}
    assert table.loc["greedy", "sampling"] == "2 tokens, greedy"
    assert table.loc["deep/sampled", "sampling"] == "5 tokens, temperature 1.1, n_samples 3"
    assert table.loc["unfinished", "state"] == "unfinished"
    assert table.loc["greedy", "n_outputs"] == 5
    assert runs.table(tmp_path / "nothing").empty


def test_write_table_keeps_what_stands_around_it(engine, tmp_path):
    path = tmp_path / "README.md"
    path.write_bytes("# 中文\n\nbefore\n".encode())
    runs.write_table(path, tmp_path / "runs")
    assert "No runs yet." in path.read_text(encoding="utf-8")
    path.write_bytes(path.read_bytes() + b"after\r\n")
    record(tmp_path / "runs" / "first", engine, Decoding(max_new_tokens=2), optimization="a|b")
    runs.write_table(path, tmp_path / "runs")
    once = path.read_bytes()
    runs.write_table(path, tmp_path / "runs")
    assert path.read_bytes() == once
    text = once.decode()
    assert text.startswith("# 中文\n\nbefore\n") and text.endswith("after\r\n")
    assert "a\\|b" in text and text.count("runs: begin") == 1 and "No runs yet" not in text
    path.write_text("<!-- runs: end -->\n<!-- runs: begin -->")
    with pytest.raises(ValueError, match="once and then"):
        runs.write_table(path, tmp_path / "runs")


# Text files


AWKWARD = [
    "",
    "a\nb",
    "\\n",
    "c:\\new",
    "\r\n",
    "x\u2028y\x85z",
    " ",
    "",
    "\ufeff中文\t",
    "\U0001f600",
]


@given(st.text(st.characters(codec=None), max_size=30))
def test_escape_is_reversible_and_one_line(text):
    line = escape(text)
    assert unescape(line) == text and len(f"{line}|".splitlines()) == 1
    line.encode()


def imported(tmp_path, content, name="in", **options):
    path = tmp_path / f"{name}.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return runs.import_text(path, tmp_path / name, **options)


def test_export_and_import_keep_every_text(tmp_path):
    lines = "".join(escape(text) + "\n" for text in AWKWARD)
    run = imported(tmp_path, lines)
    assert [r.text for r in run.records] == AWKWARD
    assert run.manifest.text == "exact"
    assert run.metrics["empty_outputs"] == 2
    runs.export_text(run, tmp_path / "out.txt")
    again = runs.import_text(tmp_path / "out.txt", tmp_path / "again")
    assert [r.text for r in again.records] == AWKWARD
    crlf = imported(tmp_path, b"\xef\xbb\xbf" + lines.replace("\n", "\r\n").encode(), name="crlf")
    assert [r.text for r in crlf.records] == AWKWARD


def test_a_recorded_run_exports_in_order(engine, tmp_path):
    run = runs.record(
        tmp_path / "run", Awkward(), {"e": (0,), "s": (1,), "c": (2,)}, progress=False
    )
    path = runs.export_text(run, tmp_path / "before.txt")
    assert path.read_bytes().count(b"\n") == 3
    back = runs.import_text(
        path, tmp_path / "back", prompts=[Prompt(id=i, text="?") for i in "esc"]
    )
    assert [r.text for r in back.records] == [r.text for r in run.records]
    (run.folder / "metrics.json").unlink()
    with pytest.raises(runs.RunError, match="unfinished"):
        runs.export_text(run, path)


TWO = [
    Prompt(id="a", text="What is a cache?"),
    Prompt(id="b", text="什么是键值缓存？它有什么作用？"),
]


def test_counts_are_checked_and_nothing_is_filtered(tmp_path):
    run = imported(tmp_path, "one\n\n", prompts=TWO)
    assert [r.text for r in run.records] == ["one", ""] and run.manifest.n_prompts == 2
    assert [r.prompt_id for r in run.records] == ["a", "b"]
    for number, content in enumerate(("one\n", "one\ntwo\nthree\n", "", "one\ntwo\n\n")):
        with pytest.raises(ValueError, match=r"one line per output, 2; got"):
            imported(tmp_path, content, name=f"bad{number}", prompts=TWO)
        assert not (tmp_path / f"bad{number}").exists()
    with pytest.raises(ValueError, match="one or more; got 0"):
        imported(tmp_path, "", name="empty")


def test_flattened_files_are_taken_as_they_are(tmp_path):
    content = "C:\\new\\table and \\d\nline one line two\n"
    run = imported(tmp_path, content, flattened=True)
    assert run.records[0].text == "C:\\new\\table and \\d" and run.manifest.text == "flattened"
    with pytest.raises(ValueError, match=r":1: '\\\\t' is no escape; pass flattened=True"):
        imported(tmp_path, content, name="strict")
    with pytest.raises(ValueError, match=r":2: must be UTF-8"):
        imported(tmp_path, b"fine\n\xff\n", name="bytes")
    with pytest.raises(runs.RunError, match="already holds a run"):
        imported(tmp_path, content, flattened=True)


ANSWERS = ("It stores keys.", "它保存键和值。")


@pytest.mark.parametrize(
    "echo",
    [
        "{prompt}{answer}",
        "{prompt} {answer}",
        "<s> {prompt}\n{answer}",
        "user\n{prompt}\nassistant\n{answer}",
        "system\nYou are helpful\nuser\n{prompt}\nassistant\n{answer}",
        "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}",
        "<start_of_turn>user\n{prompt}<end_of_turn>\n<start_of_turn>model\n{answer}",
    ],
)
@pytest.mark.parametrize("flattened", [False, True])
def test_echoed_prompts_are_stripped(tmp_path, echo, flattened):
    made = [echo.format(prompt=p.text, answer=a) for p, a in zip(TWO, ANSWERS, strict=True)]
    lines = [" ".join(t.split()) if flattened else escape(t) for t in made]
    run = imported(tmp_path, "\n".join(lines) + "\n", prompts=TWO, flattened=flattened)
    stripped = run.metrics["echoed_prompts_stripped"]
    assert [r.text.strip() for r in run.records] == list(ANSWERS) or stripped == ["b"]
    assert "b" in stripped


def test_an_answer_that_quotes_its_prompt_is_kept(tmp_path):
    quoting = [f"You ask: {p.text} Well." for p in TWO]
    run = imported(tmp_path, "\n".join(quoting) + "\n", prompts=TWO)
    assert [r.text for r in run.records] == quoting
    short = [Prompt(id=str(i), text=t) for i, t in enumerate(("Hello", "2", "Hi"))]
    answers = ["Hello! How are you?", "4", "Hi there"]
    run = imported(tmp_path, "\n".join(answers) + "\n", name="short", prompts=short)
    assert [r.text for r in run.records] == answers
    answers[1] = "2 + 2 = 4"  # now all three begin with their prompts: they echo
    run = imported(tmp_path, "\n".join(answers) + "\n", name="all", prompts=short)
    assert [r.text for r in run.records] == ["! How are you?", " + 2 = 4", " there"]
    assert run.metrics["echoed_prompts_stripped"] == ["0", "1", "2"]


def test_a_table_of_unfinished_runs_can_be_written(engine, tmp_path):
    run = record(tmp_path / "runs" / "only", engine, Decoding(max_new_tokens=2))
    (run.folder / "metrics.json").unlink()
    text = runs.write_table(tmp_path / "T.md", tmp_path / "runs").read_text(encoding="utf-8")
    assert "unfinished" in text and "2 tokens, greedy" in text
