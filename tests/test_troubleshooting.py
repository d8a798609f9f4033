"""Notebook 10: each check fails without its remedy and holds with it; the guard against NaN."""

import math
import re
from dataclasses import dataclass, field

import pytest

from lossless_lab import Decoding, paths
from lossless_lab.engines.guard import guarded
from lossless_lab.engines.protocol import Completion
from notebooks import build

NOTEBOOK = build.read(build.SOURCES / "10_troubleshooting.py")
HEADING = re.compile(r"^## (\d) · ", re.M)


def sections():
    """Code cells of each symptom, by its number; 0 for those before the first."""
    found, number = {0: []}, 0
    for cell in NOTEBOOK.cells:
        if cell.cell_type == "markdown":
            number = max([number, *map(int, HEADING.findall(cell.source))])
            if "## Verdict" in cell.source:
                return found
        else:
            found.setdefault(number, []).append(cell)
    return found


def tagged(cells, tag):
    return [c for c in cells if tag in c.metadata.get("tags", [])]


@pytest.fixture(scope="module")
def setting():
    """The names that every section finds, on the tiny pair alone."""
    names = {}
    for cell in sections()[0]:
        exec(cell.source, names)
        if tagged([cell], "parameters"):
            names |= {"LARGER": "", "N_TOKENS": 8}
    return names


def full_at_16_tokens(network, n_rows, repeats):
    """Cost of a pass over 6 tokens a row, on a machine where 16 tokens cost no more than one."""
    return max(6 * n_rows, 16) / max(n_rows, 16)


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in (2, 5)]


@pytest.mark.parametrize("number", [1, 3, 4, 6, 7, *SLOW], ids="symptom-{}".format)
def test_the_check_fails_without_the_remedy_and_holds_with_it(
    number, setting, tmp_path, monkeypatch
):
    monkeypatch.setattr(paths, "FIGURES", tmp_path)
    names, cells = setting | {"N_TOKENS": 24}, sections()[number]
    (remedy,), (check,) = tagged(cells, "remedy"), tagged(cells, "check")
    assert cells.index(remedy) < cells.index(check)
    for cell in cells:
        if cell is remedy:
            with pytest.raises(AssertionError) as fault:
                exec(check.source, names)
            assert str(fault.value), "says what is wrong"
        exec(cell.source, names)
        if "def cost(" in cell.source:
            names["cost"] = full_at_16_tokens


def test_every_symptom_has_a_row_a_diagnosis_and_a_remedy():
    prose = "\n".join(c.source for c in NOTEBOOK.cells if c.cell_type == "markdown")
    numbers = [int(n) for n in re.findall(r"^\| \*\*(\d)\*\* ", prose, re.M)]
    assert numbers == [n for n in sections() if n] == list(range(1, 8))
    for part in HEADING.split(prose)[2::2]:
        for mark in ("**Symptom.**", "**Diagnosis", "**Remedy.**"):
            assert part.count(mark) == 1, (mark, part[:60])
    for name in re.findall(r"\]\((\w+)\.ipynb\)", prose):
        assert (build.SOURCES / f"{name}.py").exists(), name


def test_the_helper_that_shows_a_failure_cannot_pass_over_one(setting):
    def wrong():
        raise AssertionError("two of three")

    assert setting["failure"](wrong) == "FAILS: two of three"
    with pytest.raises(RuntimeError, match="nothing is wrong"):
        setting["failure"](lambda: None)


# -- the guard


@dataclass
class Fake:
    """Answers each prompt with its own first id; NaN or a crash where that id is listed."""

    nan: tuple = ()
    crash: tuple = ()
    batch_size: int = 2
    logprob: float | None = -1.0
    seen: list = field(default_factory=list)

    def generate(self, prompts, decoding, *, seed):
        self.seen.append([ids[0] for ids in prompts])
        if any(ids[0] in self.crash for ids in prompts):
            raise RuntimeError("probability tensor contains nan")
        return [self.answer(ids) for ids in prompts]

    def answer(self, ids):
        broken = (-0.5, math.nan) if ids[0] in self.nan else (-0.5, self.logprob)
        logprobs = None if self.logprob is None else broken
        return Completion(prompt_ids=tuple(ids), output_ids=(ids[0], self.batch_size), text="",
                          finish_reason="length", logprobs=logprobs)  # fmt: skip


PROMPTS = {f"p{i}": [i] for i in range(5)}
REFERENCE = {"batch_size": 1}


def by(done):
    """Which engine answered: the second output id is its batch size."""
    return {name: "reference" if c.output_ids[1] == 1 else "candidate" for name, c in done.items()}


def test_only_the_prompts_that_broke_down_are_answered_by_the_reference():
    reference = Fake(**REFERENCE)
    done, faults = guarded(Fake(nan=(1, 4)), reference, PROMPTS, Decoding())
    assert [*done] == [*PROMPTS]
    assert [n for n, who in by(done).items() if who == "reference"] == ["p1", "p4"] == [*faults]
    assert reference.seen == [[1], [4]]
    assert set(faults.values()) == {"log-probability nan at token 1"}


def test_a_crash_does_not_take_the_neighbours_with_it():
    candidate = Fake(crash=(2,), batch_size=4)
    done, faults = guarded(candidate, Fake(**REFERENCE), PROMPTS, Decoding())
    assert faults == {"p2": "RuntimeError: probability tensor contains nan"}
    assert [n for n, who in by(done).items() if who == "reference"] == ["p2"]
    assert candidate.seen == [[0, 1, 2, 3], [0], [1], [2], [3], [4]]


@pytest.mark.parametrize("broken", [math.inf, -math.inf])
def test_infinities_are_no_answers(broken):
    _, faults = guarded(Fake(logprob=broken), Fake(**REFERENCE), PROMPTS, Decoding())
    assert [*faults] == [*PROMPTS]


def test_a_sound_candidate_is_left_alone():
    reference = Fake(**REFERENCE)
    done, faults = guarded(Fake(), reference, PROMPTS, Decoding())
    assert set(by(done).values()) == {"candidate"} and not faults and not reference.seen


def test_what_the_guard_cannot_mend_is_an_error():
    with pytest.raises(ValueError, match="`reference` must answer prompt 'p1' too; got log-prob"):
        guarded(Fake(nan=(1,)), Fake(nan=(1,), **REFERENCE), PROMPTS, Decoding())
    with pytest.raises(ValueError, match="`reference` must answer prompt 'p3' too; got Runtime"):
        guarded(Fake(nan=(3,)), Fake(crash=(3,), **REFERENCE), PROMPTS, Decoding())
    with pytest.raises(ValueError, match="must report log-probabilities; got None"):
        guarded(Fake(logprob=None), Fake(**REFERENCE), PROMPTS, Decoding())
