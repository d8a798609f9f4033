# %% [markdown]
# # 04 · What does each number format cost, in which layers, on which inputs?
#
# **Question.** Weights are stored in 8, 4 or fewer bits. How far does that move the model's laws,
# is the tail worse than the mean, which matrices are to blame, and which inputs suffer?

# %% [markdown]
# **What you will learn**
#
# - to round a row of weights by hand, and what a *scale* and a *group* are;
# - to read the cost of a format in nats (KL) and in probability (TV), with error bars that respect
#   that the tokens of one document go together;
# - why the mean hides the tail, and a share of flipped tokens hides both;
# - which matrices cost most, and why the answer depends on how the question is put;
# - why a model that was quantised before looks better than it is;
# - what activations, the KV cache, pruning and merged adapters cost on the same scale, and when a
#   compressed cache was not even read;
# - what is left to say when a server gives 20 log-probabilities a token, or when the model to be
#   judged is gone and its hidden states were kept;
# - what training on the failures themselves repairs, and what it breaks.
#
# **What you need**: two CPU cores, about four minutes, no network. Unless a kernel is named, the
# quantization is *simulated*: values are rounded to the format and multiplied in float32, so this
# is the error of the format alone. Nothing here becomes smaller or faster. Linear layers alone are
# rounded; the embeddings, and the head that is tied to them, stay as they are.

# %%
import json
from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch
from IPython.display import Markdown

from lossless_lab import check, figures, models, number_formats, panels, paths, plots, twin
from lossless_lab.engines import Decoding, TransformersEngine

# %%
from lossless_lab.mutants.quantization import quantization_mutants
from lossless_lab.optimizations import adapters, kv_compression
from lossless_lab.optimizations.activations import calibrate, static
from lossless_lab.optimizations.pruning import sparsity
from lossless_lab.optimizations.quantization import already_on_grid, linears, unlike_rounding
from lossless_lab.pipeline import FormatCosts, compare_on
from lossless_lab.pipeline.failures import described, export_failures, worst_tokens
from lossless_lab.pipeline.hidden_record import HiddenRecord, record_states
from lossless_lab.pipeline.top_k import compare_top_k
from lossless_lab.plots.quantization import cost_curves, flips_against_kl
from lossless_lab.prompts import read_documents
from lossless_lab.runs import record
from lossless_lab.statistical.slices import concentration, slices
from lossless_lab.statistical.summary import distance_summary
from lossless_lab.stats.intervals import cluster_mean_interval, mean_limits

# %% [markdown]
# `FORMATS` are names of `number_formats.FORMATS`, by bits of a code, not strictly by bits with
# scales; `CLOSER` is the one that is looked into. The corpus is the project's own: 157 short
# documents, English, Chinese and code. `N_COMPARED` of them judge what is not a format of weights,
# `N_MAPPED` each single matrix.

# %% tags=["parameters"]
MODEL = "tiny-target"
FORMATS = ("int8-channel", "fp8-e4m3-channel", "int4-group32", "int4-group128", "int4-channel",
           "nf4", "mxfp4", "nvfp4", "int3-group64", "int2-group32")  # fmt: skip
CLOSER = "int4-group128"
MAX_TOKENS = 96
N_MAPPED = 10
N_COMPARED = 32
N_STEPS = 120

# %%
model = models.load(MODEL)
documents = read_documents()
costs = FormatCosts(model, documents, formats=FORMATS, max_tokens=MAX_TOKENS)
stamp = {"model": MODEL, "documents": len(documents), "max_tokens": MAX_TOKENS}
pd.options.display.float_format = "{:.3g}".format
print(model, stamp, sep="\n")

# %% [markdown]
# ## One row of weights, by hand
#
# Symmetric 4-bit integers are −7 … 7. The *scale* is chosen so that the largest weight of a group
# lands on ±7: for [0.7, −0.28, 0.05, 0.14] it is 0.7 / 7 = 0.1. **Prediction.** The codes are
# 7, −3, 0, 1, so the weights come back as 0.7, −0.3, 0, 0.1.

# %%
row = torch.tensor([[0.7, -0.28, 0.05, 0.14]])
by_hand = torch.tensor([[0.7, -0.3, 0.0, 0.1]])
assert torch.allclose(number_formats.round_to(row, "int4-channel"), by_hand)

# %% [markdown]
# One outlier spoils the scale of all weights that share it; that is what groups are for. Here the
# same small weights stand once beside a weight of 7, and once in a group of their own.

# %%
small = torch.full((1, 32), 0.3)
outlier = torch.cat([small, torch.full((1, 32), 7.0)], 1)
formats = ("int4-channel", "int4-group32")
{name: float(number_formats.round_to(outlier, name)[0, 0]) for name in formats}

# %% [markdown]
# **Read back.** With one scale for the row, 0.3 is less than half a step of 1 and becomes 0. In its
# own group it survives. A smaller group costs bits: a 16-bit scale for 32 weights is half a bit
# for each.
#
# ## The ladder of formats
#
# Each format is put into the model, and both models read the corpus side by side. At each token the
# two laws are compared: KL(reference‖candidate) in nats, the direction that llama.cpp prints.
#
# **Prediction.** Symmetric integers of 4, 3 and 2 bits have 7, 3 and 1 steps on either side, so the
# rounding error grows by 7/3 and by 3. KL is quadratic in small errors: its cost grows by
# (7/3)² = 5.4 and by 3² = 9, or less where the groups become smaller.

# %%
ladder = costs.ladder()
ladder

# %% [markdown]
# `bits_per_weight` counts codes and scales of the linear layers, not the embeddings. `saturated` is
# the share of weights beyond what their scale can hold: none where scales are exact, some where
# they are powers of two (mxfp4) or rounded down. `n_exercised` counts the tokens whose law moved at
# all: with 0, as for weights that lay on the grid before, a cost of 0 would be no evidence.
#
# To know what is *nothing*, the noise floor: an equivalent twin of the model, the same function
# with its sums in another order, and the model in bf16.

# %%
harmless = compare_on(model, twin(model, seed=0), documents, max_tokens=MAX_TOKENS, progress=False)
floor = float(harmless["kl_reference_candidate_nats"].mean())
half = models.load(MODEL, dtype="bfloat16")
bf16 = distance_summary(compare_on(model, half, documents, max_tokens=MAX_TOKENS, progress=False))
print(f"mean KL of a twin {floor:.1e}, of bf16 {bf16.value('mean KL(reference‖candidate)'):.1e}")

# %%
floors = {"harmless twin": floor, "bf16": bf16.value("mean KL(reference‖candidate)")}
ax = plots.format_ladder(ladder, ax=plots.axes(preset="double"), floors=floors)
print(figures.save(ax.figure, "04_ladder", ladder, stamp, preset="double"))

# %% [markdown]
# **Read back.** Weights in 8-bit integers move the laws of this model less than computing in bf16
# does. The bars are 95 % intervals over documents. On the mean, groups of 128 (.0149) are no better
# here than one scale for a row (.0139). By language, in nats:

# %%
KL = "kl_reference_candidate_nats"
pair = ("int4-group128", "int4-channel")
pd.DataFrame({name: costs.positions(name).groupby("language")[KL].mean() for name in pair})

# %% [markdown]
# **Read back.** On English and code the groups do help (.011 against .012). On Chinese, which this
# model never learnt, they cost more (.024 against .017), although the weights themselves err less
# (`weights_sqnr_db` in the ladder). Now from four bits (groups of 32) to three (64) to two (32),
# beside the prediction:

# %%
kl = ladder.set_index("format")["mean_kl_nats"]
three = costs.summary("int3-group32").value("mean KL(reference‖candidate)")
for middle in (kl["int3-group64"], three):
    steps = middle / kl["int4-group32"], kl["int2-group32"] / middle
    print("cost of a bit: × {:.1f} and × {:.1f}, predicted 5.4 and 9".format(*steps))

# %% [markdown]
# **Read back.** 5.4 fails (more was measured), as groups grew from 32 to 64, which the prediction
# forgot; of 9 there is less, as it allowed for: groups shrank again. The second line is at equal
# groups of 32: a bit costs about × 5 and × 11, the latter where errors are no longer small.
#
# ## Every statistic, with honest error bars
#
# The tokens of one document are alike, so they are not independent evidence. `iid_se` is the error
# that counts them as if they were, which is what llama.cpp prints; the interval is over documents.

# %%
summary = costs.summary(CLOSER)
table = summary.frame.set_index("statistic")
names = ["mean KL(reference‖candidate)", "mean TV", "same top token", "mean Δp", "ln PPL ratio"]
shown = table.loc[names].copy()
shown["interval / naive"] = (shown["high"] - shown["low"]) / (2 * 1.96 * shown["iid_se"])
shown

# %% [markdown]
# **Read back.** Where the last column is 2, the naive error bar is half as long as it should be;
# for the mean KL and TV here it is four to six times too short, and what it calls significant may
# not be. How often does each interval hold the true value? Simulated with tokens that go together,
# 2,000 times each; 95 % is what they promise:

# %%
coverage = pd.read_csv(paths.DATA / "calibration" / "coverage.csv")
intervals = ["token mean of KL", "iid of KL", "one-sided bound, skewness removed"]
coverage.pivot(index="interval", columns="n_documents", values="covered").loc[intervals]

# %%
try:
    cluster_mean_interval([0.01] * 29)
except ValueError as refusal:
    print(refusal)

# %% [markdown]
# **Read back.** Over documents, nearly 93 % from 128 on and 90 % at 32; over tokens, under half at
# any number: more documents do not help an error bar of the wrong unit. The third row is the bound
# that decides level 2 below. Under 30 documents there is no interval at all.
#
# And now the tail, for KL and for Δp, the change in probability of the token that really
# came next:

# %%
tail = [f"{q} KL(reference‖candidate)" for q in ("median", "95 %", "99 %", "99.9 %", "maximum")]
tail += [f"{q} Δp" for q in ("99 %", "median", "1 %", "minimum")]
table.loc[tail, ["value", "low", "high", "unit"]]

# %%
chosen = [CLOSER, "int8-channel", "int2-group32"]
every = pd.concat([costs.positions(name).assign(candidate=name) for name in chosen])
ax = plots.kl_tail(every, ax=plots.axes())
columns = ["candidate", "document", "position", "kl_reference_candidate_nats"]
print(figures.save(ax.figure, "04_tail", every[columns].iloc[::10], stamp))

# %% [markdown]
# The curve's CSV holds every tenth position, to keep it small. The same for what a reader loses:
# the probability that the token which really came next had, and has no more.

# %%
pairs = np.exp(every["reference_logprob"]), np.exp(every["candidate_logprob"])
every["probability_lost"] = pairs[0] - pairs[1]
lost = {"quantity": "probability_lost", "smallest": 1e-6}
lost["label"] = (
    "probability lost by the next token (log scale;\ngains and losses below 1e-6 at the left edge)"
)
ax = plots.kl_tail(every, ax=plots.axes(), **lost)
kept_columns = [*columns[:3], "probability_lost", columns[3]]
print(figures.save(ax.figure, "04_lost", every[kept_columns].iloc[::10], stamp))
print((every["probability_lost"] < 1e-6).groupby(every["candidate"]).mean())

# %% [markdown]
# **Read back.** At most places the next token gained, or lost less than a millionth: these stand in
# the wall at the left edge. The means in the legend are over all places, gains counted as negative.

# %% [markdown]
# ## Twenty log-probabilities a token
#
# A server seldom gives the whole law, but its 20 likeliest tokens. What the lists leave out is
# unknown, so the KL is bounded from below: tokens that both lists name count by themselves, all
# others as one. **Prediction.** The bound grows with the length of the list, and with all tokens in
# it, it is the KL. Both sides answer 32 prompts; laws are compared while the answers agree.

# %%
asked = {d.id: costs.ids(d.id)[:24] for d in documents[::5]}
answer = {"decoding": Decoding(max_new_tokens=12), "progress": False}
bounds = []
for k in (1, 5, 20, model.network.config.vocab_size):
    with TemporaryDirectory() as folder:
        for name, network in (("a", model.network), ("b", costs.network(CLOSER))):
            engine = TransformersEngine(network, batch_size=32, top_logprobs=k)
            record(f"{folder}/{name}", engine, asked, **answer)
        found = compare_top_k(f"{folder}/a", f"{folder}/b")
    bounds.append((k, *found[["kl_at_least_nats", "covered_mass"]].mean()))

# %%
lists = pd.DataFrame(bounds, columns=["listed", "kl_at_least_nats", "covered_mass"])
lists.assign(share_of_kl=lists["kl_at_least_nats"] / lists["kl_at_least_nats"].iloc[-1])

# %% [markdown]
# **Read back.** Never negative, never above the KL of the last row, which needs the whole law. Twenty
# tokens show .70 of it here, five .43. The sum over shared tokens alone, without the cell for all
# others, is no bound: it can turn negative.
#
# ## A model that is gone
#
# llama.cpp keeps the reference's log-probabilities on file, 2 bytes for each of the vocabulary and 8
# more: 37 GiB for Llama-3 on one test set, by its own documentation. The final hidden states say
# the same in less, since the head makes exact logits of them. Here those of the rounded model are
# kept, and judged afterwards with the head of the original, which rounding left alone:

# %%
later = replace(model, network=costs.network(CLOSER), name=CLOSER)
reading = {"max_tokens": MAX_TOKENS}
apart, live = {}, costs.positions(CLOSER)[KL]
with TemporaryDirectory() as folder:
    for dtype in ("float32", "float16", "bfloat16"):
        path = f"{folder}/{dtype}.safetensors"
        print(record_states(path, later, documents, dtype=dtype, **reading))
        judged = HiddenRecord(path, model)
        frame = compare_on(model, judged, documents, progress=False, **reading)
        apart[dtype] = frame[KL].mean() / live.mean() - 1, (frame[KL] - live).abs().max()
pd.DataFrame(apart, index=["relative change of the mean KL", "largest change of a token's (nats)"])

# %%
own = model.network.config
shapes = {
    MODEL: (own.hidden_size, own.vocab_size),
    "SmolLM2-135M": (576, 49152),
    "Llama-3-8B": (4096, 128256),
}
sizes = {
    name: {"logits in float32": 4 * v, "llama.cpp's file": 2 * (v + 4), "states in 16 bits": 2 * d}
    for name, (d, v) in shapes.items()
}
n_tokens = 37 * 2**30 / sizes["Llama-3-8B"]["llama.cpp's file"]
print(f"{n_tokens:,.0f} tokens of 37 GiB: "
      f"{n_tokens * sizes['Llama-3-8B']['states in 16 bits'] / 2**30:.1f} GiB of states")  # fmt: skip
pd.DataFrame(sizes).T.assign(unit="bytes a token")

# %% [markdown]
# **Read back.** In float32 the comparison is the live one bit by bit. In 16 bits the floor is 2e−8
# nats in float16 and 1.3e−6 in bfloat16, where the format itself costs .015. A single token's KL
# moves by more than the floor, as it changes in first order, and the mean hardly does. Of
# Llama-3-8B, 155,000 tokens take 1.2 GiB in place of 37. The record belongs to its tokens and its
# head: other ids, another vocabulary or a head with any other weight are refused.
#
# llama.cpp's speed was measured apart from this notebook: its library, as llama-cpp-python 0.3.36
# carries it, built for this CPU, and those functions of `llama-perplexity` that write and read its
# file, in a short driver, since the tool itself was not built. SmolLM2 from its Q4_1 file, two
# windows of 512 tokens, of each the second half scored; one thread, twice, in CPU time, as the
# machine was shared. Reading took 6.3 to 6.6 ms a token (transformers with the same weights in
# float32: 4.1); writing and judging took .76 ms a scored token (every statistic here: .80 to .90).
# The model against itself came out at a mean KL of −2.6e−7 there, below what a KL can be.
#
# ## On which inputs?
#
# The same cost by kind of token: what it is, how frequent, where it stands. Each kind is compared
# with all other tokens, documents as units, and the p-values are corrected for their number (Holm).
# **Prediction.** Rare tokens cost more: the model is less sure there, and the law has more to lose.
# It fails on this model; look for the kind that does cost more.

# %%
positions = described(costs.positions(CLOSER).drop(columns=["kind", "language"]), model, documents)
kinds = [slices(positions, "frequency").rename(columns={"frequency": "tokens"})]
kinds += [slices(positions, by).rename(columns={by: "tokens"}) for by in ("token_class", "place")]
pd.concat(kinds)[["tokens", "n_tokens", "mean", "low", "high", "difference", "holm_pvalue"]]

# %% [markdown]
# **Read back.** What costs most *on the mean* are parts of characters: this model spells a Chinese
# character in bytes. What does it expect there?

# %%
parts = positions[positions["token_class"] == "part of a character"]
expected = parts["reference_top_id"].map(lambda i: repr(model.tokenizer.decode([i])))
print(parts["language"].value_counts(), expected.value_counts(normalize=True).head(2), sep="\n")

# %% [markdown]
# **Read back.** All are Chinese, which this model never learnt: at 96 % of these places it expects a
# newline. Do the worst tokens gather in that language? Each document's share of tokens among the
# worst 5 % is compared with what chance would give if languages were dealt to documents at random.
# A p of 0.0001 is the least that this number of random deals can show: read it as p ≤ 0.0001.

# %%
gathered = concentration(positions, "language", rng=np.random.default_rng(0))
print(gathered)
gathered.frame

# %% [markdown]
# And the very worst tokens, with what stood before them. **What to look for:** whether they are of
# the kind that costs most on the mean.

# %%
worst = worst_tokens(positions, model, documents, n=6)
worst

# %% [markdown]
# **Read back.** None of the six is Chinese. The mean and the extreme are different questions:
# most parts of a character lose a little more than other tokens do (hence the mean, and the worst
# 5 %), while five of the six largest losses are at words broken in two, `hol|d` or `Ring|B`.
#
# What failed can be written down beside the reference's own continuation, a pair that a library for
# preference tuning reads. Where both sides go on alike there is no pair. At two bits, further down,
# such failures are trained on.

# %%
failures = export_failures(
    figures.paths.FIGURES / "04_failures.jsonl", positions, model, costs.network(CLOSER), documents,
    n=8, n_tokens=12,
)  # fmt: skip
failures[["document", "position", "completion", "rejected"]]

# %% [markdown]
# ## Flips are a poor measure
#
# A flip needs a near tie. Per document, the share of flipped top tokens against the mean KL:

# %%
flips = positions.assign(flip=~positions["top1_agree"]).groupby("document")
per_document = flips[["flip", "kl_reference_candidate_nats"]].mean()
correlation = per_document.corr("spearman").iloc[0, 1]
print(f"rank correlation of flips and KL over documents: {correlation:.2f}")
per_document["kind"] = positions.groupby("document")["language"].first()
for kind, rows in per_document.groupby("kind"):
    print(f"  within {kind}: {rows[['flip', KL]].corr('spearman').iloc[0, 1]:.2f}")

# %%
ax = flips_against_kl(per_document, ax=plots.axes())
print(figures.save(ax.figure, "04_flips", per_document.reset_index(), stamp))

# %% [markdown]
# **Read back.** The two need not even agree in sign. Over all documents the rank correlation is −.56,
# within a language −.07 to +.39: Chinese is moved most and flips least, since its top token is the
# same newline nearly everywhere.
#
# ## Which matrices?
#
# Two questions that sound alike: what does quantising *this one alone* cost, and what would
# restoring *this one alone* save? The difference is how errors of different matrices add up.

# %%
sensitivity = costs.sensitivity(CLOSER, n_documents=N_MAPPED)
ax = plots.sensitivity_map(sensitivity, ax=plots.axes())
print(figures.save(ax.figure, "04_sensitivity", sensitivity, stamp))

# %%
both = sensitivity[["mean_kl_nats", "saved_nats"]]
rank = both.corr("spearman").iloc[0, 1]
whole = float(sensitivity["saved_nats"].iloc[0] + sensitivity["restored_kl_nats"].iloc[0])
print(f"rank correlation of the two views {rank:.2f}; alone they add up to "
      f"{sensitivity['mean_kl_nats'].sum() / whole:.2f} of the whole cost")  # fmt: skip
sensitivity.nlargest(4, "mean_kl_nats")

# %% [markdown]
# **Read back.** The map shows each matrix alone. The first layer's queries and values cost most,
# .0034 and .0029 of a whole cost of .015, and the last column of the table, what restoring them
# saves, says so too. Where the sum is near 1, matrices can be judged one by one; where
# it is not, a budget of bits has to be tried as a whole. The error of the *weights* says little
# about it:

# %%
weights = costs.weights(CLOSER)
changed = weights[weights["relative_rms"] > 0]
by_module = changed.assign(module=changed["module"].str.split(".").str[-1])
by_module.groupby("module", sort=False)[["sqnr_db", "outlier_share"]].mean()

# %% [markdown]
# A budget of bits can go where it counts. Start from two bits everywhere and give four to the
# matrices that cost most at two, for each bit; stop at three bits on the mean. **What to look
# for:** whether the mixture beats three bits everywhere once it is *run*, as costs need not add up.

# %%
LOW, HIGH, BUDGET = "int2-group32", "int4-group32", "int3-group32"
alone = costs.sensitivity(LOW, n_documents=N_MAPPED)["mean_kl_nats"].to_numpy()
places = [name for name, _ in linears(model.network)]
sizes = [module.weight.numel() for _, module in linears(model.network)]
order = np.argsort(-alone / np.array(sizes))
kept = [places[i] for i in order[np.cumsum(np.array(sizes)[order]) <= sum(sizes) / 2]]

# %%
mixture = FormatCosts(model, documents[::4], formats=(LOW, HIGH, BUDGET), max_tokens=MAX_TOKENS)
better, mixed = mixture.network(HIGH), mixture.network(LOW)

# %%
uniform = mixture.table([BUDGET, LOW])[["format", "mean_kl_nats", "low", "high"]]
with torch.no_grad():
    for name in kept:
        mixed.get_submodule(name).weight.copy_(better.get_submodule(name).weight)
run = compare_on(model, mixed, mixture.documents, max_tokens=MAX_TOKENS, progress=False)
pair = [f.groupby("document")["kl_reference_candidate_nats"].mean()
        for f in (run, mixture.positions(BUDGET))]  # fmt: skip
print(f"{len(kept)} of {len(places)} matrices at 4 bits, the rest at 2: {pair[0].mean():.2g} nats")
dearer = pair[0] - pair[1]
print("dearer than {} by {:.2g} [{:.2g}, {:.2g}] nats, paired by document".format(
    BUDGET, dearer.mean(), *cluster_mean_interval(dearer)))  # fmt: skip
uniform

# %% [markdown]
# **Read back.** It does not: the interval of the difference is above 0. From three bits everywhere to
# two costs × 11, so that even the least sensitive matrices lose more at two bits than the others
# gain at four. The map alone would not have told.
#
# ## A trap: weights that were quantised before
#
# SmolLM2's weights in this project come from a 4-bit file. Rounding them to that very grid again
# changes nothing, and looks like a perfect format. Here the same is made with this model. A verdict
# on it is VACUOUS, and says why:

# %%
once = replace(model, network=costs.network("q4_0"))
rows = [model.tokenizer(d.text)["input_ids"][:24] for d in documents[:8]]
short = {"decoding": Decoding(max_new_tokens=12), "n_variants": 0, "progress": False}
print(len(already_on_grid(once, "q4_0")), "matrices lie on the grid;",
      len(already_on_grid(model, "q4_0")), "of the original do")  # fmt: skip
print(check(once, "q4_0", rows, **short))

# %% [markdown]
# ## More than weights
#
# Everything else that is rounded or left out, on the same scale: activations in 8 bits (one scale
# for each token), torchao's real kernels, the KV cache, pruning. **Prediction.** torchao's dynamic
# kernel costs what its simulation costs; 2:4 costs more than the best half, which has more freedom.

# %%
every_nth = documents[:: -(-len(documents) // N_COMPARED)]
some = FormatCosts(model, every_nth, max_tokens=MAX_TOKENS)
others = ["int8-channel-act-int8-dynamic", "torchao-int8-dynamic",
          "torchao-int8-weight-only", "kv-q8_0", "kv-q4_0", "kv-int4-channel", "top-neurons-50",
          "magnitude-50", "2:4", "drop-layers-2"]  # fmt: skip

# %%
more = some.table(others).assign(bits_per_weight=np.nan)
ax = plots.format_ladder(more, ax=plots.axes(preset="double"), floors=floors)
print(figures.save(ax.figure, "04_more", more, stamp, preset="double"))

# %%
by_name = more.set_index("format")["mean_kl_nats"]
simulated, real = by_name.iloc[0], by_name["torchao-int8-dynamic"]
print(f"torchao's kernel / its simulation: {real / simulated:.2f}")
print(f"2:4 / best half: {by_name['2:4'] / by_name['magnitude-50']:.1f}; zeros of the whole model, "
      f"tied weights once: {sparsity(some.network('2:4')):.2f}")  # fmt: skip

# %% [markdown]
# **Read back.** Masked zeros are stored like any number: half of the matrices' weights are zero,
# and not a byte is saved here. Dropping a layer does save, and keeps its map to the original's
# layers, so that `compare_layers` can still look inside.
#
# ## Activations: scales found beforehand
#
# A *static* scale is found on a calibration set: by the largest value seen (min-max), a percentile,
# or the least squared error. How large must the set be, and what if its texts are of another kind?

# %%
calibration = read_documents(part="calibration")
texts = {d.id: model.tokenizer(d.text)["input_ids"][:MAX_TOKENS] for d in calibration}
few = FormatCosts(model, every_nth, max_tokens=48)


# %%
def static_cost(scales, name):
    entry = replace(static(scales), name=name)
    return float(few.positions(few.add(entry))["kl_reference_candidate_nats"].mean())


# %%
found = []
for n in (1, 3, 8, 20, len(texts)):
    for rule, scales in calibrate(model, [*texts.values()][:n]).items():
        found.append((rule, n, static_cost(scales, f"{rule} {n}")))
sizes_cost = pd.DataFrame(found, columns=["candidate", "documents", "mean_kl_nats"])
labels = ("calibration documents", "mean KL (nats)")
ax = cost_curves(sizes_cost, x="documents", y="mean_kl_nats", labels=labels, ax=plots.axes())
print(figures.save(ax.figure, "04_calibration", sizes_cost, stamp))

# %%
domains = {
    language: calibrate(model, [texts[d.id] for d in calibration if d.language == language])
    for language in ("en", "zh", "code")
}
wrong = {}
for language, found_scales in domains.items():
    name = few.add(replace(static(found_scales["min-max"]), name=f"scales from {language}"))
    wrong[name] = few.positions(name).groupby("language")["kl_reference_candidate_nats"].mean()
pd.DataFrame(wrong)

# %% [markdown]
# **Read back.** Min-max gets *worse* with more texts: one larger value makes every step longer. A
# percentile that sounds harmless (99.9) clips the few large channels that carry much, and no amount
# of text repairs it. Columns are what the scales were found on, rows what they are judged on.
#
# ## Outlier channels and attention sinks
#
# Why does one scale for everything go wrong? Some channels are larger than the rest, and the first
# token, which says little, draws more attention than an even share in most layers: a *sink*. Both
# are mild in this small model.

# %%
eager = models.load(MODEL, attn_implementation="eager").network
ids = torch.tensor([costs.ids(documents[0].id)])
with torch.no_grad():
    seen = eager(ids, output_attentions=True, use_cache=True)
cached = (getattr(seen, "cache", None) or seen.past_key_values).layers

# %%
outliers = [layer.keys.abs().amax((0, 2)).flatten() for layer in cached]
first = [float(a[..., 1:, 0].mean()) for a in seen.attentions]
pd.DataFrame({"largest key channel / median": [float(x.max() / x.median()) for x in outliers],
              "attention on the first token": first,
              "if spread evenly": float((1 / torch.arange(2.0, ids.shape[1] + 1)).mean())},
             index=pd.RangeIndex(1, len(outliers) + 1, name="layer"))  # fmt: skip

# %% [markdown]
# ## The KV cache
#
# The outliers of keys stay in their *channels*, from token to token. So KIVI gives keys one scale
# for a channel over 32 tokens, and values one for a token. **Prediction.** At the same 4.6 bits,
# keys by channel err less.

# %%
fmt = number_formats.number_format("int4-group32-asym")
by_token = kv_compression.QuantizedKV(name="by token", keys=fmt, values=fmt)
by_channel = replace(by_token, name="by channel", block=32)
whole = replace(by_token, name="by token, 16 newest whole", residual=16)

# %%
errors = []
for i, layer in enumerate(cached):
    x = [t[..., : ids.shape[1] // 32 * 32, :] for t in (layer.keys, layer.values)]
    for how in (by_token, by_channel):
        for what, a, b in zip((f"keys, {how.name}", "values"), x, how.round(*x), strict=True):
            errors.append((what, i + 1, float((a - b).norm() / a.norm())))
errors = pd.DataFrame(errors, columns=["candidate", "layer", "relative_rms"]).drop_duplicates()

# %%
labels = ("layer", "relative RMS error")
ax = cost_curves(errors, x="layer", y="relative_rms", labels=labels, ax=plots.axes())
print(figures.save(ax.figure, "04_keys_values", errors, stamp))

# %% [markdown]
# What it costs is read off token by token: each token reads what the cache made of those before it.
# Evicting all but four first tokens and the newest ones is the other way to save.

# %%
ways = [by_token, whole, by_channel,
        kv_compression.EvictingKV(name="4 first and 28 newest", window=28),
        kv_compression.EvictingKV(name="32 newest alone", sinks=0, window=32)]  # fmt: skip
entries = [some.add(kv_compression.kv_compressed(how)) for how in ways]
caches = some.table(entries)[["format", "mean_kl_nats", "low", "high", "mean_tv"]]
width, lengths = model.network.config.head_dim, range(1, MAX_TOKENS + 1)
bits = [np.mean([how.bits_per_value(width, n) for n in lengths]) for how in ways]
caches.assign(bits_of_16=bits)

# %% [markdown]
# **Read back.** Keys by channel leave up to 31 tokens of an unfinished block whole, 16 on the mean:
# the fair comparison is the second row, with as many bits. The newest tokens matter most, and the
# four first are worth their slots. And a trap: with KIVI's own window of 128 newest tokens, a short
# test never reads a rounded value. Its logits are equal bit by bit, and that shows nothing:

# %%
print(check(model, "kv-kivi-int4", rows, **short))

# %% [markdown]
# ## Merging an adapter
#
# A low-rank adapter beside a matrix can be added to it: the same function in exact arithmetic, but
# the sum is rounded once more. **Prediction.** That is too little to change a token in float32, and
# enough in bfloat16. For each token that differs, the control repeats the merge in float32.

# %%
rows = [model.tokenizer(d.text)["input_ids"][:24] for d in documents[:16]]
longer = short | {"decoding": Decoding(max_new_tokens=40)}
for base in (model, half):
    adapted = adapters.with_adapters(base, alpha=64, std=0.05)
    engine = TransformersEngine(adapted, batch_size=16)
    verdict = check(engine, adapters.merged(), rows, **longer)
    cause = verdict.cause or "no difference to explain"
    print(base.network.dtype, verdict["1b"], cause, sep="\n  ")

# %% [markdown]
# **Read back.** As predicted. In float32 no prompt differs, and yet the word is INCONCLUSIVE: none
# of 16 bounds the share of prompts that would differ at 17 %, more than the margin of 5 %. That
# takes 59 prompts without a difference.
#
# ## Implementations that are wrong
#
# All of the above supposes that rounding is done right. Here it is done wrong on purpose, as in
# bugs that were reported. `unlike_rounding` compares a quantised copy with nearest rounding, weight
# by weight; KL alone says only that it is worse.

# %%
right = few.network("int4-group32-asym")
kl = {"right": float(few.positions("int4-group32-asym")["kl_reference_candidate_nats"].mean())}
unlike = {"right": unlike_rounding(model, right, fmt)["unlike_share"].mean()}

# %%
for name, mutant in quantization_mutants(fmt).items():
    broken = mutant.apply(model, dose=mutant.natural)
    frame = compare_on(model, broken, few.documents, max_tokens=48, progress=False)
    kl[name] = float(frame["kl_reference_candidate_nats"].mean())
    unlike[name] = unlike_rounding(model, broken, fmt)["unlike_share"].mean()
wrongly = pd.DataFrame({"mean KL (nats)": kl, "weights unlike rounding": unlike})
wrongly.assign(times=wrongly["mean KL (nats)"] / kl["right"])

# %% [markdown]
# **Read back.** A clipped step or coarse scales cost little in KL: a threshold on it would pass
# them. Compared with what the format should hold, all of them show.
#
# ## Training with the rounding in the loop
#
# Two bits are too few for rounding. If the weights are rounded in every forward pass while
# gradients pass straight through, training moves them to where rounding hurts less. Here the small
# draft model is to learn again what it knew, from three kinds of samples. The corpus is split: of
# two thirds the failures are exported and learnt from, the last third judges. Languages take turns
# in the corpus, en, zh, code, so every third document would be English: runs of three are dealt.

# %%
draft, reads_48 = models.load("tiny-draft"), {"max_tokens": 48, "progress": False}
held = [d for i, d in enumerate(documents) if i // 3 % 3 == 0]
seen = [d for d in documents if d not in held]
rounded = FormatCosts(draft, documents, formats=(LOW,)).network(LOW)
files = {}
for name, part, n in (("to_learn", seen, 64), ("held_out", held, len(held))):
    frame = compare_on(draft, rounded, part, **reads_48)
    files[name] = figures.paths.FIGURES / f"04_failures_{name}.jsonl"
    export_failures(files[name], frame, draft, rounded, part, n=n, n_tokens=16)


# %%
class Rounded(torch.nn.Module):
    def forward(self, weight):
        return weight + (number_formats.round_to(weight, LOW) - weight).detach()


def student():
    network = models.load("tiny-draft").network
    for _, layer in linears(network):
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Rounded())
    return network


# %% [markdown]
# A sample is a prompt and its completion, and the completion alone is learnt: either the token that
# stands there, or the *law* that the full model has there.


# %%
def batch(samples):
    rows = [torch.tensor(s["prompt_ids"] + s["completion_ids"]) for s in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    place = torch.arange(1, ids.shape[1])
    starts, ends = ([[len(s["prompt_ids"])] for s in samples], [[len(row)] for row in rows])
    return ids, (place >= torch.tensor(starts)) & (place < torch.tensor(ends))


# %%
def train(network, samples, teacher=None):
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=1e-3)
    for step in range(N_STEPS):
        chosen = torch.randperm(len(samples), generator=torch.Generator().manual_seed(step))[:8]
        ids, told = batch([samples[i] for i in chosen])
        target = ids[:, 1:][told]
        if teacher is not None:
            with torch.no_grad():
                target = teacher(ids).logits[:, :-1][told].softmax(-1)
        loss = torch.nn.functional.cross_entropy(network(ids).logits[:, :-1][told], target)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    return network


# %%
failed = {
    name: [*map(json.loads, file.read_text(encoding="utf-8").splitlines())]
    for name, file in files.items()
}
plain = [{"prompt_ids": row[:1], "completion_ids": row[1:48]} for row in texts.values()]
ways = {
    "rounded, no training": rounded,
    "calibration texts, laws": train(student(), plain, draft.network),
    "failures, laws": train(student(), failed["to_learn"], draft.network),
    "failures, tokens": train(student(), failed["to_learn"]),
}


# %%
def judged_on_held_out(network):
    frame = compare_on(draft, network, held, **reads_48)
    same = {}
    for sample in failed["held_out"]:
        ids, told = batch([sample])
        with torch.no_grad():
            top = network(ids).logits[:, :-1].argmax(-1)
        same[sample["document"]] = float((top == ids[:, 1:])[told].float().mean())
    kl = frame.groupby("document")[KL].mean()
    return pd.DataFrame({"KL (nats)": kl, "reference's tokens in failures": pd.Series(same)})


# %%
found = {name: judged_on_held_out(network) for name, network in ways.items()}
before, rows = found["rounded, no training"], []
for name, after in found.items():
    for what in after:
        change = (after[what] - before[what]).dropna()
        limits = (np.nan, np.nan) if after is before else cluster_mean_interval(change)
        rows.append((what, name, after[what].mean(), change.mean(), *limits, len(change)))
trained = pd.DataFrame(
    rows, columns=["held out", "learnt from", "mean", "change", "low", "high", "documents"]
).sort_values("held out", kind="stable")
gain = (found["failures, laws"] - found["calibration texts, laws"]).iloc[:, 1].dropna()
print("tokens in failures, learnt from failures rather than texts: "
      "{:+.2f} [{:+.2f}, {:+.2f}]".format(gain.mean(), *cluster_mean_interval(gain)))  # fmt: skip
trained

# %%
language = {d.id: d.language for d in documents}
by_language = {name: f.iloc[:, 1].groupby(language).mean() for name, f in found.items()}
learnt = pd.Series([language[s["document"]] for s in failed["to_learn"]]).value_counts()
judging = pd.Series([d.language for d in held]).value_counts()
pd.DataFrame(by_language | {"failures learnt from": learnt, "documents that judge": judging}).T

# %% [markdown]
# **Read back.** Learning *laws* helps, whatever the samples: of a KL of .66 on held-out documents .12
# is left after the calibration texts, and .35 after 64 failures of 16 tokens. On failures of
# documents that were not learnt from, English ones are repaired more by the failures (the full
# model's own token comes out on top at .62 of the places, against .47), Chinese ones by the
# calibration texts (.82 against .60): only 4 of the 64 failures are Chinese. Over all kinds the
# calibration texts do as well (.64 against .62, their difference is within chance) and leave a third
# of the KL. Learning the *tokens* alone, which is what a file of prompts and completions invites to,
# repairs less (.43) and ruins the law: the KL grows to 1.5, since at each place one token is taught
# to be the only one. Not shown: other seeds, other models, other kinds of texts.
#
# ## Try it
#
# Choose a format and a group size, a document and a position, and a layer. Left the ladder with the
# chosen format marked; right the two laws at that position, a dot for the reference in a ring for
# the candidate. The line below says what the format costs in bits and in nats, and the last one
# names the matrix of that layer whose *weights* err most, which need not be the one that costs most.
# Try int4 with groups of 32, of 128 and one scale a row, and say in a sentence what each costs; and,
# from the map above, in which layer you would spend the bits.

# %%
panels.format_cost(costs)

# %% [markdown]
# ## Verdict
#
# Level 2 asks for a bound, not for a mean: the limits of the mean TV (probability), documents as
# units, each one-sided at 95 %, against a stated margin. EQUIVALENT: the upper one is within it;
# DIFFERENT: the lower one is beyond it. Simulated coverage is in data/calibration/coverage.csv.

# %%
MARGIN = 0.01
means = {n: costs.positions(n).groupby("document")["total_variation"].mean() for n in FORMATS}
tv = {name: (x.mean(), *mean_limits(x.to_numpy())) for name, x in means.items()}
words = {
    name: "EQUIVALENT" if high <= MARGIN else "DIFFERENT" if low > MARGIN else "INCONCLUSIVE"
    for name, (_, low, high) in tv.items()
}

# %%
answers = pd.DataFrame(tv, index=["mean TV", "lower limit", "upper limit"]).T
answers.assign(answer=pd.Series(words))

# %%
same = [name for name, word in words.items() if word == "EQUIVALENT"]
worst_kl, kl_mean = table.loc[[f"{q} KL(reference‖candidate)" for q in ("99 %", "mean")], "value"]
Markdown(
    f"On {MODEL} and {len(documents)} documents, simulated, linear layers only: EQUIVALENT within "
    f"a mean TV of {MARGIN} is {', '.join(same) or 'no format'}. {CLOSER} is {words[CLOSER]}: it "
    "moved the law by a mean TV of {:.3f} [{:.3f}, {:.3f}] ".format(*tv[CLOSER])
    + "(probability, documents as units, two one-sided 95 % limits), with one token in a hundred "
    f"beyond a KL of {worst_kl:.2g} nats, {worst_kl / kl_mean:.1f} times the mean. Not "
    "shown: kernels of low precision on other hardware, longer contexts, other texts, task quality."
)

# %% [markdown]
# ## Exercises
#
# 1. Add `"int4-group32-asym"` to `FORMATS`. When is a zero point worth its bits?
#
# <details><summary>Answer</summary>
#
# Where codes are few. It costs 1/8 bit in groups of 32, and its KL is .0059 [.0055, .0063] against
# .0095 [.0088, .0101] (every fourth document, 48 tokens): 38 % less. The two ends of a small group
# are seldom equally far from zero, even if the whole matrix is centred, and 16 codes are used, not
# 15.
#
# </details>
#
# 2. The mean Δp is close to zero although single tokens lose much. Is the format harmless?
#
# <details><summary>Answer</summary>
#
# No: gains and losses cancel in the mean. The percentiles, or the RMS of Δp, show both.
#
# </details>
#
# 3. Why is KL(reference‖candidate) not the same as KL(candidate‖reference), and which one punishes
#    a token that the candidate can no longer produce?
#
# <details><summary>Answer</summary>
#
# The first: it is infinite where the candidate gives 0 to what the reference can say.
#
# </details>
#
# ## Sources
#
# - llama.cpp, `tools/perplexity`: the statistics of `--kl-divergence`.
# - OCP Microscaling Formats 1.0; NVFP4 as in TensorRT Model Optimizer; NF4: Dettmers et al. 2023,
#   arXiv 2305.14314.
# - KIVI: Liu et al. 2024, arXiv 2402.02750; attention sinks: Xiao et al. 2023, arXiv 2309.17453;
#   LoRA: Hu et al. 2021, arXiv 2106.09685.
# - Dutta et al. 2024, *Accuracy is not all you need*, arXiv 2407.09141, on flips.
