"""WHAT HAPPENED: run folders (manifest, outputs, metrics), written append-only and resumable."""

from .folder import Record, Run, RunError
from .manifest import Manifest, configuration_hash, differences, facts
from .overview import readable, table, write_table
from .recording import record
from .text_files import export_text, import_text

__all__ = [
    "Manifest", "Record", "Run", "RunError", "configuration_hash", "differences", "export_text",
    "facts", "import_text", "readable", "record", "table", "write_table",
]  # fmt: skip
