"""The guard against NaN: who answers which prompt, with which seed; what is recorded or refused."""

import math
from dataclasses import dataclass, field

import pandas as pd
import pytest
import torch

from lossless_lab import Decoding, models
from lossless_lab.engines import TransformersEngine
from lossless_lab.engines.guard import guarded
from lossless_lab.engines.protocol import Completion


@dataclass
class Fake:
    """Answers each prompt with its first id; NaN or `error` where that id is listed."""

    nan: tuple = ()
    crash: tuple = ()
    batch_size: int = 2
    logprob: float | None = -1.0
    error: Exception = field(default_factory=lambda: RuntimeError("contains nan"))
    facts: dict = field(default_factory=dict)
    seen: list = field(default_factory=list)

    def describe(self):
        return self.facts

    def generate(self, prompts, decoding, *, seed):
        self.seen.append(([ids[0] for ids in prompts], seed))
        if any(ids[0] in self.crash for ids in prompts):
            raise self.error
        return [self.answer(ids) for ids in prompts]

    def answer(self, ids):
        broken = (-0.5, math.nan) if ids[0] in self.nan else (-0.5, self.logprob)
        logprobs = None if self.logprob is None else broken
        return Completion(prompt_ids=tuple(ids), output_ids=(ids[0], self.batch_size), text="",
                          finish_reason="length", logprobs=logprobs)  # fmt: skip


PROMPTS = {f"p{i}": [i] for i in range(5)}


def reference(**options):
    return Fake(batch_size=1, **options)


def by_reference(done):
    """Prompts that the reference answered: the second output id is an engine's batch size."""
    return [name for name, c in done.items() if c.output_ids[1] == 1]


def test_only_the_prompts_that_broke_down_are_answered_by_the_reference():
    other = reference()
    done, faults = guarded(Fake(nan=(1, 4)), other, PROMPTS, Decoding())
    assert [*done] == [*PROMPTS]
    assert by_reference(done) == ["p1", "p4"] == [*faults]
    assert [ids for ids, _ in other.seen] == [[1], [4]]
    assert set(faults.values()) == {"log-probability nan at token 1"}


def test_a_crash_does_not_take_the_neighbours_with_it_and_is_recorded_for_all():
    candidate = Fake(crash=(2,), batch_size=4)
    done, faults = guarded(candidate, reference(), PROMPTS, Decoding())
    crash = "in its batch RuntimeError: contains nan; alone "
    assert faults == {f"p{i}": crash + "nothing" for i in (0, 1, 3)} | {
        "p2": crash + "RuntimeError: contains nan"
    } and [*done] == [*PROMPTS]
    assert by_reference(done) == ["p2"]
    assert [ids for ids, _ in candidate.seen] == [[0, 1, 2, 3], [0], [1], [2], [3], [4]]


def test_what_a_row_does_alone_after_a_crash_is_judged_again():
    done, faults = guarded(
        Fake(crash=(2,), nan=(3,), batch_size=4), reference(), PROMPTS, Decoding()
    )
    assert by_reference(done) == ["p2", "p3"]
    assert faults["p3"].endswith("contains nan; alone log-probability nan at token 1")


def test_each_row_run_again_has_a_seed_of_its_own():
    """With one seed for all, equal prompts would draw equal answers."""
    candidate, other = Fake(crash=(2,), batch_size=4), reference()
    guarded(candidate, other, PROMPTS, Decoding(temperature=1.0))
    assert len({seed for _, seed in candidate.seen}) == len(candidate.seen) == 6
    other = reference()
    guarded(Fake(nan=(0, 1, 2, 3), batch_size=4), other, PROMPTS, Decoding(temperature=1.0))
    assert len({seed for _, seed in other.seen}) == 4


def test_equal_prompts_draw_different_answers_after_a_crash():
    model = models.load("tiny-target")

    class Crashing(TransformersEngine):
        def generate(self, prompts, decoding, *, seed):
            if len(prompts) > 1:
                raise RuntimeError("probability tensor contains nan")
            return TransformersEngine.generate(self, prompts, decoding, seed=seed)

    asked = {name: [5, 6, 7] for name in "abcd"}
    decoding = Decoding(temperature=1.0, max_new_tokens=8)
    done, faults = guarded(
        Crashing(model, batch_size=4), TransformersEngine(model), asked, decoding
    )
    assert len({c.output_ids for c in done.values()}) == 4 == len(faults)


@pytest.mark.parametrize("broken", [math.inf, -math.inf])
def test_infinities_are_no_answers(broken):
    _, faults = guarded(Fake(logprob=broken), reference(), PROMPTS, Decoding())
    assert [*faults] == [*PROMPTS]


def test_a_sound_candidate_is_left_alone():
    other = reference()
    done, faults = guarded(Fake(), other, PROMPTS, Decoding())
    assert not by_reference(done) and not faults and not other.seen


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("16 GiB"), FloatingPointError("invalid value")]
)
def test_other_breakdowns_are_recorded_under_their_own_name(error):
    _, faults = guarded(Fake(crash=(4,), error=error), reference(), PROMPTS, Decoding())
    assert faults == {"p4": f"{type(error).__name__}: {error}"}


@pytest.mark.parametrize("error", [NotImplementedError("x"), RecursionError("x"), TypeError("x")])
def test_errors_of_the_program_pass_through(error):
    with pytest.raises(type(error)):
        guarded(Fake(crash=(4,), error=error), reference(), PROMPTS, Decoding())


def test_what_the_guard_cannot_mend_is_an_error():
    with pytest.raises(ValueError, match="`reference` must answer prompt 'p1' too; got log-prob"):
        guarded(Fake(nan=(1,)), reference(nan=(1,)), PROMPTS, Decoding())
    with pytest.raises(ValueError, match="`reference` must answer prompt 'p3' too; got Runtime"):
        guarded(Fake(nan=(3,)), reference(crash=(3,)), PROMPTS, Decoding())
    for pair in ((Fake(logprob=None), reference()), (Fake(nan=(0,)), reference(logprob=None))):
        with pytest.raises(ValueError, match="must report log-probabilities; got None"):
            guarded(*pair, PROMPTS, Decoding())


@pytest.mark.parametrize(
    ("prompts", "kind"),
    [([[1], [2]], "list"), (pd.Series([[1], [2]], index=["a", "a"]), "Series"), (None, "NoneType")],
)
def test_prompts_without_names_are_refused(prompts, kind):
    with pytest.raises(ValueError, match=f"`prompts` must map prompt ids to ids; got a {kind}"):
        guarded(Fake(), reference(), prompts, Decoding())


def test_more_than_one_sample_is_refused():
    with pytest.raises(ValueError, match=r"`decoding\.n_samples` must be 1; got 2"):
        guarded(Fake(), reference(), PROMPTS, Decoding(n_samples=2, temperature=1.0))


@pytest.mark.parametrize("key", ["vocab_size", "tokenizer_sha256"])
def test_two_vocabularies_are_refused_and_an_unknown_one_is_not(key):
    with pytest.raises(ValueError, match=f"must have the candidate's {key}; got \\['8', '9'\\]"):
        guarded(Fake(facts={key: "8"}), reference(facts={key: "9"}), PROMPTS, Decoding())
    for theirs in ({key: "8"}, {key: "none"}, {}):
        guarded(Fake(facts={key: "8"}), reference(facts=theirs), PROMPTS, Decoding())


def test_a_prompt_that_cannot_be_run_is_named_by_its_id():
    engine = TransformersEngine(models.load("tiny-target"), batch_size=2)
    with pytest.raises(ValueError, match=r"`prompts\['c'\]\[1\]` must be an id from 0 to"):
        guarded(engine, engine, {"a": [1], "b": [2], "c": [3, 10**6]}, Decoding(max_new_tokens=2))
