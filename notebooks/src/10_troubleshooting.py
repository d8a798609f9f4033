# %% [markdown]
# # 10 · From symptom to cause
#
# **Question.** Something is off after an optimisation. What is it, how is it told from what looks
# alike, and what removes it?

# %% [markdown]
# **What you will learn**: seven symptoms, each made to happen, diagnosed by a measurement, and
# removed. In each section the cells end in asserts: the symptom's would fail if nothing were wrong,
# the remedy's would fail without the remedy.
#
# **What you need**: two CPU cores, about two minutes, no network.
#
# | symptom | usual cause | what to measure first |
# |---|---|---|
# | 1 large differences | other settings, then another computation | settings, greedy, layer by layer |
# | 2 answers change with the load | batch-shape arithmetic; or memory ran short | the same in float32 |
# | 3 speculation departs from the target | a wrong rule, never a poor draft | the exact law |
# | 4 more memory than estimated | the batch; query heads taken for KV heads | bytes of a real cache |
# | 5 slower after optimising | too little accepted, or too small a batch | cost against gain |
# | 6 high similarity, worse answers | similarity decides nothing | items, by scenario |
# | 7 now and then NaN | overflow in half precision | the first part that is not finite |

# %%
import warnings
from dataclasses import replace

import pandas as pd
import torch

from lossless_lab import Decoding, compare_layers, figures, kv_cache_bytes, models, mutants, plots
from lossless_lab import prompts as prompt_files
from lossless_lab.engines import TransformersEngine
from lossless_lab.engines.protocol import complete
from lossless_lab.mutants.speculative import SPECULATIVE_MUTANTS
from lossless_lab.pipeline import speed_up
from lossless_lab.semantic.tasks import answer_scores
from lossless_lab.semantic.text import similarity
from lossless_lab.statistical.speculative import acceptance, expected_tokens, output_law

# %% tags=["parameters"]
MODEL = "tiny-target"
DRAFT = "tiny-draft"
N_PROMPTS = 16
N_TOKENS = 24

# %%
model, draft = models.load(MODEL), models.load(DRAFT)
with warnings.catch_warnings(action="ignore"):  # long prompts are left out on purpose
    asked = prompt_files.tokenize(prompt_files.read(), model, max_prompt_tokens=96)[:N_PROMPTS]
rows = {prompt.id: list(prompt.ids) for prompt in asked}
greedy = Decoding(max_new_tokens=N_TOKENS)
pd.options.display.float_format = "{:.3g}".format
print(f"{model}, {len(rows)} prompts, {N_TOKENS} new tokens")


# %%
def outputs(engine, decoding=greedy, ids=rows):
    done = (c for _, batch in complete(engine, [*ids.values()], decoding) for c in batch)
    return dict(zip(ids, done, strict=True))


def differing(one, two):
    return [name for name in one if one[name].output_ids != two[name].output_ids]


reference = outputs(TransformersEngine(model, keep_logits=True))

# %% [markdown]
# ## 1 · Large differences after an optimisation
#
# **Symptom.** A new build comes with a repetition penalty in its settings, and one of its layers
# adds its residual at half strength. Two faults at once, as in real life.

# %%
network = mutants.MUTANTS["residual"].apply(model, dose=0.5, layer=2)
build = TransformersEngine(replace(model, name="new build", network=network))
penalised = Decoding(max_new_tokens=N_TOKENS, repetition_penalty=1.3)

# %%
after = differing(reference, outputs(build, penalised))
print(f"{len(after)} of {len(rows)} answers differ")
assert len(after) > len(rows) / 2

# %% [markdown]
# **Diagnosis, in this order.** First make the settings equal, or everything after it compares
# settings: alone, the penalty changes as many answers. `check` refuses runs whose settings differ.

# %%
by_settings = differing(reference, outputs(TransformersEngine(model), penalised))
by_build = differing(reference, outputs(build))
print(f"the penalty alone: {len(by_settings)}; the build alone, greedy: {len(by_build)}")
assert by_settings and by_build

# %% [markdown]
# What is left under greedy decoding is another computation. Layer by layer, side by side on the
# same ids, the first difference names the place.

# %%
ids = torch.tensor([next(iter(rows.values()))])
drift = compare_layers(model, network, ids)
print(drift)
residual = drift.to_frame().query("module == 'residual'")
assert residual.query("rms_difference > 0")["layer"].min() == 2

# %%
ax = plots.layer_drift(residual, ax=plots.axes())
print(figures.save(ax.figure, "10_layers", residual, {"model": MODEL, "fault": "layer 2"}))

# %% [markdown]
# **Remedy.** The layer's residual restored (here: the network loaded anew) and the settings equal:
# nothing differs.

# %%
assert not differing(reference, outputs(TransformersEngine(models.load(MODEL))))

# %% [markdown]
# ## 2 · Answers change with the load
#
# **Symptom.** In bf16 the same prompt gives other logits alone than in a batch of eight. Widely
# said: "continuous batching is unstable because memory runs short". **Prediction.** If it is
# arithmetic, the logits move a little everywhere, and in float32 by a thousandth of that.


# %%
def by_dtype(size):
    engines = {
        dtype: TransformersEngine(
            models.load(MODEL, dtype=dtype), keep_logits=True, batch_size=size
        )
        for dtype in ("bfloat16", "float32")
    }
    return {dtype: outputs(engine) for dtype, engine in engines.items()}


alone, together = by_dtype(1), by_dtype(8)

# %%
moved = {
    dtype: max(float((alone[dtype][n].logits[0] - together[dtype][n].logits[0]).abs().max())
               for n in rows)
    for dtype in alone
}  # fmt: skip
answers = {dtype: len(differing(alone[dtype], together[dtype])) for dtype in alone}
print(f"largest change of a first logit: {moved}; answers that differ: {answers}")
assert moved["bfloat16"] > 0

# %% [markdown]
# **Remedy.** Compute in float32, or keep the batch's shape, or use batch-invariant kernels.

# %%
assert answers["float32"] == 0 and moved["float32"] < moved["bfloat16"] / 100

# %% [markdown]
# **What looks alike.** Memory that runs short leaves other traces: requests that stop early
# (`finish_reason`), that are preempted and computed again, or that are refused. It can be
# predicted: the cache of so many sequences against what is free.

# %%
free = 2 * 2**20
held = pd.DataFrame(
    {"sequences": n, "cache_bytes": kv_cache_bytes(model.network.config, seq_len=120,
                                                   batch_size=n, dtype="float32").bytes}
    for n in (1, 4, 8, 16)
)  # fmt: skip
held["fits_in_2_MiB"] = held["cache_bytes"] <= free
print(held.to_string(index=False))
assert {c.finish_reason for c in together["float32"].values()} <= {"length", "stop"}

# %% [markdown]
# ## 3 · Speculation departs from the target
#
# **Symptom.** After a rejection this engine draws from the target's law instead of the residual, as
# a popular description has it. The prediction of many: a better draft will cure it.

# %%
ids = torch.tensor([next(iter(rows.values()))])
with torch.no_grad():
    target_probs, draft_probs = (
        m.network(ids).logits[0].double().softmax(-1).numpy() for m in (model, draft)
    )
broken = SPECULATIVE_MUTANTS["resample-from-target"].build(1.0)
tv = abs(output_law(target_probs, draft_probs, rule=broken) - target_probs).sum(-1) / 2
print(f"TV to the target: median {pd.Series(tv).median():.3f}, worst {tv.max():.3f}")
assert tv.max() > 0.01

# %% [markdown]
# **Diagnosis.** The exact law of the rule, with a draft as poor as can be: the uniform law. The
# right rule accepts little and changes nothing. A poor draft only slows.

# %%
poor = draft_probs * 0 + 1 / draft_probs.shape[-1]
right = abs(output_law(target_probs, poor) - target_probs).max()
print(
    f"uniform draft: accepted {acceptance(target_probs, poor).mean():.3f}, law off by {right:.0e}"
)
assert acceptance(target_probs, poor).mean() < 0.2

# %% [markdown]
# **Remedy.** Draw from the normalised positive part of target − draft.

# %%
assert right < 1e-12

# %% [markdown]
# ## 4 · More memory than estimated
#
# **Symptom.** The estimate was made for one sequence; eight are served.

# %%
estimate = kv_cache_bytes(model.network.config, seq_len=64, dtype="float32").bytes
with torch.no_grad():
    cache = model.network(torch.ones(8, 64, dtype=torch.long), use_cache=True)["cache"]
measured = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
print(f"estimated {estimate:,} B, measured {measured:,} B: × {measured / estimate:g}")
assert measured > estimate

# %% [markdown]
# **What looks alike.** The other classic error goes the other way: query heads taken for KV heads.

# %%
config = model.network.config
by_heads = estimate * config.num_attention_heads // config.num_key_value_heads
print(f"with query heads the estimate would be × {by_heads / estimate:g}, and still wrong")

# %% [markdown]
# **Remedy.** State the batch; the prediction is then exact, to the byte.

# %%
exact = kv_cache_bytes(model.network.config, seq_len=64, batch_size=8, dtype="float32").bytes
assert exact == measured

# %% [markdown]
# ## 5 · Slower after optimising
#
# **Symptom.** Speculation with five drafts per round, and the server is slower. A round costs one
# pass of the target and γ of the draft, and yields 1 + α + α² + … tokens. **Prediction.** With an
# acceptance α of .3 and a draft that costs a third of the target, five drafts lose.


# %%
def gain(alpha, gamma, cost):
    return expected_tokens([alpha] * gamma) / (gamma * cost + 1)


# %%
print(f"γ = 5: × {gain(0.3, 5, 1 / 3):.2f}")
assert gain(0.3, 5, 1 / 3) < 1

# %% [markdown]
# **Remedy.** Fewer drafts, a cheaper draft or a better one: the best γ from the measured acceptance.
# With a draft at a twentieth of the cost and α = .8, five drafts pay.

# %%
best = max(range(6), key=lambda g: gain(0.3, g, 1 / 3))
print(
    f"best γ for the first: {best} (× {gain(0.3, best, 1 / 3):.2f}); second: × {gain(0.8, 5, 0.05):.2f}"
)
assert gain(0.3, best, 1 / 3) >= 1 and gain(0.8, 5, 0.05) > 2

# %% [markdown]
# The same holds for every optimisation with a fixed cost. Here batching, measured on this machine
# in turn; how much it gains depends on model and batch, so find the crossover before you ship.

# %%
few = [list(ids) for ids in list(rows.values())[:8]]
speed_up(model, {f"batch-{n}": f"batch-{n}" for n in (2, 8)}, few, Decoding(max_new_tokens=8))

# %% [markdown]
# ## 6 · High similarity, worse answers
#
# **Symptom.** Mean text similarity is .97, and users complain.

# %%
before = {
    "tracking": "Your order 4821 was sent on 3 May.",
    "chat": "Happy to help, have a nice day!",
    "stock": "We have 12 lamps left in Oslo.",
    "thanks": "Thank you for your patience.",
}
now = before | {
    "tracking": "Your order 4827 was sent on 8 May.",
    "stock": "We have 72 lamps left in Oslo.",
}
mean = sum(similarity(before[k], now[k]) for k in before) / len(before)
print(f"mean similarity {mean:.3f}")
assert mean > 0.95

# %% [markdown]
# **Remedy.** Ask what the answer is for, scenario by scenario: the facts in it, not its letters.

# %%
facts = {"tracking": "4821", "stock": "12"}
found = {k: answer_scores(now[k], [right])["recall"] for k, right in facts.items()}
print(f"facts still right: {found}")
assert sum(found.values()) == 0

# %% [markdown]
# ## 7 · Now and then NaN
#
# **Symptom.** In fp16 one MLP's activations are so large that they overflow for some prompts only.

# %%
half = models.load(MODEL, dtype="float16")
fragile = mutants.MUTANTS["overflow"].apply(half, dose=2400.0, layer=2)
engine = TransformersEngine(replace(half, name="fragile", network=fragile), keep_logits=True)
crashing = outputs(engine)

# %%
bad = [name for name, c in crashing.items() if not torch.isfinite(c.logits).all()]
print(f"{len(bad)} of {len(rows)} prompts: {bad}")
assert 0 < len(bad) < len(rows)

# %% [markdown]
# **Diagnosis.** The first part that is not finite on such a prompt and its answer, looked for before
# anything is averaged.

# %%
whole = [*rows[bad[0]], *crashing[bad[0]].output_ids]
drift = compare_layers(half, fragile, torch.tensor([whole]))
print(drift)
assert "layer 2" in str(drift) and "non-finite" in str(drift)

# %% [markdown]
# **Remedy.** Compute that part in a wider format. Until then a guard: record the prompts whose
# logits are not finite, and run those again on the reference.


# %%
def guarded(candidate, fallback, ids):
    done = outputs(candidate, ids=ids)
    rerun = {n: ids[n] for n, c in done.items() if not torch.isfinite(c.logits).all()}
    return done | (outputs(fallback, ids=rerun) if rerun else {}), sorted(rerun)


safe, recorded = guarded(engine, TransformersEngine(model, keep_logits=True), rows)
print("run again on the reference:", recorded)
assert recorded == sorted(bad) and all(torch.isfinite(c.logits).all() for c in safe.values())
assert all(safe[name].output_ids == reference[name].output_ids for name in bad)

# %% [markdown]
# ## Verdict
#
# Seven symptoms, seven measurements: each cause was told from what looks alike, by settings, dtype,
# exact law, bytes, cost, facts or the first part that is not finite, and each remedy removed its
# symptom on this model. What was not shown: real servers under load (notebooks 06 and 08, to come),
# GPUs, and causes that are not in the table.
#
# ## Exercises
#
# 1. A batch of 8 in bf16 changes 1 answer in 16; in float32 none. Bug or arithmetic?
# 2. Speculation is slow *and* its texts differ from the target's under greedy decoding in float32.
#    Is one draft model to blame for both?
# 3. Why does the guard rerun on the reference and not on the candidate?
#
# <details><summary>Answers</summary>
#
# 1. Arithmetic: in float32 the same program agrees. A bug in masks or positions would stay.
# 2. No. The draft explains the speed; different texts in float32 mean a wrong rule or stale state.
# 3. The same input overflows again: nothing random is involved.
#
# </details>
#
# ## Sources
#
# vllm issues 7627 and 5313, transformers 30042 (greedy divergence reported as bugs); transformers
# 47932 and DeepSpec 31 (the law in the ratio); LMCache 688 (heads); pytorch 103749 (NaN rows);
# Leviathan et al. 2023 for the gain of speculation.
