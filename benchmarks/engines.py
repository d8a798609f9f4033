"""What the engine adds to `generate`: the same batch of SmolLM2, or of the tiny pair without it."""

import torch

from benchmarks import Measurement, interleaved
from lossless_lab import Decoding, TransformersEngine, load, models, prompts


def bench() -> list[Measurement]:
    """Greedy decoding of eight ragged prompts, through the engine and called directly."""
    model = load("smollm2" if models.is_present("smollm2") else "tiny-target")
    asked = prompts.tokenize(prompts.read()[:8], model)
    rows = [list(p.ids) for p in asked]
    decoding = Decoding(max_new_tokens=16, stop_token_ids=())
    engine = TransformersEngine(model, batch_size=len(rows))
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])

    def bare():
        with torch.no_grad():
            return model.network.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=16,
                min_new_tokens=16,
                do_sample=False,
                pad_token_id=0,
            )

    took = interleaved({"engine": lambda: engine.generate(rows, decoding, seed=0), "bare": bare})
    return [
        Measurement(
            name=f"generate 8 x 16 tokens, {model.name}",
            seconds=took["engine"],
            alternative="model.generate",
            alternative_seconds=took["bare"],
            limit=1.05,
        )
    ]
