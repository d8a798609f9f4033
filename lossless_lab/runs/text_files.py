"""Plain text files, one output per line: before.txt and after.txt in and out."""

import re
from collections.abc import Sequence
from pathlib import Path

from lossless_lab.prompts import Prompt, prompt_set_hash
from lossless_lab.prompts.files import decode
from lossless_lab.prompts.files import lines as split

from .folder import (
    Run,
    RunError,
    append,
    json_line,
    whole_characters,
    write_atomically,
    write_json,
)
from .manifest import Manifest, circumstances

# The escape itself, whatever ends a line for some program, byte-order marks, lone surrogates.
_ESCAPED = re.compile("[\\\\\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?:u([0-9a-f]{4})|(.?))", re.DOTALL)
_SHORT = {"\\": "\\", "n": "\n", "r": "\r"}
_LONG_ECHO = 16  # bytes of a prompt that no answer begins with by chance
_FEW = 3  # fewer outputs that all begin with a short prompt may do so by chance
_ROLE = r"\s*(?:<[^<>\n]{1,40}>\s*)*(?:assistant|model)\b"
_TURN = re.compile(_ROLE + r"[^\n]{0,40}\n{1,2}", re.IGNORECASE)
_FLAT_TURN = re.compile(_ROLE + r"(?:<[^<>\n]{1,40}>)?:?\s+", re.IGNORECASE)
_MARKUP = re.compile(r"(?:<[^<>\n]{1,40}>|\s)*")


def escape(text: str) -> str:
    r"""One line for any text; `unescape` gives it back.

    Examples
    --------
    >>> print(escape("a\nb\\n\u2028"))
    a\nb\\n\u2028
    """
    named = {value: f"\\{key}" for key, value in _SHORT.items()}
    return _ESCAPED.sub(lambda m: named.get(m[0]) or f"\\u{ord(m[0]):04x}", text)


def unescape(line: str) -> str:
    r"""The text that `escape` made this line from; ValueError for an escape it never makes.

    Examples
    --------
    >>> unescape(r"a\nb\\n") == "a\nb\\n"
    True
    """

    def meant(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        if match[2] not in _SHORT:
            raise ValueError(f"{match[0]!r} is no escape")
        return _SHORT[match[2]]

    return _ESCAPE.sub(meant, line)


def export_text(run: Run, path: str | Path) -> Path:
    """Write the outputs of a run, one per line in order; empty ones are empty lines."""
    if not run.complete:
        raise RunError(f"`run`: {run.folder} is unfinished; record it to its end first")
    lines = [escape(record.text) + "\n" for record in run.records]
    write_atomically(Path(path), "".join(lines).encode())
    return Path(path)


def import_text(
    path: str | Path,
    folder: str | Path,
    *,
    prompts: Sequence[Prompt] | None = None,
    flattened: bool = False,
) -> Run:
    """A run from a text file with one output per line; its evidence is text only.

    No line is left out, blank ones included. A prompt echoed at the start of an output is
    stripped (also behind chat markup, up to the assistant's turn); short prompts only where three
    or more outputs all echo theirs, since an answer may begin with the same word. metrics.json
    names the prompts that were stripped.

    Parameters
    ----------
    path : UTF-8 file; line ends may be LF or CRLF
    folder : where the run goes; must not hold one
    prompts : what the outputs answer, in order
    flattened : the file was not written by `export_text`; line breaks became blanks, and
        backslashes are just that, so that differences in white space mean nothing

    Raises
    ------
    ValueError
        For a count that does not match, bytes that are not UTF-8, or an escape that
        `export_text` never writes, with the line.
    """
    path, folder = Path(path), Path(folder)
    lines, given = _lines(path), prompts is not None
    if not given:
        prompts = [Prompt(id=f"line-{i}", text="unknown") for i, _ in enumerate(lines, 1)]
    if len(lines) != len(prompts) or not lines:
        raise ValueError(
            f"{path} must hold one line per output, {len(prompts) or 'one or more'}; got "
            f"{len(lines)} (blank lines count, and the last line too has to end with a line break)"
        )
    texts = lines if flattened else [_unescaped(path, i, line) for i, line in enumerate(lines, 1)]
    texts, stripped = _without_echo(texts, prompts, flattened=flattened) if given else (texts, [])
    if (folder / "manifest.json").exists():
        raise RunError(f"`folder`: {folder} already holds a run; use another")
    folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(
        prompt_set_sha256=prompt_set_hash(prompts) if given else "unknown",
        n_prompts=len(prompts),
        logprobs_kind="none",
        text="flattened" if flattened else "exact",
        **circumstances(),
    )
    write_json(folder / "manifest.json", manifest.model_dump(mode="json"))
    unknown = {"sample_index": 0, "output_ids": None, "finish_reason": None}
    records = [
        {"prompt_id": p.id, "prompt_ids": p.ids, "text": whole_characters(text), **unknown}
        for p, text in zip(prompts, texts, strict=True)
    ]
    append(folder / "outputs.jsonl", map(json_line, records))
    counts = {"n_outputs": len(records), "empty_outputs": sum(not text for text in texts)}
    write_json(folder / "metrics.json", counts | {"echoed_prompts_stripped": stripped})
    return Run(folder)


def _lines(path: Path) -> list[str]:
    lines = split(decode(path, mark=True))
    crlf = all(line.endswith("\r") for line in lines)
    return [line[:-1] for line in lines] if crlf else lines


def _unescaped(path: Path, number: int, line: str) -> str:
    try:
        return unescape(line)
    except ValueError as error:
        raise ValueError(
            f"{path}:{number}: {error}; pass flattened=True for a file that is not from export_text"
        ) from None


def _without_echo(
    texts: Sequence[str], prompts: Sequence[Prompt], *, flattened: bool
) -> tuple[list[str], list[str]]:
    """Texts without the prompt at their start, and the ids of the prompts that were there."""
    pairs = list(zip(texts, prompts, strict=True))
    found = [_echo(text, prompt.text or "", flattened) for text, prompt in pairs]
    filled = [end for (end, _), text in zip(found, texts, strict=True) if text.strip()]
    all_echo = len(filled) >= _FEW and all(filled)
    ends = [end if certain or all_echo else 0 for end, certain in found]
    kept = [text[end:] for text, end in zip(texts, ends, strict=True)]
    named = [prompt.id for prompt, end in zip(prompts, ends, strict=True) if end]
    return kept, list(dict.fromkeys(named))


def _echo(text: str, prompt: str, flattened: bool) -> tuple[int, bool]:
    """Where the answer begins after an echoed prompt (0: no echo), and whether that is certain."""
    words = prompt.split() if flattened else [prompt]
    echo = re.search(r"\s+".join(map(re.escape, words)), text) if prompt else None
    if not echo:
        return 0, False
    turn = (_FLAT_TURN if flattened else _TURN).match(text, echo.end())
    if turn and turn.end() > echo.end():
        return turn.end(), True
    if _MARKUP.fullmatch(text, 0, echo.start()) is None:
        return 0, False
    return echo.end(), len(prompt.encode("utf-8", "replace")) >= _LONG_ECHO
