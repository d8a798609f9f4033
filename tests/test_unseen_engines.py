"""Faults of engines, caches, servers and records that look like losses, each beside its control."""

import copy
import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, T0_GREEDY_S, build_g0, build_t0
from transformers import DynamicCache, StaticCache

from lossless_lab import check, runs
from lossless_lab.cli import main
from lossless_lab.engines import Completion, Decoding, TransformersEngine
from lossless_lab.engines.callable_engine import CallableEngine
from lossless_lab.engines.padding import pad, padding_fault, positions
from lossless_lab.mutants import MUTANTS
from lossless_lab.optimizations.entry import silence_one_mlp
from lossless_lab.pipeline.top_k import compare_top_k
from lossless_lab.prompts import Prompt

ROWS = [PROMPT_S, PROMPT_L]
D12 = Decoding(max_new_tokens=12)


class Loop:
    """A decoding loop of one's own: `rule` chooses from logits, `after` edits what is told."""

    batch_size = 1

    def __init__(self, network, rule=None, after=None, stop=(), ignores_stop=False, told=True):
        self.network_of, self.rule, self.after = network, rule or (lambda x, p, o: x), after
        self.stop, self.ignores_stop, self.told = stop, ignores_stop, told

    def describe(self):
        return {"engine": "loop", "model_id": "t0"}

    def resolve(self, decoding):
        given = decoding.stop_token_ids
        return dataclasses.replace(decoding, stop_token_ids=self.stop if given is None else given)

    def law(self, row):
        with torch.no_grad():
            return self.network_of(torch.tensor([row])).logits[0]

    def generate(self, prompts, decoding, *, seed):
        stop = () if self.ignores_stop else self.resolve(decoding).stop_token_ids
        return [self.complete(list(p), decoding.max_new_tokens, stop) for p in prompts]

    def complete(self, prompt, n, stop):
        out, laws = [], []
        while len(out) < n and not (out and out[-1] in stop):
            laws.append(self.law(prompt + out)[-1])
            out.append(int(self.rule(laws[-1].clone(), prompt, out).argmax()))
        reason = "stop" if out[-1] in stop else "length"
        out = self.after(prompt, out) if self.after else out
        return Completion(
            prompt_ids=tuple(prompt),
            output_ids=tuple(out),
            text="",
            finish_reason=reason,
            logits=torch.stack(laws) if self.told else None,
        )

    def score(self, prompts, outputs):
        pairs = zip(prompts, outputs, strict=True)
        return [self.law([*p, *o[:-1]])[len(p) - 1 :] for p, o in pairs]


def ask(reference, candidate, prompts=ROWS, **options):
    options = {"decoding": D12, "progress": False, "n_variants": 0} | options
    return check(reference, candidate, prompts, **options)


def words(verdict):
    return {a.level: a.word for a in verdict.answers}


def penalised(scope):
    """Repetition penalty of 1.5 over output alone, or over prompt and output."""

    def rule(x, prompt, out):
        for i in {*out, *(prompt if scope == "all" else ())}:
            x[i] = x[i] / 1.5 if x[i] > 0 else x[i] * 1.5
        return x

    return rule


def held_back(x, prompt, out):
    x[77] = -torch.inf
    return x


# Batching, padding, end ids


@pytest.mark.parametrize("make", [build_t0, build_g0])
def test_a_mask_inferred_from_pad_ids_is_named(make):
    """Pad = EOS, or a pad id that the text holds: real tokens vanish from attention."""
    network, rows = make(), [(1, 5, 0, 9, 13), (1, 7, 8, 11, 15, 20, 33)]

    def path(rows, infer):
        ids, mask = pad(rows, 0)
        mask = (ids != 0).long() if infer else mask
        return network(ids, attention_mask=mask, position_ids=positions(mask)).logits[:, -1]

    found = padding_fault(lambda r: path(r, True), network, rows)
    assert found.fault == "pad ids of the text masked" and found.row == 0
    assert found.unexplained_difference < 1e-4 < 1 < found.max_abs_difference
    assert padding_fault(lambda r: path(r, False), network, rows).fault == "rounding only"
    left = padding_fault(lambda r: path(r, True), network, [r[:2] for r in rows[:1]] + rows[1:])
    assert left.fault in ("rounding only", "none")  # no pad id in the text: nothing is masked


@pytest.mark.parametrize("make", [build_t0, build_g0])
def test_the_engine_keeps_pad_and_end_ids_of_the_prompt(make):
    """Against the plain loop, which pads and masks nothing."""
    network = make(pad_token_id=77, eos_token_id=77)
    rows = [(1, 5, 77, 9, 13), (1, 7, 8, 77, 77, 20, 33, 77)]
    own = TransformersEngine(network, batch_size=2).generate(
        rows, Decoding(max_new_tokens=8, stop_token_ids=()), seed=0
    )
    plain = Loop(network).generate(rows, Decoding(max_new_tokens=8), seed=0)
    assert [c.output_ids for c in own] == [c.output_ids for c in plain]


@pytest.mark.parametrize("declared", [-1, 97, 200])
def test_a_pad_id_outside_the_vocabulary_is_passed_over(declared):
    """LLaMA's -1, and a [PAD] added to the tokenizer without a row in the embeddings."""
    network = build_t0(pad_token_id=None)
    network.generation_config.pad_token_id = declared
    tokenizer = SimpleNamespace(eos_token_id=None, pad_token_id=declared, decode=lambda *a, **k: "")
    engine = TransformersEngine(network, tokenizer=tokenizer, batch_size=2)
    assert engine.pad_id == 0
    done = engine.generate(ROWS, D12, seed=0)
    assert done[0].output_ids == T0_GREEDY_S[:12]
    with pytest.raises(IndexError):  # what the declared id does
        network.get_input_embeddings()(torch.tensor([declared]))


ENDS = [  # what the candidate does, and what is said of it
    ({"after": lambda p, o: o + [0] * (12 - len(o))}, "goes on after the end id 77 (one id alone"),
    ({"ignores_stop": True}, "the candidate goes on after the end id 77"),
    ({"after": lambda p, o: o[:-1]}, "candidate leaves out the end id 77 that the reference keeps"),
    ({"rule": held_back}, "the candidate writes on where the reference ends"),
    ({"after": lambda p, o: p + o}, "the candidate's outputs begin with their prompts"),
    ({"after": lambda p, o: o[:2]}, "the candidate stops earlier, without an end id"),
]


@pytest.mark.parametrize(("change", "said"), ENDS, ids=[said[-25:] for _, said in ENDS])
def test_how_ends_and_echoes_part_is_said(t0, change, said):
    """Row S ends at its fourth token, 77, in T0's known ids."""
    assert T0_GREEDY_S[3] == 77
    plain = {"stop": (77,), "told": False}
    sides = [Loop(t0, **plain), Loop(t0, **plain | change)]
    for side in sides:
        side.score = lambda prompts, outputs: [None for _ in outputs]
    found = ask(*sides, [PROMPT_S])
    assert words(found)["1b"] == "DIFFERENT" and said in found.cause
    turned = (
        said.replace("candidate", "?").replace("reference", "candidate").replace("?", "reference")
    )
    assert turned in ask(*sides[::-1], [PROMPT_S]).cause
    assert ask(sides[0], Loop(t0, **plain), [PROMPT_S]).cause == ""


def test_stop_sets_are_named_only_where_they_differ(t0):
    options = {"prompts": [PROMPT_S], "under_test": ("stop_token_ids",)}
    found = ask(Loop(t0, stop=(77, 96)), Loop(t0, stop=(96,)), **options)
    assert "[77, 96] (reference) and [96] (candidate)" in found.cause
    assert "stop sets" not in ask(Loop(t0, stop=(77,)), Loop(t0, stop=(77,)), **options).cause


# What chooses from the logits


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("rule", [penalised("output"), held_back], ids=["penalty", "end held back"])
def test_what_acts_between_logits_and_choice_is_no_proof_of_the_law(t0, rule, told):
    """Logits are bitwise the same: the rule makes the difference, and level 2 must not pass."""
    found = ask(Loop(t0, stop=(77,)), Loop(t0, rule, stop=(77,), told=told))
    assert words(found)["2"] == words(found)["1b"] == "DIFFERENT"
    assert "the candidate does not choose the likeliest token of its own logits" in found.cause
    same = words(ask(Loop(t0, stop=(77,)), Loop(t0, stop=(77,))))
    assert same["1b"] == same["2"] == "PROVEN"


def test_a_rule_of_both_sides_is_no_difference(t0):
    """Outputs part because one network is damaged; the rule, that both have, is not blamed."""
    broken = MUTANTS["damaged-weights"].apply(t0, dose=0.05)
    found = ask(Loop(t0, penalised("output")), Loop(broken, penalised("output")))
    assert words(found)["1b"] == "DIFFERENT" and "does not choose" not in found.cause
    found = ask(Loop(t0), Loop(broken, penalised("output")))
    assert "the candidate does not choose" in found.cause


def test_a_penalty_that_was_asked_for_is_no_fault(t0):
    decoding = dataclasses.replace(D12, repetition_penalty=1.5)
    own = TransformersEngine(t0)
    assert words(ask(own, Loop(t0, penalised("all")), decoding=decoding))["1b"] != "DIFFERENT"
    found = ask(own, Loop(t0, penalised("output")), decoding=decoding)
    assert "the candidate does not choose" in found.cause


def test_other_random_numbers_are_no_fault_of_the_law(t0):
    sampled = dataclasses.replace(D12, temperature=1.0, seed=3)
    found = ask(t0, "batch-2", decoding=sampled, n_variants=19)
    assert words(found)["1b"] == "DIFFERENT" and words(found)["1c"] == "EQUIVALENT"
    assert found.cause.startswith("sampled ids part by other random numbers")
    broken = ask(t0, silence_one_mlp(copy.deepcopy(t0)), decoding=sampled, n_variants=1)
    assert "other random numbers" not in broken.cause


# Caches, buffers, servers


class Reused:
    """A cache object that every call gets again, with what the last one left in it."""

    name = "reused"

    def __init__(self, make, fresh):
        self.make, self.fresh, self.held = make, fresh, None

    def build(self, config):
        if self.held is None or self.fresh:
            self.held = self.make(config)
        return self.held


@pytest.mark.parametrize(
    "make",
    [lambda c: DynamicCache(config=c), lambda c: StaticCache(config=c, max_cache_len=32)],
    ids=["dynamic", "static"],
)
def test_a_cache_that_is_not_empty_is_refused(t0, make):
    engine = TransformersEngine(t0, cache=Reused(make, fresh=True))
    ids = [engine.generate([PROMPT_S], D12, seed=0)[0].output_ids for _ in range(2)]
    assert ids == [T0_GREEDY_S[:12]] * 2
    stale = TransformersEngine(t0, cache=Reused(make, fresh=False))
    stale.generate([PROMPT_S], D12, seed=0)
    with pytest.raises(ValueError, match="`build` must give an empty cache, got one of 15 tokens"):
        stale.generate([PROMPT_S], D12, seed=0)


def test_an_output_buffer_that_is_used_again_keeps_what_was_read(t0):
    """As CUDA graphs do: each call overwrites the tensor that the last one returned."""
    buffer = torch.zeros(1, 32, 97)

    def replayed(ids):
        buffer[:, : ids.shape[1]] = t0(ids).logits
        return buffer[:, : ids.shape[1]]

    engine = CallableEngine(function=replayed)
    (done,) = engine.generate([PROMPT_S], D12, seed=0)
    (plain,) = Loop(t0).generate([PROMPT_S], D12, seed=0)
    assert torch.equal(done.logits, plain.logits)
    scored = engine.score(ROWS, [(5, 6, 7), (8, 9)])
    for own, other in zip(scored, Loop(t0).score(ROWS, [(5, 6, 7), (8, 9)]), strict=True):
        assert torch.equal(own, other)


def test_a_function_may_return_what_a_network_returns_without_names(t0):
    found = ask(lambda ids: t0(ids).logits, lambda ids: t0(ids, return_dict=False))
    assert found["1b"].word == found["2"].word == "PROVEN"


def test_an_engine_that_cannot_score_is_told_so(t0):
    class Blind:
        batch_size, generate = 1, None

    with pytest.raises(ValueError, match=r"an engine \(with generate and score\).*got Blind"):
        ask(t0, Blind())


class Warm(Loop):
    """A server whose second answer to a prompt comes from its prefix cache and flips a tie."""

    def __init__(self, network, flips):
        super().__init__(network, self.flipped)
        self.flips, self.seen, self.warm = flips, set(), False

    def flipped(self, x, prompt, out):
        if self.warm and self.flips and len(out) == 5:
            x[x.argmax()] = -torch.inf
        return x

    def complete(self, prompt, n, stop):
        self.warm = tuple(prompt) in self.seen
        self.seen.add(tuple(prompt))
        return super().complete(prompt, n, stop)


@pytest.mark.parametrize("turn", [1, -1])
def test_an_answer_that_changes_when_asked_again_is_never_equivalent(t0, turn):
    found = ask(*[Loop(t0), Warm(t0, True)][::turn], margins={"1b": 0.9})
    assert {words(found)[level] for level in ("1a", "1b", "1c", "2")} == {"INCONCLUSIVE"}
    assert "Warm does not repeat itself: prompt 'prompt-0' asked again differs" in found.cause
    assert "from token 5 on" in found.cause
    steady = ask(*[Loop(t0), Warm(t0, False)][::turn])
    assert steady["1b"].word == "PROVEN" and steady.cause == ""


def test_answers_that_are_lost_are_counted(t0):
    class Lossy(Loop):
        def generate(self, prompts, decoding, *, seed):
            return super().generate(prompts, decoding, seed=seed)[1:]

    class Short(Loop):
        def score(self, prompts, outputs):
            return [x[:-1] for x in super().score(prompts, outputs)]

    with pytest.raises(ValueError, match="Lossy must give 2 completions, got 0"):
        ask(Loop(t0), Lossy(t0))
    with pytest.raises(ValueError, match="Short must score 12 ids, got 11 rows"):
        ask(Loop(t0), Short(t0, penalised("output")))


def test_a_model_in_training_mode_is_refused():
    """Dropout makes its own noise; the reference's would even look like a floor."""
    trained = build_g0().train()
    for sides in ((trained, build_g0()), (build_g0(), trained)):
        with pytest.raises(ValueError, match=r"`model` must be in evaluation mode.*`eval\(\)`"):
            ask(*sides)
    assert words(ask(trained.eval(), build_g0()))["1b"] == "PROVEN"


@pytest.mark.parametrize("bad", [77, 7.5, True])
def test_stop_ids_that_are_no_list_are_named(bad):
    with pytest.raises(ValueError, match=rf"`stop_token_ids` must be a list of ids, got {bad}"):
        Decoding(stop_token_ids=bad)


# Records


def recorded(folder, network, prompts=None, **options):
    prompts = prompts or {"a": PROMPT_S, "b": PROMPT_L}
    prompts = [Prompt(id=name, ids=tuple(ids)) for name, ids in prompts.items()]
    runs.record(folder, TransformersEngine(network, **options), prompts, D12, progress=False)
    return folder


def edited(source, target, change):
    shutil.copytree(source, target)
    lines = [json.loads(x) for x in (target / "outputs.jsonl").read_text().splitlines()]
    for line in lines:
        change(line)
    (target / "outputs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return target


def test_one_recording_against_itself_shows_nothing(t0, tmp_path, capsys):
    first, again = (recorded(tmp_path / name, t0) for name in ("first", "again"))
    copied = shutil.copytree(first, tmp_path / "copied")
    for other in (first, copied):
        assert main(["compare", str(first), str(other)]) == 2
        assert "one and the same recording" in capsys.readouterr().out
    assert check(first, again, progress=False)["1b"].word == "INCONCLUSIVE"  # two prompts only
    changed = edited(first, tmp_path / "changed", lambda x: x["output_ids"].__setitem__(3, 5))
    assert check(first, changed, progress=False)["1b"].word == "DIFFERENT"


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ({"a": (1, *PROMPT_S), "b": PROMPT_L}, "'a': prompts differ at position 1 (extra BOS)"),
        ({"a": PROMPT_S, "b": PROMPT_L[3:]}, "'b': prompts differ at position 0 (9 and 6 tokens)"),
        ({"a": PROMPT_S, "b": PROMPT_L[:6]}, "'b': prompts differ at position 6 (9 and 6 tokens)"),
    ],
)
def test_runs_of_other_prompts_say_where_these_part(t0, tmp_path, prompts, said):
    """A second BOS, and prompts that a server cut at the front or at the end."""
    first, other = recorded(tmp_path / "first", t0), recorded(tmp_path / "other", t0, prompts)
    found = check(first, other, progress=False)
    assert set(words(found).values()) == {"INVALID"} and said in found.cause


def test_the_same_text_in_other_tokens_is_said(t0, tmp_path):
    first = recorded(tmp_path / "first", t0)
    told = edited(first, tmp_path / "told", lambda x: x.update(text="the same"))
    split = edited(told, tmp_path / "split", lambda x: x["output_ids"].__setitem__(0, 3))
    assert "the same text in other tokens" in check(told, split, progress=False).cause
    other = edited(split, tmp_path / "other", lambda x: x.update(text="another"))
    assert "the same text" not in check(told, other, progress=False).cause


def test_lists_of_logprobs_belong_to_their_tokens(t0, tmp_path):
    first = recorded(tmp_path / "first", t0, top_logprobs=5)
    assert (compare_top_k(first, first)["kl_at_least_nats"] < 1e-6).all()
    for name, lists in (("short", lambda x: x[:-2]), ("null", lambda x: None)):
        bad = edited(
            first,
            tmp_path / name,
            lambda x, f=lists: x.update(top_logprobs=f(x["top_logprobs"])),
        )
        with pytest.raises(ValueError, match=r"prompt 'a', sample 0 must be .* one list per token"):
            compare_top_k(first, bad)


TEXTS = ["the cat sits here", "a bird sings", "it rains a lot"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: f"What is it? {x}", "the candidate's texts begin with more"),
        (lambda x: f"{x}</s>", "the candidate's texts go on where the reference's end"),
        (lambda x: x[:-2], "the reference's texts go on where the candidate's end"),
        (lambda x: x.replace("é", "e\u0301"), "texts differ in their Unicode normal form alone"),
        (lambda x: x.replace(" ", "  "), "outputs differ in white space only"),
        (lambda x: x.upper(), "texts differ, so ids do"),
    ],
)
def test_what_text_files_have_in_common_is_said(tmp_path, change, said):
    texts = [f"{text}, olé!" for text in TEXTS]
    for name, lines in (("before", texts), ("after", map(change, texts))):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    found = check(tmp_path / "before.txt", tmp_path / "after.txt", progress=False)
    assert words(found)["1b"] == "DIFFERENT" and found.cause.startswith(said)
