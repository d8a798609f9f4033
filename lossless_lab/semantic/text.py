"""How alike two texts are: supporting evidence that decides nothing."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import pandas as pd
from rapidfuzz.distance import Indel, LCSseq, Levenshtein
from sacrebleu.metrics import BLEU, CHRF

from ..results import Result


def similarity(reference: Sequence, candidate: Sequence) -> float:
    """2·LCS / (n + m): the share of items in a longest common subsequence, the same both ways.

    Parameters
    ----------
    reference, candidate : two texts (compared by character) or two lists of token ids.

    Returns
    -------
    float in [0, 1]; 1 exactly where the two are equal, two empty ones included, and never else.

    Raises
    ------
    TypeError
        For a text against a list.

    Notes
    -----
    The normalised Indel similarity of rapidfuzz. No item is ever ignored for being frequent, which
    is what difflib does by default from 200 items on. High values prove little: one digit changed
    in a sentence leaves it near 1.

    Examples
    --------
    >>> similarity("4.00 GiB", "1.00 GiB"), similarity("", "")
    (0.875, 1.0)
    """
    if isinstance(reference, str) != isinstance(candidate, str):
        raise TypeError(
            "`reference` and `candidate` must both be texts or both lists of ids; "
            f"got {type(reference).__name__} and {type(candidate).__name__}"
        )
    if not isinstance(reference, str):  # by number: rapidfuzz compares hashes, those of tensors too
        ids: dict = {}
        reference, candidate = (
            [ids.setdefault(x.item() if hasattr(x, "item") else x, len(ids)) for x in side]
            for side in (reference, candidate)
        )
    return float(Indel.normalized_similarity(reference, candidate))


def shown(similarity: float) -> str:
    """Three decimals, rounded down, so that only what is equal reads as 1.000.

    Examples
    --------
    >>> shown(similarity("a" * 20_000, "a" * 19_999 + "b")), shown(1.0)
    ('0.999', '1.000')
    """
    return f"{math.floor(similarity * 1000) / 1000:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScores(Result):
    """How alike two answers are, by the field's metrics; 1 or 100 where they are equal.

    Parameters
    ----------
    equal : whether they are the same text.
    characters : `similarity` by character, 0 to 1.
    edit_distance : insertions, deletions and substitutions of characters (Levenshtein).
    bleu, chrf : sacrebleu's sentence scores, 0 to 100.
    rouge : F of ROUGE-1, -2 and -L, 0 to 1.
    signature : how words were told apart, and sacrebleu's own signatures.
    note : why a score may mislead; "" where nothing is known.
    """

    equal: bool
    characters: float
    edit_distance: int
    bleu: float
    chrf: float
    rouge: tuple[float, float, float]
    signature: str
    note: str

    def to_frame(self) -> pd.DataFrame:
        """One row, one column per metric."""
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        names = ("rouge_1", "rouge_2", "rouge_l")
        return pd.DataFrame([row | dict(zip(names, row.pop("rouge"), strict=True))])

    def __str__(self) -> str:
        if self.equal:
            return "equal texts"
        return (
            f"similarity {shown(self.characters)}, {self.edit_distance} edits, "
            f"BLEU {self.bleu:.1f}, chrF {self.chrf:.1f}, ROUGE-L {shown(self.rouge[2])}"
            + (f" ({self.note})" if self.note else "")
        )


def text_scores(reference: str, candidate: str) -> TextScores:
    """Similarity, edit distance, BLEU, chrF and ROUGE of two answers. They decide nothing.

    Words are told apart by script: where no blanks part them (Chinese, Japanese, Korean, Thai and
    its neighbours) each character is one, elsewhere runs of letters and digits are. Two equal
    texts score 1 or 100 by every metric, the empty text included; a text against an empty one
    scores 0.

    Notes
    -----
    Source: sacrebleu (tokenizer zh for Chinese, char for the others without blanks, 13a else;
    effective order, since answers are short); Lin 2004 for ROUGE.

    Examples
    --------
    >>> [round(x, 3) for x in text_scores("量化之后输出没有变化。", "量化之后输出有变化。").rouge]
    [0.952, 0.842, 0.952]
    >>> str(text_scores("四", "四"))
    'equal texts'
    """
    alone = {c for c in reference + candidate if _CJK.match(c)}
    tokenize = "13a" if not alone else "zh" if all(map(_CHINESE.match, alone)) else "char"
    bleu = BLEU(tokenize=tokenize, effective_order=True)
    chrf = CHRF()
    scores = [min(m.sentence_score(candidate, [reference]).score, 100.0) for m in (bleu, chrf)]
    rouge = _rouge(words(reference), words(candidate))
    equal = reference == candidate
    if equal:
        scores, rouge = [100.0, 100.0], (1.0, 1.0, 1.0)
    elif not (reference.strip() and candidate.strip()):
        scores, rouge = [0.0, 0.0], (0.0, 0.0, 0.0)
    full = [n for n, s in zip(("BLEU", "chrF"), scores, strict=True) if s > 99.99]
    full += [f"ROUGE-{name}" for name, f in zip("12L", rouge, strict=True) if f == 1]
    forms = {unicodedata.normalize("NFC", text) for text in (reference, candidate)}
    same = "the same characters in two Unicode forms" * (len(forms) == 1)
    said = same or f"{' and '.join(full)} cannot tell" * bool(full)
    return TextScores(
        equal=equal,
        characters=similarity(reference, candidate),
        edit_distance=Levenshtein.distance(reference, candidate),
        bleu=scores[0],
        chrf=scores[1],
        rouge=rouge,
        signature=f"{bleu.get_signature()}; {chrf.get_signature()}; ROUGE by character in CJK",
        note=f"unequal, though {said}" if said and not equal else "",
    )


def score_texts(reference: Sequence[str], candidate: Sequence[str]) -> pd.DataFrame:
    """`text_scores` of each pair, a row each.

    Raises
    ------
    ValueError
        For no pairs, other numbers of texts on the two sides, and what is no text.

    Examples
    --------
    >>> list(score_texts(["yes", ""], ["yes", "no"])["bleu"])
    [100.0, 0.0]
    """
    refuse_uneven(reference=reference, candidate=candidate)
    pairs = zip(reference, candidate, strict=True)
    return pd.concat([text_scores(*pair).to_frame() for pair in pairs], ignore_index=True)


def refuse_uneven(**sides: Sequence[str]) -> None:
    """Raise ValueError, by name, unless all sides are lists of equally many texts, one at least."""
    sizes = {name: len(side) for name, side in sides.items() if not isinstance(side, str)}
    if len(sizes) < len(sides) or 0 in sizes.values() or len({*sizes.values()}) > 1:
        said = " and ".join(f"`{name}`" for name in sides)
        got = ", ".join(str(sizes.get(name, "one text")) for name in sides)
        raise ValueError(f"{said} must be lists of equally many texts, one at least; got {got}")
    for name, side in sides.items():
        for i, text in enumerate(side):
            if not isinstance(text, str):
                raise ValueError(f"`{name}`[{i}] must be a text; got {text!r}")


_CHINESE = re.compile(r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]")
_CJK = re.compile(  # scripts that put no blanks between words; Hangul, which does, is like them
    _CHINESE.pattern[:-1] + r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3130-\u318f"
    r"\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)


def words(text: str) -> list[str]:
    """Words without case; of Chinese, Japanese, Korean, Thai each character, punctuation included.

    Composed and decomposed letters are the same, and vowel signs and accents belong to the letter
    that they stand on: without them "दिन" (day) would be "दीन" (poor).

    >>> words("KV缓存 is 4 GiB.")
    ['kv', '缓', '存', 'is', '4', 'gib']
    """
    text = unicodedata.normalize("NFC", text).casefold()
    kinds = [unicodedata.category(c)[0] for c in text]  # L letter, N number, M mark, A alone
    kinds = ["A" if k != "M" and _CJK.match(c) else k for k, c in zip(kinds, text, strict=True)]
    found = re.finditer("AM*|[LN][LNM]*", "".join(kinds))
    return [text[m.start() : m.end()] for m in found]


def _rouge(reference: list[str], candidate: list[str]) -> tuple[float, float, float]:
    """F of shared words, of shared pairs of words, and of the longest common subsequence."""
    sides = reference, candidate
    values = []
    for size in (1, 2):
        a, b = (Counter(zip(*(w[i:] for i in range(size)), strict=False)) for w in sides)
        values.append(2 * (a & b).total() / max(a.total() + b.total(), 1))
    longest = LCSseq.similarity(reference, candidate)
    return (*values, 2 * longest / max(len(reference) + len(candidate), 1))
