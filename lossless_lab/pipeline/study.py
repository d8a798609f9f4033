"""One reference against any number of candidates: what is run, in which order, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from lossless_lab import runs
from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.protocol import Completion
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.numerical.noise import NoiseFloor
from lossless_lab.numerical.parts import compiled_parts
from lossless_lab.optimizations.entry import VACUOUS
from lossless_lab.pipeline import answers, triage
from lossless_lab.pipeline.asked import decoding_for, distinct, prompts_for, require_memory
from lossless_lab.pipeline.causes import cause, no_law
from lossless_lab.pipeline.controls import measured_floor, measured_risk, not_repeated
from lossless_lab.pipeline.evidence import Evidence, dtype_of, gather, sampler_of, supporting
from lossless_lab.pipeline.partings import against_own_logits
from lossless_lab.pipeline.recognition import applied, as_subject, tokenizer_of
from lossless_lab.pipeline.subjects import Live, Stored, Subject
from lossless_lab.statistical.divergences import distribution
from lossless_lab.verdict import Verdict, uniform

DIFFERENCE_COLUMNS = ["field", "reference", "candidate", "kind"]
JUDGED = ("1a", "1b", "1c", "2")


class Study:
    """One reference against several candidates; its outputs and floors are made once.

    Answers `panels.compare`'s questions for all of them where `keep_logits` is set; that takes
    prompts × tokens × vocab_size × 4 bytes per side. The other parameters are `check`'s.
    """

    def __init__(
        self,
        reference: Any,
        prompts: Any = None,
        *,
        decoding: Decoding | None = None,
        tokenizer: Any = None,
        margins: Mapping[str, float] | None = None,
        floor: NoiseFloor | None = None,
        n_variants: int = 19,
        keep_logits: bool = False,
        progress: bool = True,
    ) -> None:
        triage.refuse_options(margins or {}, n_variants=n_variants)
        self.reference = as_subject(reference, tokenizer=tokenizer)
        self.decoding = decoding_for(self.reference, decoding)
        self._listed = prompts_for(self.reference, prompts, tokenizer)
        self.asked = distinct(self._listed)
        self.verdicts: dict[str, Verdict] = {}
        self.evidence: dict[str, Evidence] = {}
        self.subjects: dict[str, Subject] = {}
        self._tokenizer = tokenizer_of(self.reference) or tokenizer
        self._margins = dict(margins or {})
        stored = isinstance(self.reference, Stored)
        self._whole = stored and prompts is None
        self._decoding = self.decoding if stored and decoding is None else decoding
        self._given_floor, self._n_variants = floor, n_variants
        self._keep, self._progress = keep_logits, progress
        self._variants: dict[str, dict[str, np.ndarray]] = {}
        self._layers: dict[tuple[str, str], pd.DataFrame] = {}

    @cached_property
    def completions(self) -> list[Completion]:
        """The reference's outputs."""
        require_memory(self.reference, self.asked, self.decoding)
        return self.reference.complete(self.asked, self.decoding)

    def add(self, candidate: Any, *, name: str = "", under_test: Sequence[str] = ()) -> Verdict:
        """Compare one more candidate and keep its verdict under its name."""
        triage.refuse_options({}, under_test)
        candidate = applied(candidate, self.reference)
        subject = as_subject(candidate, name=name, tokenizer=self._tokenizer)
        with tqdm(total=None, disable=not self._progress, desc=subject.name, leave=False) as bar:
            verdict = self._verdict(subject, tuple(under_test), bar.set_postfix_str)
        self.subjects[subject.name] = subject
        self.verdicts[subject.name] = verdict
        return verdict

    def to_frame(self) -> pd.DataFrame:
        """One row per candidate: the word of each level, and what supports it."""
        rows = []
        for name, verdict in self.verdicts.items():
            words = {a.level: a.word for a in verdict.answers}
            rows.append(
                {"candidate": name, **words, **verdict.supporting, "witness": verdict.witness}
            )
        return pd.DataFrame(rows)

    # What `panels.compare` asks for.

    def pairs(self) -> list[tuple[str, str]]:
        """(reference, candidate) pairs whose logits were kept."""
        return [(self.reference.name, name) for name, e in self.evidence.items() if e.logits]

    def prompts(self, pair: tuple[str, str]) -> list[str]:
        """Ids of the prompts that both sides answered."""
        return [name for name, sample in self.evidence[pair[1]].logits if sample == 0]

    def frames(self, pair: tuple[str, str], prompt_id: str) -> dict[str, pd.DataFrame]:
        """Divergences by position and, where both sides have layers, their drift."""
        positions = self.evidence[pair[1]].positions
        here = (positions["prompt_id"] == prompt_id) & (positions["sample_index"] == 0)
        frames = {"divergences": positions[here].reset_index(drop=True)}
        layers = self.layers(pair, prompt_id)
        return frames if layers is None else frames | {"layers": layers}

    def layers(self, pair: tuple[str, str], prompt_id: str) -> pd.DataFrame | None:
        """Drift of the residual stream over prompt and output; None where it cannot be seen, or
        where both sides are one network (an entry that changes only the engine)."""
        networks = [self.reference.network, self.subjects[pair[1]].network]
        if None in networks or networks[0] is networks[1] or self.subjects[pair[1]].compiled:
            return None
        key = (pair[1], prompt_id)
        if key not in self._layers:
            completion = self._completion(prompt_id)
            ids = torch.tensor([completion.prompt_ids + completion.output_ids[:-1]])
            kept = getattr(networks[1], "layer_map", None)  # blocks that were dropped
            self._layers[key] = compare_layers(*networks, ids, layer_map=kept).to_frame()
        return self._layers[key]

    def distribution(
        self, pair: tuple[str, str], prompt_id: str, position: int, *, k: int | None = 20
    ) -> pd.DataFrame:
        """Both laws at one position of one prompt."""
        reference, candidate = self.evidence[pair[1]].logits[prompt_id, 0]
        decode = getattr(self._tokenizer, "decode", None)
        return distribution(reference[position], candidate[position], tokenizer_decode=decode, k=k)

    def verdict(self, pair: tuple[str, str]) -> str:
        """The verdict in one sentence."""
        return self.verdicts[pair[1]].sentence

    def _completion(self, prompt_id: str) -> Completion:
        index = [p.id for p in self.asked].index(prompt_id)
        return self.completions[index * self.decoding.n_samples]

    def _verdict(
        self, candidate: Subject, under_test: tuple[str, ...], progress: Callable[[str], Any]
    ) -> Verdict:
        entries = (self.reference.optimization, candidate.optimization)
        allowed = (*under_test, *(name for entry in entries if entry for name in entry.changes))
        decoding = decoding_for(candidate, self._decoding, like=self.decoding)
        rows = runs.differences(
            self.reference.facts(self.decoding, self._listed),
            candidate.facts(decoding, self._listed),
        )
        common = {"reference": self.reference.name, "candidate": candidate.name}
        common["differences"] = tuple(map(tuple, rows[DIFFERENCE_COLUMNS].astype(str).to_numpy()))
        problem = "" if candidate.intact else "applying the entry changed the reference itself"
        problem = problem or triage.vocabularies_differ(rows)
        if not problem and (problem := triage.not_comparable(rows, allowed)):
            problem += self._anyway(candidate, decoding)
        if problem:
            return uniform("INVALID", problem, **common)
        if same := triage.one_and_the_same(self.reference, candidate, rows):
            return uniform("VACUOUS", same, witness="none", **common)
        before = triage.state(self.reference)
        if candidate.network is not None and compiled_parts(candidate.network):
            torch._dynamo.reset()  # else torch may run eager code, past its limit of versions
        progress("witness")
        witness = triage.witness(candidate, self.asked, decoding)
        if witness == "" or witness.startswith(VACUOUS):
            why = witness.removeprefix(VACUOUS) or f"{candidate.name} left no trace of having run"
            return uniform("VACUOUS", why, witness="none", **common)
        progress("outputs")
        evidence = self._gather(candidate, decoding)
        told = [getattr(side, "manifest", side) for side in (self.reference, candidate)]
        if told[0] == told[1] and evidence.one_recording:
            return uniform("VACUOUS", "both sides are one and the same recording", **common)
        lawless = no_law(evidence, "reference")
        floor, positions = None, evidence.positions
        if not lawless and len(positions) and not positions["bitwise_equal"].all():
            floor = self._floor(allowed, progress)
        if triage.state(self.reference) != before:
            why = "the reference's weights or logits changed while the candidate ran"
            return uniform("INVALID", why, witness=witness, **common)
        self.evidence[candidate.name] = evidence if self._keep else evidence.without_logits()
        found = self._concluded(candidate, evidence, floor, progress)
        if lawless:
            found["answers"] = answers.demoted(found["answers"], "INVALID", ("1c", "2"))
        return Verdict(witness=witness, **found, **common)

    @property
    def _why_no_floor(self) -> str:
        if isinstance(getattr(self.reference, "engine", None), TransformersEngine):
            return "no noise floor was given, and no harmless variant was run"
        kind = "stored" if isinstance(self.reference, Stored) else "a function"
        return f"no noise floor was given, and the reference is {kind}, so none can be measured"

    def _floor(self, allowed: tuple[str, ...], progress: Callable[[str], Any]) -> NoiseFloor | None:
        if self._given_floor is not None or not isinstance(self.reference, Live):
            return self._given_floor
        return measured_floor(
            self.reference,
            self.completions,
            under_test=allowed,
            n_variants=self._n_variants,
            measured=self._variants,
            progress=progress,
        )

    def _gather(self, candidate: Subject, decoding: Decoding) -> Evidence:
        if self._whole and isinstance(candidate, Stored):
            self.reference.refuse_without([*candidate.completions])
        return gather(
            self.reference,
            candidate,
            self.asked,
            self.completions,
            decodings=(self.decoding, decoding),
        )

    def _anyway(self, candidate: Subject, decoding: Decoding) -> str:
        """How stored outputs compare all the same, which costs nothing to say."""
        if not (isinstance(self.reference, Stored) and isinstance(candidate, Stored)):
            return ""
        try:
            return f" (outputs compared all the same: {self._gather(candidate, decoding).tokens})"
        except ValueError as error:
            return f" ({error})"

    @cached_property
    def _unsteady(self) -> str:
        """Whether the reference, asked again, answers otherwise; asked once for all candidates."""
        return not_repeated(self.reference, self.completions, self.asked, self.decoding)

    def _differs_again(self, candidate: Subject, evidence: Evidence) -> str:
        stops, first = evidence.tokens.candidate_stop_ids, evidence.tokens.frame["ids_equal"]
        decoding = replace(evidence.decoding, stop_token_ids=stops)
        asked = candidate, evidence.candidate, evidence.prompts, decoding
        return not_repeated(*asked, first=int(first.argmin()))

    def _concluded(
        self, candidate: Subject, evidence: Evidence, floor: NoiseFloor | None, progress: Callable
    ) -> dict[str, Any]:
        """Answers, cause, supporting figures and frames of a verdict."""
        dtypes = [dtype_of(s, self.decoding, self.asked) for s in (self.reference, candidate)]
        margins = answers.default_margins(tuple(dtypes)) | self._margins
        positions, sampled = evidence.positions, sampler_of(evidence)
        given = answers.answered(
            evidence, sampled, margins=margins, floor=floor, no_floor=self._why_no_floor
        )
        if len(positions) == 0:
            sampled = None
        sides = (self.reference, candidate)
        risk = None
        if sampled is None:
            risk = measured_risk(self.asked, self.completions, floor, self._variants)
        why, partings = cause(
            *sides, evidence, given, floor=floor, risk=risk, sampled=sampled, progress=progress
        )
        if against_own_logits(evidence):
            given = answers.demoted(given, "DIFFERENT", ("2",))
        if unstable := self._unsteady or self._differs_again(candidate, evidence):
            shown = tuple(a.level for a in given if a.exit_code == 0)
            given = answers.demoted(given, "INCONCLUSIVE", shown)
            why = f"{unstable}; {why}" if why else unstable
        entry = candidate.optimization
        if entry and entry.rule and self.decoding.greedy:
            given = answers.without_rule(given, entry.rule)
        figures = supporting(evidence)
        if counted := triage.exercised(candidate, evidence.candidate):
            figures["exercised"] = f"{counted[0]} of {counted[1]} positions"
            if counted[0] == 0:
                # a law that differs all the same is no matter of what was exercised
                seen = [a.level for a in given if (a.level, a.word) == ("2", "DIFFERENT")]
                idle = tuple(level for level in JUDGED if level not in seen)
                given = answers.demoted(given, "NOT EXERCISED", idle)
                told = triage.idle(candidate, evidence.candidate)
                why = f"{why}; {told}" if seen and why else told
        frames = {"tokens": evidence.tokens.frame, "positions": positions}
        if floor is not None:
            frames["noise_floor"] = floor.to_frame()
        if risk is not None:
            parted = evidence.tokens.frame.set_index("prompt_id")["first_divergence"].dropna()
            frames |= {"first_divergences": partings, "survival": risk.survival(parted=parted)}
        return {"answers": given, "cause": why, "supporting": figures, "evidence": frames}
