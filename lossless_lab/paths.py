"""Where the project's data, cache, figures and runs live, and at which commit it stands."""

import os
import subprocess
from functools import partial
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


def git_commit() -> str | None:
    """Commit of the checkout; "+changes" where the package was edited since; None outside one."""
    if CHECKOUT is None:
        return None
    git = partial(subprocess.check_output, cwd=CHECKOUT, text=True, stderr=subprocess.DEVNULL)
    try:
        edits = git(["git", "status", "--porcelain", "--", "lossless_lab"])
        return git(["git", "rev-parse", "HEAD"]).strip() + ("+changes" if edits else "")
    except (OSError, subprocess.CalledProcessError):
        return None
