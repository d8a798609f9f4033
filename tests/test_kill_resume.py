"""A run killed twenty times at random points ends as if nothing had happened."""

import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
import torch
from conftest import build_t0

from lossless_lab import runs
from lossless_lab.engines import Decoding, TransformersEngine

KILLS = 20
PRELOAD = [
    "lossless_lab.engines.transformers_engine",
    "lossless_lab.runs",
    "transformers.models.llama.modeling_llama",
]
PROMPTS = {f"p{i}": tuple(range(1 + i, 3 + i + i % 7)) for i in range(36)}
DECODINGS = {
    "sampled": Decoding(
        max_new_tokens=6, temperature=1.2, n_samples=3, seed=9, stop_token_ids=(46,)
    ),
    "greedy": Decoding(max_new_tokens=6, n_samples=3),
}


def work(folder, kind):
    """Record in a process of its own, threads and all as in the uninterrupted run."""
    torch.set_num_threads(1)
    engine = TransformersEngine(build_t0(), batch_size=2, threads=1)
    runs.record(folder, engine, PROMPTS, DECODINGS[kind], save_logits=True, progress=False)


def told(folder):
    run = runs.Run(folder)
    records = [r.model_dump(exclude={"timings"}) for r in run.records]
    logits = [run.logits(r.prompt_id, r.sample_index) for r in run.records]
    return records, logits


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a matter of POSIX systems")
@pytest.mark.parametrize("kind", DECODINGS)
def test_killed_twenty_times_and_resumed(tmp_path, kind):
    context = multiprocessing.get_context("forkserver")  # imports torch once, then forks
    context.set_forkserver_preload(PRELOAD)

    def start():
        process = context.Process(target=work, args=(tmp_path / "killed", kind))
        process.start()
        return process

    whole = context.Process(target=work, args=(tmp_path / "whole", kind))
    whole.start()
    whole.join(300)
    assert whole.exitcode == 0

    chance = random.Random(f"killed twenty times, {kind}")
    outputs, sizes = tmp_path / "killed" / "outputs.jsonl", []
    while len(sizes) < KILLS:
        process = start()
        before = outputs.stat().st_size if outputs.is_file() else -1
        while (
            process.is_alive() and (outputs.stat().st_size if outputs.is_file() else -1) == before
        ):
            time.sleep(0.001)  # wait for the first batch of this attempt, so that there is progress
        time.sleep(chance.uniform(0, 0.05))
        assert process.is_alive(), "the run ended before it could be killed twenty times"
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        sizes.append(outputs.stat().st_size)
    assert len(set(sizes)) > KILLS / 2 and not runs.Run(tmp_path / "killed").complete

    last = start()
    last.join(300)
    assert last.exitcode == 0 and runs.Run(tmp_path / "killed").complete
    (records, logits), (expected, expected_logits) = (
        told(tmp_path / name) for name in ("killed", "whole")
    )
    assert records == expected and len(records) == 108
    for pair, expected_pair in zip(logits, expected_logits, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, expected_pair, strict=True))
    leftovers = {p.name for p in (tmp_path / "killed").iterdir()}
    assert leftovers == {p.name for p in (tmp_path / "whole").iterdir()}
