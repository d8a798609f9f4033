"""The engines by name, and how one is configured: version, launch flags, options."""

import re
from dataclasses import fields, replace
from typing import get_args

from lossless_lab.kv_cache.allocators import Allocator
from lossless_lab.kv_cache.checks import kinds_of, require
from lossless_lab.kv_cache.contiguous import Ggml, IkLlamaCpp, LlamaCpp, Transformers, WhisperCpp
from lossless_lab.kv_cache.facts import FACTS
from lossless_lab.kv_cache.paged import VLLM, SGLang, TensorRT

_CLASSES = (LlamaCpp, IkLlamaCpp, WhisperCpp, Transformers, TensorRT, SGLang, VLLM, Ggml)
ENGINES = {cls.name: cls for cls in _CLASSES}
_NAMES = ENGINES | {alias: ENGINES[name] for alias, name in FACTS["engine_names"].items()}
_TEXT = re.compile(
    r"\s*(?P<name>" + "|".join(map(re.escape, sorted(_NAMES, key=len, reverse=True))) + r")"
    r"(?:(?:[=@:/]+|-)?\s*\(?\s*(?:(?:version|build|release)\b\s*:?\s*)?[vb]?(?P<version>\d[\d.]*))?",
    re.IGNORECASE,
)


def engine(text, **options) -> Allocator:
    """An engine's rules from a name, a version and launch flags as one would type them.

    Parameters
    ----------
    text : str, None or Allocator
        "vLLM 0.11", "llama.cpp b6500 -ub 256 --swa-full", "ik_llama.cpp -mla 2"; None for the
        closed form.
    **options
        Fields of the engine's allocator, such as `n_ubatch`, `block_size`, `cache`.

    Raises
    ------
    ValueError, TypeError
        If the engine, its version, a flag or an option is not understood; the message says which
        are, or which argument says the same.

    Examples
    --------
    >>> engine("llama.cpp b6500 -ub 256").n_ubatch
    256
    """
    named = text is None or isinstance(text, (str, Allocator))
    require(named, f"`engine` must be a name or None; received {text!r}")
    cls, found = _read(text) if isinstance(text, str) else (type(text or Allocator()), {})
    known = sorted(field.name for field in fields(cls))
    for name in options:
        said = f"`{name}` is not an option of engine {cls.name!r}; its options are"
        require(name in known, f"{said} {', '.join(known)}", TypeError)
    return replace(text, **options) if isinstance(text, Allocator) else cls(**{**found, **options})


def _read(text):
    """The engine's class, and the options that its version and flags set."""
    match = _TEXT.match(text)
    require(match, f"`engine` {text!r} is unknown; known are {', '.join(ENGINES)}")
    cls = _NAMES[match["name"].lower()]
    found = {"version": match["version"] or ""}
    caches = [cache for word, cache in FACTS["cache_words"].items() if word in text.lower()]
    if cls is Transformers and caches:
        found["cache"] = caches[0]
    known = {field.name for field in fields(cls)} - {"version"}
    rest = "(" * ("(" in match[0]) + text[match.end() :]  # a bracket opened before the version
    words = re.sub(r"\([^)]*\)?", " ", rest).replace("=", " ").split()
    while words:
        word = words.pop(0)
        if not re.match(r"--?[a-zA-Z]", word):
            hidden = re.search(r"\d+\.\d|\d{4}|^b\d", word)  # other words may describe
            said = f"`engine` {text!r}: {word!r} is not understood; a version stands right after"
            require(not hidden, f"{said} the name, as in '{cls.name} 0.11' or '{cls.name} b6500'")
            continue
        valued = words and not re.match(r"--?[a-zA-Z]", words[0])
        value = "off" if word in FACTS["off"] else words.pop(0) if valued else "on"
        if word in FACTS["flags_without_effect"].split():
            continue
        for name in FACTS["flags"].get(word, word.lstrip("-").replace("-", "_")).split():
            elsewhere = FACTS["flags_said_elsewhere"].items()
            say = [f"; say it with {k}" for k, v in elsewhere if word in v.split()]
            said = f"`engine` flag {word} is not known to change {cls.name}'s cache"
            require(name in known, "".join((said, *say)))
            found[name] = _value(value, kinds_of(cls)[name])
    return cls, found


def _value(text, kind):
    """A flag's text as a switch, a number, or else the text; the option's check does the rest."""
    if bool in (kind, *get_args(kind)):
        switch = {**dict.fromkeys(["1", "on", "true", "auto"], True)}
        return (switch | dict.fromkeys(["0", "off", "false"], False)).get(text.lower(), text)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
