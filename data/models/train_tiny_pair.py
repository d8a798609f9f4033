"""Train the bundled tiny pair from the Python standard library's own source.

    python data/models/train_tiny_pair.py            # writes tiny-target/ and tiny-draft/ here
    python data/models/train_tiny_pair.py --out DIR  # writes them somewhere else

Everything is seeded; the corpus is that of the Python which runs the script (the stored pair
used CPython 3.11), so another patch version shifts the losses slightly. Needs torch,
transformers and tokenizers; takes six to fifteen minutes on two CPU cores (one thread per model,
so that their number changes nothing).
"""

import argparse
import hashlib
import json
import math
import platform
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "asyncio collections concurrent email html http importlib json logging multiprocessing re "
    "tomllib unittest urllib wsgiref xml xmlrpc zoneinfo"
).split()  # with the single-file modules: present in every CPython 3.11, however it is packaged
HELD_OUT = (
    "bisect.py colorsys.py fnmatch.py heapq.py json/scanner.py linecache.py queue.py sched.py "
    "statistics.py textwrap.py urllib/robotparser.py"
).split()  # never trained on
HELD_OUT_BYTES = 4096  # of each held-out file, at most
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
VOCAB_SIZE, SEQ_LEN, SEED = 512, 256, 0
SHARED = {
    "vocab_size": VOCAB_SIZE,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",
}
ARCHITECTURES = {
    "tiny-target": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "tiny-draft": {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
STEPS = {"tiny-target": 1200, "tiny-draft": 600}
BATCH_SIZE, PEAK_LR, WARMUP = 4, 3e-3, 50


def corpus() -> dict[str, str]:
    """The source files by relative path, sorted: {'bisect.py': text, ...}."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / f"{name}.py" for name in sys.stdlib_module_names]
    for package in PACKAGES:
        files += (root / package).rglob("*.py")
    texts = {f.relative_to(root).as_posix(): f.read_text("utf-8") for f in files if f.is_file()}
    return dict(sorted(texts.items()))


def train_tokenizer(texts) -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes are in the alphabet, so that any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=SHARED["max_position_embeddings"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def stream(tokenizer, texts) -> torch.Tensor:
    """All texts as one row of ids, each closed by EOS."""
    ids = []
    for text in texts:
        ids += [
            *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            SHARED["eos_token_id"],
        ]
    return torch.tensor(ids)


def windows(ids, starts) -> torch.Tensor:
    """Rows of SEQ_LEN ids: BOS, then the stream from each start."""
    rows = [ids[start : start + SEQ_LEN - 1] for start in starts]
    return torch.nn.functional.pad(torch.stack(rows), (1, 0), value=SHARED["bos_token_id"])


def build(name) -> LlamaForCausalLM:
    """The untrained network of that name, seeded."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return LlamaForCausalLM(LlamaConfig(**SHARED, **ARCHITECTURES[name]))


def train(name, ids, steps, *, planned_steps=None, report=None):
    """AdamW with a cosine schedule over `planned_steps`; returns the network and its losses."""
    network, planned = build(name).train(), planned_steps or steps
    generator = torch.Generator().manual_seed(SEED)
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / planned))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1, (step + 1) / WARMUP) * (0.02 + 0.98 * cosine)
        starts = torch.randint(len(ids) - SEQ_LEN, (BATCH_SIZE,), generator=generator)
        rows = windows(ids, starts.tolist())
        loss = network(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if report:
            report(step, losses)
    return network.eval(), losses


@torch.no_grad()
def held_out_loss(network, ids) -> float:
    """Mean negative log-likelihood in nats per token over consecutive windows."""
    rows = windows(ids, range(0, len(ids) - SEQ_LEN + 2, SEQ_LEN - 1))
    return sum(network(row[None], labels=row[None]).loss.item() for row in rows) / len(rows)


def unigram_entropy(train_ids, held_out_ids) -> float:
    """Nats per held-out token under the training frequencies (+1): -mean log p(token)."""
    counts = torch.bincount(train_ids, minlength=VOCAB_SIZE).double() + 1
    return -(counts / counts.sum()).log()[held_out_ids].mean().item()


def held_out_text(texts) -> str:
    """The start of each held-out file, cut at a line end, one after the other."""
    heads = (texts[name][:HELD_OUT_BYTES].rpartition("\n")[0] for name in HELD_OUT)
    return "\n".join(heads) + "\n"


def train_and_save(name, ids, sample_ids, steps, out) -> dict:
    """Train one of the pair in this process; returns what the model card says of it."""
    torch.set_num_threads(1)
    started = time.perf_counter()

    def report(step, losses):
        if (step + 1) % 50 == 0:
            mean, elapsed = sum(losses[-50:]) / 50, time.perf_counter() - started
            print(f"{name} {step + 1}/{steps}: {mean:.3f} nats, {elapsed:.0f} s", flush=True)

    network, _ = train(name, ids, steps, report=report)
    network.save_pretrained(out / name)
    return {
        "parameters": network.num_parameters(),
        "steps": steps,
        "seconds": round(time.perf_counter() - started),
        "held_out_loss_nats": held_out_loss(network, sample_ids),
        "losses_of_first_steps_on_held_out": train(name, sample_ids, 6, planned_steps=STEPS[name])[
            1
        ],
    }


def main(out, steps):
    texts = corpus()
    sample = held_out_text(texts)
    training = [text for name, text in texts.items() if name not in HELD_OUT]
    tokenizer = train_tokenizer(training)
    ids, sample_ids = stream(tokenizer, training), stream(tokenizer, [sample])
    (out / "held_out.txt").write_text(sample, encoding="utf-8")
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = {
            name: pool.submit(train_and_save, name, ids, sample_ids, steps or STEPS[name], out)
            for name in ARCHITECTURES
        }
        facts = {name: job.result() for name, job in jobs.items()}
    for name in ARCHITECTURES:
        tokenizer.save_pretrained(out / name)
    record = {
        "corpus": f"CPython {platform.python_version()} standard library",
        "corpus_sha256": hashlib.sha256("\0".join(training).encode()).hexdigest(),
        "n_files": len(training),
        "n_bytes": sum(len(text.encode()) for text in training),
        "n_tokens": len(ids),
        "n_held_out_tokens": len(sample_ids),
        "unigram_entropy_nats": unigram_entropy(ids, sample_ids),
        "seed": SEED,
        "batch_size": BATCH_SIZE,
        "seq_len": SEQ_LEN,
        "torch": torch.__version__,
        "models": facts,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--steps", type=int, help="fewer for a trial run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    main(arguments.out, arguments.steps)
