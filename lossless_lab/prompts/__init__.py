"""WHAT IS ASKED: prompts, read from files and turned into token ids."""

from .files import Prompt, PromptFileError, prompt_set_hash, read
from .tokenization import PromptsLeftOut, refuse_second_bos, tokenize

__all__ = [
    "Prompt", "PromptFileError", "PromptsLeftOut", "prompt_set_hash", "read", "refuse_second_bos",
    "tokenize",
]  # fmt: skip
