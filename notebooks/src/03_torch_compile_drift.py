# %% [markdown]
# # 03 · Where does compiled code depart from eager, and which of the two is nearer the truth?
#
# **Question.** `torch.compile` changes the logits of a bf16 model. Is that a bug, is it noise, in
# which stage and layer does it start, and is it a step away from the right answer or towards it?

# %% [markdown]
# **What you will learn**
#
# - why two correct programs give different floating-point results, by hand;
# - to use a true float64 run as referee, and why `model.double()` is not one;
# - to name the stage of the compiler that moves the logits, and the switch that undoes it;
# - to tell rounding noise from a bias, error made in a layer from error inherited, and an inevitable
#   token flip from a fault;
# - that a check is only worth what it catches: broken models, each found or not found.
#
# **What you need**: two CPU cores, a C++ compiler, about four minutes, no network. Any Hugging Face
# model can be put in place of the tiny one; the compiler then takes longer.

# %%
import copy

import pandas as pd
import torch
from IPython.display import Markdown

from lossless_lab import figures, models, mutants, numerical, optimizations, panels, plots, prompts
from lossless_lab.numerical import attribution, flips, history, noise, tensors, twins, ulps
from lossless_lab.numerical.capture import forward, model_inputs
from lossless_lab.numerical.referee import narrow_operations, referee
from lossless_lab.pipeline import Inspection, compile_drift

# %% [markdown]
# `STAGES` are the stages of the compiler to be told apart; `N_TWINS` sets how well the noise floor
# is known: with 19 twins, one more harmless variant passes it once in 20 times.

# %% tags=["parameters"]
MODEL = "tiny-target"
DTYPE = "bfloat16"
N_PROMPTS = 24
N_TOKENS = 64
N_TWINS = 19
STAGES = ("capture", "trace", "decompose", "inductor", "inductor, casts emulated")

# %%
model = models.load(MODEL, dtype=DTYPE)
network = model.network
read = prompts.tokenize(prompts.read(), model, max_prompt_tokens=4000)
rows = {p.id: p.ids[:N_TOKENS] for p in read if len(p.ids) >= N_TOKENS}
rows = dict(list(rows.items())[:N_PROMPTS])
ids = torch.tensor(list(rows.values()))
stamp = {"model": MODEL, "dtype": DTYPE, "torch": torch.__version__, "rows": len(rows)}
pd.options.display.float_format = "{:.3g}".format
pd.options.display.max_colwidth = None
print(model, stamp, sep="\n")

# %% [markdown]
# ## Two right answers, by hand
#
# bf16 keeps 8 binary digits. From 1 to 2 its numbers are 2⁻⁷ = 0.0078125 apart, so 1.0009765625
# becomes 1. **Prediction.** Code that says "round to bf16, then go on in float32" gives 1 when each line is
# run by itself. A compiler that fuses both lines may see that the rounding can be left out, and
# keep the number it was given.


# %%
def rounded(x):
    return x.to(torch.bfloat16).to(torch.float32)


x = torch.tensor([1.0009765625, 3.1415927, 0.1])
eager, compiled = rounded(x), torch.compile(rounded)(x)

# %%
assert eager[0] == 1 and noise.ulp_of(1.0, "bfloat16") == 2**-7
assert torch.equal(compiled, x)
pd.DataFrame({"given": x, "eager": eager, "compiled": compiled}).map("{:.9g}".format)

# %% [markdown]
# **Read back.** Eager rounds, compiled does not: the compiler left the cast out (reported as
# [pytorch 159239](https://github.com/pytorch/pytorch/issues/159239) and others). Neither is a bug.
# The compiled result is *nearer to what the formula means*. The same on a formula that each
# attention layer runs, the rotation of half a vector, judged by float64:


# %%
def rotate(q, cos, sin):
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


# %%
torch.manual_seed(123)
q, cos, sin = (torch.randn(1, 2, 7, 16, dtype=torch.bfloat16) for _ in range(3))
truth = rotate(q.double(), cos.double(), sin.double())

# %%
sides = {"eager": rotate(q, cos, sin), "compiled": torch.compile(rotate)(q, cos, sin)}
errors = {name: float((y.double() - truth).square().mean() ** 0.5) for name, y in sides.items()}
assert errors["compiled"] < errors["eager"]
print("RMS error:", errors, f"ratio {errors['compiled'] / errors['eager']:.2f}")

# %% [markdown]
# Published for such a pair of programs (issue 159239): mean square errors 5.5e-6 compiled and
# 1.15e-5 eager, a ratio of 0.48. That of the RMS errors is its root, 0.69.
#
# ## A referee that is really float64
#
# To judge a whole model, its truth is needed: the same weights, every operation in float64.
# **Prediction.** `model.double()` is not that: norms, rotary angles and softmax cast themselves to
# float32 inside. The referee redirects every such cast; a watch on the dispatcher counts what is
# left.

# %%
double = models.load(MODEL, dtype="float64").network
left = {"double()": narrow_operations(double, ids[:1])}
truth_network = referee(network)
left["referee"] = narrow_operations(truth_network, ids[:1])

# %%
counts = {name: int(frame["n_calls"].sum()) for name, frame in left.items()}
assert counts["referee"] == 0 < counts["double()"]
print("operations narrower than float64 in one pass:", counts)
left["double()"].head(4)

# %% [markdown]
# ## Which stage of the compiler moves the logits?
#
# Compilation has stages: *capture* traces the program, *trace* makes it functional, *decompose*
# splits it into smaller operations, *inductor* writes fused loops in C++. Each can be run by
# itself. The last row is Inductor once more, told to keep every cast that eager code makes.
#
# **Prediction.** Only fusion can leave casts out, so the logits stay bitwise those of eager code
# up to Inductor; with casts emulated, most of the drift is gone.

# %%
drift = compile_drift(model, ids[:16], stages=STAGES)
columns = ["stage", "logit_rms", "eager_error", "compiled_error", "word"]
drift.frame[columns]

# %%
ax = plots.drift_by_stage(drift.frame, ax=plots.axes())
print(figures.save(ax.figure, "03_drift_by_stage", drift.frame, stamp))
print(drift)

# %% [markdown]
# **Read back.** Three stages change nothing, bit for bit; the fused loops do, and they bring the
# logits *nearer* to float64. With every cast of eager code kept, the compiled program makes eager
# code's errors again: the drift is casts left out, not a fault of the compiler. The bars are errors
# over all positions; the note beside each, and `logit_rms` in the table, is the largest difference
# from eager code at one position. The word says only that one side is nearer, not that it is much
# nearer: other orders of the same sums also move a model nearer to float64 or farther from it, and
# how far they do so here is measured below.
#
# What compiling cost, beside what it gained; rows of one token less compile once more, the first
# time that a shape changes. Times are medians of five calls, eager and compiled in turns. With a
# model this small on two cores, compiled code gains hardly anything.

# %%
drift.frame[["stage", "graphs", "graph_breaks", "recompilations", "compile_s", "run_s", "eager_s"]]

# %% [markdown]
# The RMS over logits is a Euclidean distance, so eager, compiled and float64 form a triangle that
# can be drawn to scale. **Read back.** The side from eager to compiled is no shorter than the errors
# themselves: the two programs round differently, and each is an error away from the truth.

# %%
row = drift.frame.set_index("stage").loc["inductor"]
entry = optimizations.compilation.stage("inductor")
compiled = entry.apply(network).network
logits = {"eager": forward(network, model_inputs(ids[:16], None)).flatten(0, 1)}
logits["compiled"] = forward(compiled, model_inputs(ids[:16], None)).flatten(0, 1)

# %%
apart = (noise.centred_rms(logits["eager"], logits["compiled"]) ** 2).mean() ** 0.5
triangle = pd.DataFrame(
    {
        "side": ["reference–float64", "candidate–float64", "reference–candidate"],
        "rms": [row["eager_error"], row["compiled_error"], apart],
    }
)

# %%
ax = plots.error_triangle(triangle, ax=plots.axes(), names=("eager", "compiled"))
print(figures.save(ax.figure, "03_triangle", triangle, stamp))
words = {"reference": "eager", "candidate": "compiled"}
triangle.replace({"side": words}, regex=True).set_index("side")

# %% [markdown]
# ## How much does eager code differ from itself?
#
# An *equivalent twin* is the same model with its units in another order: permuted residual
# dimensions, MLP neurons and KV groups. In exact arithmetic it is the same function; in bf16 its
# sums come out differently. The spread over twins is the noise floor, and twins can be given to any
# engine, a black box too, as just another folder of weights.
#
# **Prediction.** In float64 a twin agrees to 1e-12 or better. In bf16 it is about as far from the
# model as other harmless re-orderings are. Another attention kernel does more than re-order: it
# also rounds at other places, so it may lie farther.

# %%
family = [twins.twin(model, seed=seed) for seed in range(N_TWINS)]
exact = twins.distance_in_float64(model, family[0], ids[:2])
assert exact <= 1e-12
print(f"largest difference of a twin in float64: {exact:.1e}")

# %%
inputs = model_inputs(ids, None)
own = forward(network, inputs).flatten(0, 1)
other = [forward(member, inputs).flatten(0, 1) for member in family]

# %%
moved = {f"twin {seed}": noise.centred_rms(own, logits) for seed, logits in enumerate(other)}
eager_kernel = models.load(MODEL, dtype=DTYPE, attn_implementation="eager").network
judged = {"eager attention": forward(eager_kernel, inputs), "compiled": forward(compiled, inputs)}
judged = {name: noise.centred_rms(own, x.flatten(0, 1)) for name, x in judged.items()}

# %%
floor = noise.noise_floor(moved, top_logits=own.amax(-1).float().numpy(), dtype=DTYPE)
print(floor)

# %%
shown = {"twins": pd.concat([pd.Series(x) for x in moved.values()])} | judged
sizes = pd.DataFrame({n: pd.Series(x).quantile([0.5, 0.9, 0.99, 1]) for n, x in shown.items()}).T
sizes["multiple of the floor"] = sizes[1.0] / floor.unit
sizes

# %% [markdown]
# Is compiled code nearer to float64 than another order of sums would be by luck? The error of each
# twin over that of eager code:

# %%
true_logits = forward(truth_network, model_inputs(ids[:4], None)).flatten(0, 1)
first = slice(0, len(true_logits))
from_truth = {n: noise.centred_rms(true_logits, x[first]) for n, x in enumerate([own, *other])}
from_truth["compiled"] = noise.centred_rms(true_logits, forward(compiled, inputs)[:4].flatten(0, 1))
ratio = pd.DataFrame(from_truth).pow(2).mean().pow(0.5)
ratio /= ratio[0]
luck = ratio.drop([0, "compiled"])
print(f"twins {luck.min():.3f} to {luck.max():.3f}, compiled {ratio['compiled']:.3f} (4 prompts)")

# %% [markdown]
# **Read back.** The floor's unit is the larger of two numbers: the largest twin, and one rounding
# step of the largest logit. A multiple of at most 1 cannot be told from the noise of eager code
# itself: here the other kernel stays just below, and compiled code passes. Both move the logits at a
# typical position nearly twice as far as twins do. They do not only add in another order, they round at other places: sums split in three but
# rounded as before lie as far away as twins, and an attention in float32 that does nothing but
# round its scores to bf16 lies as far away as the eager kernel (`data/calibration/twins.csv`).
# In a deeper model such as SmolLM2 every difference spreads and all of these look alike. Nor is
# compiled code nearer to float64 by luck: twins of this model are as far from it as the model
# itself, to a few per cent. (Of other models, twins lie between 0.87 and 1.06.) And lying
# under a floor would not make a change harmless: a small bias can hide there, which is what the
# next sections look for.
#
# ## Where does it start?
#
# The residual stream after each layer, eager against compiled. Hooks never fire on compiled code,
# and set before compiling they change the very graph in question; so the MLPs are compiled one by
# one here, **a different program** from the whole model compiled, and labelled as that. The grey
# band is the drift of four twins of the kinds that leave the residual stream in its order. Beside
# the drift stand both programs' distances to float64, layer by layer.

# %%
by_mlp = optimizations.find("compile-mlp").apply(network).network
single = copy.deepcopy(network).float()  # the rounded weights, computed with in float32
broken = mutants.MUTANTS["attention-scale"].apply(network, dose=0.1, layer=3)
subjects = {"compile-mlp": by_mlp, "float32 arithmetic": single, "broken: attention scale": broken}
inspection = Inspection(model, subjects, rows, n_twins=4)

# %%
layers = inspection.drift("compile-mlp")
print("first above the noise band:", inspection.first_above("compile-mlp"))
print(inspection.refereed("compile-mlp"))

# %%
ax = plots.axes(preset="double")
for name, subject, dashes in (("eager", network, "-"), ("compiled MLPs", by_mlp, "--")):
    to_truth = numerical.layers.compare_layers(truth_network, subject, ids).frame
    plots.layer_drift(to_truth, ax=ax, label=f"{name} to float64", linestyle=dashes)
apart = layers[layers["module"].isin(["residual", "logits"])]
plots.layer_drift(apart, ax=ax, label="compiled MLPs to eager")
print(figures.save(ax.figure, "03_layers", layers, stamp, preset="double"))

# %% [markdown]
# **Read back.** The drift starts in the MLP of layer 1, the first thing that is compiled, and grows
# from layer to layer. The two lines to float64 lie on each other: compiled MLPs are *equally far*
# from the truth, while the whole model compiled was nearer. So what it gains, it does not gain in
# the MLPs alone. At the logits, three squares cover each other.
#
# Does watching change what is watched? The *observer effect* is the largest change of a logit when
# every layer is captured. **Prediction.** 0.

# %%
numerical.capture.observer_effect(by_mlp, ids)

# %% [markdown]
# ## Error made and error inherited
#
# A layer's output differs for two reasons: it computes something else, or it was fed something
# else. Feeding every compiled layer the eager layer's own input leaves the error made *in* it.

# %%
local = attribution.local_error(network, by_mlp, ids)
local.drop(columns="n_positions").set_index("layer")

# %%
ax = plots.local_error(local, ax=plots.axes())
print(figures.save(ax.figure, "03_local_error", local, stamp))

# %% [markdown]
# **Read back.** Over what a layer *adds* (`local_relative_added`), the error is about the same in
# every layer: rounding is made everywhere. Over the whole stream, the first layer's weighs most,
# since it writes most of the stream. What has accumulated at the end is more than any layer made.
#
# To ask which layer matters *for the logits*, each candidate layer is taken into the reference, and
# each reference layer put back into the candidate. The two views rarely agree, and only where they
# do is a ranking printed. The deliberately broken model has one layer with attention 10 % too
# sharp; compiled MLPs round a little in every layer.

# %%
for name in ("compile-mlp", "broken: attention scale"):
    print(f"{name}: {attribution.attribution(network, subjects[name], ids[:8])}")

# %% [markdown]
# ## Noise or bias?
#
# Rounding errors have no preferred sign. A wrong scale, a dropped term, a truncation in place of
# rounding has one. Two tests look for it, each prompt one independent unit: is the mean signed
# error zero, and is the error free of a part proportional to the value? Two fixed programs that are
# both right may still have a tiny bias against each other; so the largest one among the twins
# stands beside each.
#
# **Prediction.** Logits times 1.001: a bias, though it is much smaller than the noise at any single
# place. Compiled code rounds at other places than eager code, so a small bias between the two would
# be no surprise.

# %%
document = [name for name in rows for _ in range(N_TOKENS)]
pairs = {"compiled": forward(compiled, inputs).flatten(0, 1), "times 1.001": own.float() * 1.001}
pairs |= {f"twin {seed}": x for seed, x in enumerate(other)}
biased = {n: tensors.tensor_difference(own, x, groups=document) for n, x in pairs.items()}
print("compiled:", biased["compiled"])

# %%
names = ["mean_error", "mean_error_pvalue", "scale_error", "scale_error_pvalue"]
table = pd.concat({n: d.to_frame()[names] for n, d in biased.items()}).droplevel(1)
largest = table.filter(like="twin", axis=0)[["mean_error", "scale_error"]].abs().max()
table.loc["largest of the twins", largest.index] = largest
table.drop(index=[n for n in table.index if n.startswith("twin ")])

# %%
assert abs(table.loc["times 1.001", "scale_error"]) > 3 * largest["scale_error"]

# %% [markdown]
# **Read back.** The factor is found to three digits. The scale error of compiled code is several
# times that of any twin and about a fifth of the planted one, but it scatters over the prompts: each
# of the two tests is made at 2.5 %, and neither passes, hence "no bias found". That is no proof that
# there is none: what would be found with 80 % power stands beside it. More prompts would tell.

# %%
steps = ulps.ulp_histogram(own, pairs["compiled"], dtype=DTYPE)
ax = plots.ulp_bars(steps, ax=plots.axes(), dtype=DTYPE)
print(figures.save(ax.figure, "03_ulps", steps, stamp))

# %%
print(f"{steps.loc[steps['ulp_max'] <= 1, 'share'].sum():.0%} of the logits within one step")

# %% [markdown]
# Distances in rounding steps say little near zero, where steps are tiny: those logits are drawn
# pale, and never make a headline.
#
# ## Which tokens flip, and was it inevitable?
#
# A greedy token flips where the change of the top-2 difference exceeds the margin. The picture shows
# the small margins, where that can happen.

# %%
best = flips.top_two(own)
change = best.change(forward(compiled, inputs).flatten(0, 1))
points = pd.DataFrame({"margin": best.margin, "change": change, "flipped": best.flipped(change)})
print(f"{points['flipped'].mean():.2%} of {len(points)} tokens flip")

# %%
ax = plots.flips(points, ax=plots.axes())
print(figures.save(ax.figure, "03_flips", points, stamp))

# %% [markdown]
# How many flips would eager code's own noise make? The changes seen in half of the twins give each
# position its probability, from the empirical noise: a Gaussian of the same width has too thin a
# tail. From these follow the expected number of tokens to the first flip, and the share of prompts
# still identical after each token. The other half of the twins is the test.

# %%
parts = {name: slice(i * N_TOKENS, (i + 1) * N_TOKENS) for i, name in enumerate(rows)}
tops = {name: flips.top_two(own[part]) for name, part in parts.items()}
changes = [{n: tops[n].change(x[part]) for n, part in parts.items()} for x in other]
risk = flips.flip_risk(tops, changes[::2])
print(risk)

# %%
held_out = pd.DataFrame(
    {
        i: pd.DataFrame([(~tops[n].flipped(moves[n])).cumprod() for n in rows]).mean()
        for i, moves in enumerate(changes[1::2])
    }
)
observed = held_out.mean(axis=1)

# %%
curve = risk.survival().assign(observed=observed)

# %%
ax = plots.survival(curve, ax=plots.axes(), observed=observed)
print(figures.save(ax.figure, "03_survival", curve, stamp))
inside = held_out.ge(curve["low"], axis=0) & held_out.le(curve["high"], axis=0)
print(
    f"{inside.mean(axis=None):.0%} of {held_out.shape[1]} held-out curves, token by token, in band"
)

# %% [markdown]
# **Read back.** The band is for one run over these prompts, so each held-out twin's own curve is
# held against it; the line drawn is their mean. A greedy divergence of two correct bf16 programs is
# a matter of time. A report
# "the output differs" needs the margin at that token, and the noise of the margin, before it is a
# report of a fault. The control is always the same run in float32. `check` says all of this in the
# cause of its verdict: margin, noise and flip probability of the first divergences, how many prompts
# noise alone makes differ beside how many do, and whether they still differ in float32.
#
# ## Does it catch faults?
#
# A check that finds nothing may be blind. So broken models are tried: each has one known fault, at
# the dose that is met in the wild. Its layer has to be named, and its effect set against the floor.

# %%
caught = []
for name, mutant in mutants.MUTANTS.items():
    if mutant.kind != "layer-local":
        continue
    faulty = mutant.apply(network, dose=mutant.natural, layer=3)
    seen = Inspection(model, {name: faulty}, dict(list(rows.items())[:4]), n_twins=2)
    rms = noise.centred_rms(
        own[: 4 * N_TOKENS], forward(faulty, model_inputs(ids[:4], None)).flatten(0, 1)
    )
    multiple = pd.Series(rms).max(skipna=False) / floor.unit
    caught.append((name, mutant.imitates, seen.first_above(name), multiple))
pd.DataFrame(
    caught, columns=["fault in layer 3", "imitates", "first seen", "multiple of the floor"]
)

# %% [markdown]
# **Read back.** The planted layer is named each time but one: an eps of 1e-6 for 1e-5 is no change
# for a model that has 1e-6 already, and hardly any for others. A check that claims to have found it
# here would be wrong. Where the multiple is NaN, the fault makes NaN of the logits themselves.
#
# Faults can also hide *between* calls: a buffer that is not cleared, an output that a later call
# overwrites, as CUDA graphs do. Inputs are run in the orders A, B, A and so on: no answer may
# depend on the calls before it.

# %%
stateful = mutants.MUTANTS["state"].apply(network, dose=0.1)
inputs_of = [ids[:1], ids[1:2], ids[2:3, :40]]
for name, subject in (("compiled MLPs", by_mlp), ("broken: keeps state", stateful)):
    call = lambda x, subject=subject: forward(subject, model_inputs(x, None))  # noqa: E731
    print(f"{name}: {history.call_history(call, inputs_of)}")

# %% [markdown]
# With a GPU the same check is run on CUDA graphs (`mode="reduce-overhead"`), where it matters most.

# %%
if torch.cuda.is_available():
    graphs = optimizations.compilation.whole(mode="reduce-overhead", dynamic=False)
    moved_model = graphs.apply(models.load(MODEL, dtype=DTYPE, device="cuda")).network
    call = lambda x: forward(moved_model, model_inputs(x, None))  # noqa: E731
    print(history.call_history(call, [ids[:1], ids[1:2]]))
else:
    print("CUDA graphs: not run, torch sees no GPU here")

# %% [markdown]
# ## Try it
#
# Choose a candidate, a prompt, a layer and a module: its error in rounding steps, whether it is
# noise or bias, where the drift leaves the noise band, and which side is nearer to float64.
#
# Take the word *bias* here as a hint. The panel shows one prompt, so its units are positions, which
# share their context and are not independent. Of six twins on six prompts it called 25 of 632 places
# that had changed biased, 4 %, but 11 of 36 in the attention of layer 4: all of them harmless.

# %%
panels.layer_difference(inspection)

# %% [markdown]
# ## Verdict

# %%
said = {"nearer the truth": "nearer the truth than", "farther": "farther from the truth than"}
said = said.get(row["word"], "not told apart in its distance from the truth from")
by_order = f"twins: {luck.min():.2f} to {luck.max():.2f}"
largest = judged["compiled"].max()
Markdown(
    f"Compiled by Inductor, {MODEL} in {DTYPE} is **{said}** eager code: RMS error to float64 "
    f"{row['compiled_error']:.3g} against {row['eager_error']:.3g} "
    f"(ratio {row['compiled_error'] / row['eager_error']:.2f}, {len(ids[:16])} prompts; "
    f"{by_order}). The drift "
    f"begins at the stage “{drift.first_drifting}”; its largest, {largest:.3g} logits RMS, is "
    f"{largest / floor.level:.1f} times that of the largest of {N_TWINS} equivalent twins. Not "
    f"shown: other inputs than {len(rows)} × {N_TOKENS} tokens, decoding with a cache, a bias "
    "smaller than the tests can find, GPUs."
)

# %% [markdown]
# ## Exercises
#
# 1. Set `DTYPE = "float32"`. Which row of the stage table changes, and what becomes of the
#    triangle?
#
# <details><summary>Answer</summary>
#
# There are no casts to leave out. What remains is another order of operations, and that begins
# where they are decomposed. Errors shrink by four orders of magnitude.
#
# </details>
#
# 2. Choose "broken: attention scale" in the panel and move the layer from 0 to 4. Where does the
#    drift leave the band, and what does the module menu add to that?
#
# <details><summary>Answer</summary>
#
# At layer 3, and within it at its attention: the norm before it is still bitwise equal.
#
# </details>
#
# 3. Why is a share of flipped tokens no measure of quality?
#
# <details><summary>Answer</summary>
#
# It depends on how many near ties the text has, not on the size of the error alone, and after the
# first flip two texts can no longer be compared token by token.
#
# </details>
#
# ## Sources
#
# - pytorch issues [159239](https://github.com/pytorch/pytorch/issues/159239),
#   [168186](https://github.com/pytorch/pytorch/issues/168186) on casts left out and their emulation.
# - Higham, *Accuracy and Stability of Numerical Algorithms*, 2002, chapter 4, on sums.
# - transformers, `models/llama/modeling_llama.py`: casts to float32 inside norms and rotary angles.
