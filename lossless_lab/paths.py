"""Where the project's data, cache, figures and runs live; nothing else belongs here."""

import os
from pathlib import Path

import platformdirs

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "data" / "models").is_dir() else None
ROOT = CHECKOUT or Path.cwd()  # where new files are written

DATA = ROOT / "data" if CHECKOUT else PACKAGE / "_data"  # read only: prompts, tiny models
FIGURES = Path(os.environ.get("LOSSLESS_LAB_FIGURES") or ROOT / "figures")
RUNS = ROOT / "data" / "runs"  # new runs; the published ones are in DATA / "runs" / "published"
CACHE = Path(
    os.environ.get("LOSSLESS_LAB_CACHE")
    or (DATA / "cache" if CHECKOUT else platformdirs.user_cache_dir("lossless_lab"))
)
