"""Prompts: the bundled set, the validator's messages, chat templates and the second BOS."""

import hashlib
import json
import re
import unicodedata
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lossless_lab import paths, prompts
from lossless_lab.prompts import Prompt, PromptFileError, PromptsLeftOut

BOS, END = 257, 256


def write(tmp_path, *lines, encoding="utf-8"):
    path = tmp_path / "mine.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))
    return path


def line(**fields):
    return json.dumps({"id": "a", "text": "x"} | fields, ensure_ascii=False)


def faults(tmp_path, *lines, **options):
    with pytest.raises(PromptFileError) as caught:
        prompts.read(write(tmp_path, *lines, **options))
    return str(caught.value)


# ---- the bundled set -------------------------------------------------------------------------


def test_bundled_set_is_balanced_in_every_dozen():
    items = prompts.read()
    kinds = ("faq", "detail", "code", "special", "long", "short")
    assert len(items) == 72
    for start in range(0, len(items), 12):
        cells = Counter((p.category, p.language) for p in items[start : start + 12])
        assert cells == Counter((kind, language) for kind in kinds for language in ("en", "zh"))


def test_bundled_texts_are_distinct_and_in_their_language():
    items = prompts.read()
    assert len({p.text for p in items}) == len(items)
    han = re.compile(r"[\u4e00-\u9fff]")
    for p in items:
        assert bool(han.search(p.text)) == (p.language == "zh"), p.id
        assert p.text == p.text.strip(), p.id


def test_bundled_set_asks_the_three_required_questions_in_chinese():
    chinese = [p.text for p in prompts.read() if p.language == "zh"]
    assert any("介绍" in t and "无损推理" in t for t in chinese)
    assert any("Python" in t and "回文" in t and "函数" in t for t in chinese)
    assert any("KV 缓存在自回归生成中的作用" in t for t in chinese)


def test_special_items_hold_what_they_promise():
    special = "".join(p.text for p in prompts.read() if p.category == "special")
    found = {unicodedata.category(c) for c in special}
    assert {"Mn", "Cf", "Sm", "So", "Zs"} <= found  # combining, zero-width, mathematics, emoji
    assert {"\t", "\n", "\u200d", "\u200b", "\u202e"} <= set(special)
    assert {unicodedata.bidirectional(c) for c in special} >= {"R", "AL"}
    assert max(map(ord, special)) > 0xFFFF


def test_long_and_short_items_are_long_and_short():
    for p in prompts.read():
        size = len(p.text.split()) if p.language == "en" else len(p.text)
        if p.category == "long":
            assert size >= (280 if p.language == "en" else 500), p.id
        if p.category == "short":
            assert size <= 15, p.id


def test_bundled_file_hides_no_invisible_character():
    raw = (paths.DATA / "prompts" / "evaluation.jsonl").read_text(encoding="utf-8")
    kinds = {unicodedata.category(c) for c in set(raw) - {"\n", " "}}
    assert not kinds & {"Cf", "Cc", "Zs", "Zl", "Zp", "Mn"}


# ---- the validator ---------------------------------------------------------------------------


def test_minimal_line_gets_the_defaults(tmp_path):
    (item,) = prompts.read(write(tmp_path, '{"id": "a", "ids": [1, 2]}'))
    assert item == Prompt(id="a", ids=(1, 2), language="other", category="other")


def test_unusual_line_ends_inside_a_text_do_not_split_it(tmp_path):
    text = "one\u2028two\u0085three\x0cfour"
    path = write(tmp_path, line(text=text) + "\r", line(id="b"))
    assert [p.text for p in prompts.read(path)] == [text, "x"]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (line(language="zh-CN"), "`language` must be one of en, zh, other; received 'zh-CN'; "
                                 "the nearest is 'zh'"),
        (line(category="cde"), "received 'cde'; the nearest is 'code'"),
        (line(category=7), "received 7; allowed are faq, detail,"),
        (line(txet="x"), "`txet` is no field of a prompt; received 'txet'; the nearest is 'text'"),
        (line(templated=True), "`templated` is no field of a prompt"),
        (line(text=" \n\t"), "`text` must hold more than white space; received ' \\n\\t'"),
        (line(text=""), "`text` must hold more than white space; received ''"),
        (line(text=5), "`text` should be a valid string; received 5"),
        (line(text=None), "one of `text` and `ids` is required"),
        (line(ids=[1]), "`text` and `ids` exclude each other"),
        (line(text=None, ids=[]), "`ids` must hold at least one token id; received []"),
        (line(text=None, ids=[3, -1]), "`ids.1` should be greater than or equal to 0; received -1"),
        (line(text=None, ids=[True]), "`ids.0` should be a valid integer; received True"),
        (line(id="a b"), "`id` must be 1 to 64 of the characters A-Z a-z 0-9 . _ -; received"),
        (line(id=3), "`id` should be a valid string; received 3"),
        ('{"text": "x"}', "`id` is required"),
        ('{"id": "a", "id": "b", "text": "x"}', "a field must occur once; 'id' occurs twice"),
        ("", "received a blank line"),
        ("[1]", "line must be one JSON object; received [1]"),
        ('{"id": "a", ', "line must be one JSON object; "),
        ('{"id": "a", "text": "\\ud800"}', "`text` must be valid Unicode"),
    ],
)  # fmt: skip
def test_each_fault_names_line_field_rule_and_value(tmp_path, bad, expected):
    message = faults(tmp_path, line(id="first"), bad, line(id="last"))
    assert f"{tmp_path / 'mine.jsonl'}:2: " in message
    assert expected in message
    assert message.count("\n") == 0


def test_duplicate_ids_name_both_lines(tmp_path):
    message = faults(tmp_path, line(id="a"), line(id="b"), line(id="a", text="y"))
    assert message.endswith(":3: `id` must be unique; 'a' is on line 1 too")


def test_all_faults_are_listed_and_a_flood_is_cut(tmp_path):
    message = faults(tmp_path, line(id="x y"), line(id="b", language="fr"))
    assert ":1: `id`" in message and ":2: `language`" in message
    flood = faults(tmp_path, *[line(id="x y")] * 30)
    assert flood.count("\n") == 20 and flood.endswith("... and 10 more")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xef\xbb\xbf" + b'{"id":"a","text":"x"}\n', ":1: must be UTF-8 without a byte-order"),
        ('{"id":"a","text":"x"}\n'.encode("utf-16"), "received a UTF-16 mark (ff fe"),
        (b'{"id":"a","text":"x"}\n' + '{"id":"b","text":"中文"}'.encode("gbk"),
         ":2: must be UTF-8; received bytes d6 d0"),
        (b"", "must hold at least one prompt; the file is empty"),
    ],
)  # fmt: skip
def test_encoding_faults(tmp_path, raw, expected):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(raw)
    with pytest.raises(PromptFileError) as caught:
        prompts.read(path)
    assert expected in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no prompt file .*absent\.jsonl"):
        prompts.read(tmp_path / "absent.jsonl")


# ---- token ids and the second BOS (B20) --------------------------------------------------------


def byte_tokenizer(chat_template=None):
    """257 ids: bytes, end (256), BOS (257); its post-processor prepends BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<end>": END, "<bos>": BOS}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<end>", chat_template=chat_template
    )


def model_of(tokenizer, *, vocab_size=258):
    config = SimpleNamespace(vocab_size=vocab_size)
    return SimpleNamespace(
        name="stub",
        tokenizer=tokenizer,
        network=SimpleNamespace(config=config),
        chat=bool(tokenizer and tokenizer.chat_template),
    )


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_template_goes_to_ids_without_a_second_bos():
    tokenizer = byte_tokenizer(TEMPLATE)
    (item,) = prompts.tokenize([Prompt(id="a", text="<end>")], model_of(tokenizer))
    assert item.ids == (BOS, END) and item.templated is True
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "<end>"}], tokenize=False)
    naive = tokenizer(rendered)["input_ids"]
    assert naive == [BOS, BOS, END]  # the fault that is refused
    with pytest.raises(ValueError, match=r"prompt 'a': position 1 holds a second BOS \(id 257\)"):
        prompts.refuse_second_bos(naive, BOS, place="prompt 'a'")


@pytest.mark.parametrize("template", ["{{ bos_token }}" + TEMPLATE, None])
def test_second_bos_is_refused_whatever_put_it_there(template):
    text = "<bos>hello" if template is None else "hello"
    with pytest.raises(ValueError, match="prompt 'a': position 1 holds a second BOS"):
        prompts.tokenize([Prompt(id="a", text=text)], model_of(byte_tokenizer(template)))


def test_plain_tokenizer_gets_its_own_bos_once():
    (item,) = prompts.tokenize([Prompt(id="a", text="<end>")], model_of(byte_tokenizer()))
    assert item.ids == (BOS, END) and item.templated is False


def test_generation_prompt_is_added_and_chat_can_be_switched_off():
    template = "<bos>{{ messages[0].content }}{% if add_generation_prompt %}<end>{% endif %}"
    model = model_of(byte_tokenizer(template))
    item = Prompt(id="a", text="A")
    on, off = (prompts.tokenize([item], model, chat=chat)[0].ids for chat in (True, False))
    assert on == (*off, END) and off[0] == BOS and len(off) == 2


def test_ids_pass_through_and_are_checked_against_the_vocabulary():
    given = Prompt(id="a", ids=(5, 6))
    assert prompts.tokenize([given], model_of(None)) == [given]
    with pytest.raises(ValueError, match=r"prompt 'a': `ids` must be below 6; received 6"):
        prompts.tokenize([given], model_of(None, vocab_size=6))


@pytest.mark.parametrize(
    ("tokenizer", "chat", "expected"),
    [
        (None, "auto", "'stub' has no tokenizer; give `ids`"),
        ("plain", True, "the tokenizer of 'stub' has no template"),
        ("plain", "always", "`chat` must be \"auto\", True or False; received 'always'"),
    ],
)
def test_tokenize_errors(tokenizer, chat, expected):
    model = model_of(byte_tokenizer() if tokenizer else None)
    with pytest.raises(ValueError, match=expected):
        prompts.tokenize([Prompt(id="a", text="x")], model, chat=chat)


def test_long_prompts_are_left_out_by_name_never_cut():
    items = [Prompt(id="short", ids=(1, 2)), Prompt(id="long-one", ids=(1, 2, 3))]
    with pytest.warns(PromptsLeftOut, match=r"1 of 2 prompts have more than 2 .*long-one \(3\)"):
        kept = prompts.tokenize(items, model_of(None), max_prompt_tokens=2)
    assert kept == items[:1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prompts.tokenize(items, model_of(None), max_prompt_tokens=3) == items
    with pytest.raises(ValueError, match="`max_prompt_tokens` = 1 leaves out all: short"):
        prompts.tokenize(items, model_of(None), max_prompt_tokens=1)


# ---- the hash of a set -------------------------------------------------------------------------


def test_hash_depends_on_names_contents_and_order_only():
    a, b = Prompt(id="a", text="x"), Prompt(id="b", text="y")
    assert (
        prompts.prompt_set_hash([a, b]) == hashlib.sha256(b'[["a", "x"], ["b", "y"]]').hexdigest()
    )
    relabelled = a.model_copy(update={"language": "zh", "category": "code"})
    assert prompts.prompt_set_hash([relabelled, b]) == prompts.prompt_set_hash([a, b])
    others = [[b, a], [a], [Prompt(id="c", text="x"), b], [Prompt(id="a", text="z"), b]]
    assert len({prompts.prompt_set_hash(s) for s in [[a, b], *others]}) == 5


def test_a_set_of_prompts_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        Prompt(id="a", text="x").text = "y"


def test_a_long_text_raises_no_alarm_of_the_tokenizer(caplog, capfd):
    for template in (None, TEMPLATE):
        tokenizer = byte_tokenizer(template)
        tokenizer.model_max_length = 4
        prompts.tokenize([Prompt(id="a", text="longer than four")], model_of(tokenizer))
    assert "maximum sequence length" not in caplog.text + "".join(capfd.readouterr())


def test_on_the_tiny_pair_only_long_chinese_items_exceed_the_context(tiny_draft):
    with pytest.warns(PromptsLeftOut, match="6 of 72 prompts have more than 992 tokens"):
        kept = prompts.tokenize(prompts.read(), tiny_draft, max_prompt_tokens=1024 - 32)
    assert {p.id for p in prompts.read()} - {p.id for p in kept} == {
        f"long-zh-{i}" for i in range(1, 7)
    }
    assert not any(p.templated for p in kept)
