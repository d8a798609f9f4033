"""The bundled documents, their validator, and two models that read them in lockstep."""

import copy
import json
import re
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import torch
from conftest import build_t0
from rapidfuzz import fuzz
from torch.utils._python_dispatch import TorchDispatchMode

from lossless_lab import paths, prompts
from lossless_lab.pipeline import corpus
from lossless_lab.pipeline.corpus import compare_on
from lossless_lab.pipeline.sampling import next_tokens_law
from lossless_lab.prompts import Document, PromptFileError
from lossless_lab.statistical.sequences import sequence_distance
from lossless_lab.statistical.summary import distance_summary

PARTS = {part: prompts.read_documents(part=part) for part in ("evaluation", "calibration")}
BOTH = [d for part in PARTS.values() for d in part]


def near_duplicates(documents, limit=70):
    """Pairs of ids whose texts are as alike as a copy with some words changed."""
    return [
        (a.id, b.id)
        for a, b in combinations(documents, 2)
        if fuzz.ratio(a.text, b.text, score_cutoff=limit)
    ]


def test_the_corpus_is_large_enough_balanced_and_in_its_languages():
    assert len(PARTS["evaluation"]) >= 150 and len(PARTS["calibration"]) >= 40
    han = re.compile(r"[\u4e00-\u9fff]")
    for documents in PARTS.values():
        first = [d.language for d in documents[:30]]
        assert [first.count(x) for x in ("en", "zh", "code")] == [10, 10, 10]
        assert min(sum(d.language == x for d in documents) for x in ("en", "zh", "code")) >= 10
    for d in BOTH:
        assert bool(han.search(d.text)) == (d.language == "zh"), d.id
        assert 50 <= len(d.text) <= 450, d.id


def test_every_document_is_itself_and_in_one_set_only():
    assert len({d.id for d in BOTH}) == len({d.text for d in BOTH}) == len(BOTH)
    assert near_duplicates(BOTH) == []
    words = BOTH[0].text.split()
    changed = BOTH[0].model_copy(update={"id": "copy", "text": " ".join([*words[2:], "Indeed."])})
    assert near_duplicates([*BOTH, changed]) == [(BOTH[0].id, "copy")]  # the check can fail


def test_the_examples_in_python_are_python():
    for d in BOTH:
        if d.kind == "python":
            compile(d.text, d.id, "exec")
        if d.kind == "json":
            json.loads(d.text)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"language": "fr"}, "`language` must be one of en, zh, code; received 'fr'"),
        ({"kind": "News"}, "`kind` "),
        ({"text": " a text that starts with a blank"}, "`text` "),
        ({"text": "short"}, "`text` string should have at least 20 characters"),
        ({"title": "x"}, "`title` is no field of a document"),
    ],
)
def test_a_bad_document_is_refused_with_its_line(tmp_path, change, message):
    good = BOTH[0].model_dump()
    path = tmp_path / "mine.jsonl"
    lines = [good, {**good, "id": "b"} | change]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with pytest.raises(PromptFileError, match=rf"mine\.jsonl:2: {re.escape(message)}"):
        prompts.read_documents(path)


def test_the_corpus_travels_with_the_package():
    assert (paths.DATA / "corpus" / "README.md").is_file()
    assert "Apache-2.0" in (paths.DATA / "corpus" / "README.md").read_text(encoding="utf-8")


# ---- two models in lockstep --------------------------------------------------------------------

TEXTS = ["the first document", "short", "a third one, longer than the others", "x = f(y)", "zy"]


def letters(vocab_size=97):
    """A tokenizer of one id per character."""
    return lambda text, verbose=True: {"input_ids": [ord(c) % vocab_size for c in text]}


def model(network, tokenizer=None):
    return SimpleNamespace(network=network, tokenizer=tokenizer or letters())


def nudged(network, size=0.02):
    """A copy whose head is a little off."""
    other = copy.deepcopy(network)
    with torch.no_grad():
        weight = other.get_output_embeddings().weight
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        weight += size * noise.to(weight.dtype)
    return other


@pytest.fixture(scope="module")
def pair(t0):
    """T0 and a copy with another head."""
    return model(t0), model(nudged(t0))


def one_by_one(reference, candidate, texts):
    """KL, log-probabilities of the next id in float64 numpy, each document alone, unpadded."""
    rows = []
    for i, text in enumerate(texts):
        ids = reference.tokenizer(text)["input_ids"]
        with torch.no_grad():
            sides = [m.network(torch.tensor([ids])).logits[0] for m in (reference, candidate)]
        p, q = (scipy.special.log_softmax(z.double().numpy(), axis=1) for z in sides)
        for t in range(len(ids) - 1):
            kl = float((np.exp(p[t]) * (p[t] - q[t])).sum())
            rows.append((str(i), t, ids[t + 1], kl, p[t, ids[t + 1]], q[t, ids[t + 1]]))
    return rows


COLUMNS = ["document", "position", "token_id", "kl_reference_candidate_nats", "reference_logprob",
           "candidate_logprob"]  # fmt: skip


def same(frame, expected):
    found = [tuple(row) for row in frame[COLUMNS].itertuples(index=False)]
    return len(found) == len(expected) and all(
        a[:3] == b[:3] and a[3:] == pytest.approx(b[3:], rel=1e-3, abs=1e-6)
        for a, b in zip(found, expected, strict=True)
    )


def test_batches_padding_and_chunks_change_nothing(pair, monkeypatch):
    expected = one_by_one(*pair, TEXTS)
    assert same(compare_on(*pair, TEXTS, progress=False), expected)
    assert not same(compare_on(*pair[::-1], TEXTS, progress=False), expected)  # direction
    for tokens, logits in ((20, 97 * 3), (1, 97), (10_000, 97 * 50)):
        monkeypatch.setattr(corpus, "_TOKENS", tokens)
        monkeypatch.setattr(corpus, "_LOGITS", logits)
        assert same(compare_on(*pair, TEXTS, progress=False), expected)


def test_the_token_that_follows_is_the_one_judged(pair):
    """The network's own loss is the oracle; the token before, or the same one, is far off."""
    reference, _ = pair
    frame = compare_on(*pair, TEXTS, progress=False)
    for i, text in enumerate(TEXTS):
        ids = torch.tensor([reference.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            loss = float(reference.network(ids, labels=ids).loss)
            logp = reference.network(ids).logits[0].log_softmax(-1)
        found = -frame.loc[frame["document"] == str(i), "reference_logprob"].mean()
        assert found == pytest.approx(loss, rel=1e-4)
        mutant = -float(logp[:-1].gather(1, ids[0, :-1, None]).mean())  # off by one
        assert mutant != pytest.approx(loss, rel=1e-2)


def test_against_itself_exactly_zero_and_printed(t0, capsys):
    frame = compare_on(model(t0), model(copy.deepcopy(t0)), TEXTS, max_tokens=20)
    zeros = ["kl_reference_candidate_nats", "js_nats", "total_variation", "hellinger", "logit_peak"]
    assert (frame[zeros] == 0).all(axis=None)
    assert (frame["reference_logprob"] == frame["candidate_logprob"]).all()
    out = capsys.readouterr()
    assert "reference against itself: largest KL 0\n" in out.out
    assert f"{len(frame)} tokens of 5 documents, 1 cut at 20 tokens" in out.out
    assert "batch" in out.err
    compare_on(model(t0), model(t0), TEXTS, progress=False)
    assert capsys.readouterr().out == ""


def test_nothing_of_tokens_times_vocabulary(pair, monkeypatch):
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == 97:
                sizes.append(out.numel())
            return out

    monkeypatch.setattr(corpus, "_LOGITS", 97 * 10)
    with Watch():
        compare_on(*pair, ["a text of some length " * 5] * 6, progress=False)
    assert max(sizes) <= 97 * 10


def test_what_lies_behind_the_head_is_not_lost(pair):
    """A soft cap on the logits, a patched forward, a hook: the network's own logits count."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=2.0,
        pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        capped = Gemma2ForCausalLM(config).eval()
    capped = model(capped), model(nudged(capped, 0.1))
    assert same(compare_on(*capped, TEXTS, progress=False), one_by_one(*capped, TEXTS))

    reference, _ = pair
    hooked = copy.deepcopy(reference.network)
    hooked.register_forward_hook(lambda _, args, out: setattr(out, "logits", out.logits * 1.2))
    hooked = reference, model(hooked)
    expected = one_by_one(*hooked, TEXTS)
    assert np.mean([row[3] for row in expected]) > 0.01
    assert same(compare_on(*hooked, TEXTS, progress=False), expected)


def test_compiled_code_is_what_runs(pair):
    reference, candidate = pair
    ran = []

    def backend(graph, inputs):
        return lambda *args: ran.append(1) or graph(*args)

    compiled = model(torch.compile(copy.deepcopy(candidate.network), backend=backend))
    frame = compare_on(reference, compiled, TEXTS[:2], progress=False)
    assert ran and same(frame, one_by_one(reference, candidate, TEXTS[:2]))


def test_nan_and_lost_tokens_are_kept(t0):
    broken = nudged(t0)
    broken.config.tie_word_embeddings = False
    broken.lm_head.bias = torch.nn.Parameter(torch.zeros(97))
    with torch.no_grad():
        broken.lm_head.bias[ord("t") % 97] = -float("inf")
    texts = ["the " * 6 + str(i) for i in range(3)]
    documents = [
        Document(id=f"d{i}", language="en", kind="news", text=text) for i, text in enumerate(texts)
    ]
    frame = compare_on(model(t0), model(broken), documents, progress=False)
    found = distance_summary(frame)
    assert len(found.infinite) == len(frame) == found.n_tokens
    assert set(frame["unreachable_id"]) == {ord("t") % 97}
    assert found.infinite[0] == ("d0", 0, ord("t") % 97)
    with torch.no_grad():
        broken.lm_head.bias[5] = float("nan")
    found = distance_summary(compare_on(model(t0), model(broken), documents, progress=False))
    assert len(found.undefined) == found.n_tokens and np.isnan(found.value("mean TV"))


def test_bad_input_is_named(t0, pair):
    reference, candidate = pair
    cases = [
        ((reference, candidate, []), "`documents` must be one or more, of distinct ids; got 0"),
        ((reference, candidate, [BOTH[0], BOTH[0]]), "distinct ids; got 2"),
        ((reference, candidate, ["ab", "c"]), "document '1' must have 2 tokens or more"),
        ((t0, candidate, TEXTS), "`reference` must have a tokenizer"),
        ((reference, model(t0, letters(50)), TEXTS), "document '0': the tokenizers of both sides"),
        ((reference, build_t0(vocab_size=98), TEXTS), "reference's vocabulary, 97 tokens; got 98"),
        (
            (reference, build_t0(max_position_embeddings=5), ["abcde", "abcdef"]),
            "document '1' has 6 tokens; `candidate` has 5 positions: lower `max_tokens`",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            compare_on(*arguments, progress=False)
    for n in (-1, 0, 1):
        with pytest.raises(ValueError, match=f"`max_tokens` must be 2 or more; got {n}"):
            compare_on(*pair, TEXTS, max_tokens=n)
    with pytest.raises(TypeError, match="`documents` must be a list of texts; got one str"):
        compare_on(*pair, "a text")
    with pytest.raises(TypeError, match=r"`candidate` must be a network or .* got 'tiny-draft'"):
        compare_on(reference, "tiny-draft", TEXTS)


# ---- whole sequences ---------------------------------------------------------------------------


def exact_sequence_kl(reference, candidate, prompt, n_tokens):
    """KL and TV of all continuations, by enumeration of their joint laws."""
    laws = [next_tokens_law(m, prompt, n_tokens=n_tokens) for m in (reference, candidate)]
    p, q = (law.probs for law in laws)
    return float((p * np.log(p / q)).sum()), float(abs(p - q).sum() / 2)


def test_the_kl_of_sequences_is_that_of_their_joint_law(pair):
    """Against enumeration of all 97² continuations; on the candidate's own text it is another."""
    prompt, rng = [5, 9, 13], np.random.default_rng(11)
    other = model(nudged(pair[0].network, 0.2))
    kl, tv = exact_sequence_kl(pair[0], other, prompt, 2)
    frame = corpus.compare_sequences(pair[0], other, prompt, n_tokens=2, n_sequences=3000, rng=rng)
    found = sequence_distance(frame, confidence=0.999)
    assert found.low < kl < found.high and found.high - found.low < kl
    assert (found.n_sequences, found.n_tokens) == (3000, 2)
    assert tv <= found.tv_at_most * 1.05 and "2 tokens drawn from the reference" in str(found)
    assert frame["position"].unique().tolist() == [2, 3]
    swapped = corpus.compare_sequences(
        other, pair[0], prompt, n_tokens=2, n_sequences=3000, rng=rng
    )
    wrong = swapped.groupby("document")["kl_candidate_reference_nats"].sum().mean()
    assert not found.low < wrong < found.high  # the same sum on text drawn from the candidate


def test_text_that_was_not_drawn_from_the_reference_has_no_sequence_kl(pair):
    frame = compare_on(
        *pair, ["a text of one length"] * 1 + ["b text of one length"], progress=False
    )
    with pytest.raises(
        ValueError, match="on which alone KL adds up; got text of a corpus in row 0"
    ):
        sequence_distance(frame)
    drawn = frame.assign(drawn_from="reference")
    with pytest.raises(ValueError, match="at least 30 clusters for an interval; got 2"):
        sequence_distance(drawn)
    with pytest.raises(ValueError, match="sequences of one length"):
        sequence_distance(drawn[1:])
    with pytest.raises(ValueError, match="got text of candidate in row 0"):
        sequence_distance(frame.assign(drawn_from="candidate"))


@pytest.mark.slow
def test_the_bundled_corpus_on_the_tiny_pair(tiny_target, tiny_draft, capsys):
    frame = compare_on(tiny_target, tiny_draft)
    found = distance_summary(frame)
    assert found.n_documents == 157 and not found.undefined and not found.infinite
    assert "largest KL 0\n" in capsys.readouterr().out
    assert found.value("mean KL(reference‖candidate)") > 0.01
    assert frame["document"].drop_duplicates().tolist() == [d.id for d in PARTS["evaluation"]]


def test_a_network_in_training_mode_is_refused(tiny_draft):
    """Its dropout would make it differ from itself."""
    training = copy.deepcopy(tiny_draft.network).train()
    texts = ["def f(x):", "return x"]
    with pytest.raises(ValueError, match=r"`candidate` must not be in training mode.*eval\(\)"):
        compare_on(tiny_draft, training, texts, progress=False)
    compare_on(tiny_draft, training.eval(), texts, progress=False)
