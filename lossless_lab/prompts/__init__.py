"""WHAT IS ASKED: prompts, read from files and turned into token ids."""

from .documents import Document, read_documents
from .files import Prompt, PromptFileError, prompt_set_hash, read
from .tokenization import PromptsLeftOut, refuse_second_bos, tokenize

__all__ = [
    "Document", "Prompt", "PromptFileError", "PromptsLeftOut", "prompt_set_hash", "read",
    "read_documents", "refuse_second_bos", "tokenize",
]  # fmt: skip
