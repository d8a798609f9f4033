# %% [markdown]
# # 01 · What does "lossless" mean?
#
# **Question.** Somebody makes a model faster and says that its output has not changed: in which
# sense, and how would you check it?

# %% [markdown]
# **What you will learn**: to tell apart three claims that all go by the name *lossless*; to check
# each by hand, on three tokens or two sentences, and then on a real model; why keeping one within a
# margin does not keep another; and why "we found no difference" is not yet an answer.
#
# **What you need**: a CPU, no network, a quarter of an hour to read. The cells run in well under a
# minute.

# %%
import numpy as np
import pandas as pd
import torch
from IPython.display import Markdown
from torch.utils.flop_counter import FlopCounterMode

from lossless_lab import TransformersEngine, divergences, figures, models, panels, paths, plots
from lossless_lab.engines.decoding import Decoding
from lossless_lab.exercises import check
from lossless_lab.numerical.noise import ulp_of
from lossless_lab.panels.which_level_breaks import MARGINS, levels
from lossless_lab.semantic.text import similarity
from lossless_lab.stats.intervals import share_interval

# %% [markdown]
# The next cell is the only one to change for a run of your own.

# %% tags=["parameters"]
MODEL = "tiny-target"
DRAFT = "tiny-draft"
N_PER_BRACKET = 100
SCALE = 1.2

# %%
target, draft = models.load(MODEL), models.load(DRAFT)
facts = TransformersEngine(target).describe()
stamp = {key: facts[key] for key in ("torch", "transformers", "dtype", "attention", "threads")}
pd.options.display.float_format = "{:.3g}".format
print(target, draft, stamp, sep="\n")

# %% [markdown]
# ## The words, and a first example by hand
#
# | word | meaning |
# |---|---|
# | *token* | what a model reads and writes: a word, a part of one, or a few bytes |
# | *logits* | one score for each token of the vocabulary |
# | *law* | the probabilities that softmax makes of the logits: exp(logit) divided by the sum of all exp(logit) |
# | *greedy* | always take the likeliest token; *sampling* draws from the law instead |
# | *reference, candidate* | the model before the change, and the one to be judged; always in this order |
# | *total variation* (TV) | the largest difference in the probability of any event, from 0 to 1; it is half the sum of the absolute differences of two laws. Hence, however cleverly two samplers share their random numbers, at least this share of their tokens differs |
# | *kernel* | the program that does one step, such as attention, on one kind of machine; another kernel may add in another order |
# | *RMS* | root mean square: the size of a typical entry |
# | *one-sided 95 %* | a bound found by a rule that fails, by bad luck in the choice of prompts, at most once in 20 times |
#
# A model has three tokens A, B, C and the law .7, .2, .1. A candidate multiplies all its logits by
# 2. **By hand:** doubling a logit squares its probability, so the squares .49, .04, .01 are divided
# by their sum .54, which gives .907, .074, .019. The order is what it was. A gains
# .907 − .7 = .207, the others lose exactly that, and so TV is .207.

# %%
reference_law = np.array([0.7, 0.2, 0.1])
squares = np.exp(2 * np.log(reference_law))
candidate_law = squares / squares.sum()
tv = np.abs(reference_law - candidate_law).sum() / 2
assert candidate_law.argmax() == reference_law.argmax() and round(tv, 3) == 0.207
candidate_law.round(3), float(tv.round(3))

# %% [markdown]
# A greedy user will never see a difference. Someone who samples gets another token at least 207
# times in 1,000. Was the change lossless? That depends on what was promised, and on who needs it:
#
# | level | the promise | kept when | who needs it |
# |---|---|---|---|
# | **1 numerical** | the same computation | **1a** all logits are equal, bit for bit | a replay that compares checksums |
# | | | **1b** the same greedy tokens come out | JSON, code that is run, tests that compare outputs: one other token breaks them |
# | | | **1c** logits move no more than under re-orderings that everybody calls harmless; a number added to all of them, which softmax ignores, does not count | whoever hunts for bugs: what moves more is no rounding |
# | **2 statistical** | the same law | every token keeps its probability | services that sample, training data made by a model: no single token matters, all probabilities do |
# | **3 semantic** | the same usefulness | as many tasks are solved, within a margin stated beforehand | explanations, summaries, conversation: many texts are equally good |

# %% [markdown]
# ## Level 1: the same computation
#
# ### By hand: a sum in another order
#
# A computer rounds after every addition. The format bf16 keeps 8 binary digits of a number, and
# from 256 = 2⁸ on that is one digit too few: up to 512 it holds **only even numbers**.
#
# **Prediction.** (256 + 1) + 1: there is no 257, it lies halfway between 256 and 258 and is rounded
# to 256, and then the same happens again. But 256 + (1 + 1) is 258, which exists.

# %%
big, one = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)
from_the_left, from_the_right = (big + one) + one, big + (one + one)
assert (from_the_left, from_the_right) == (256, 258)
from_the_left.item(), from_the_right.item()

# %% [markdown]
# One formula, two results, and no bug. A model adds hundreds of numbers for every logit, in an
# order that depends on the batch, the cache and the kernel. That the formula is unchanged does
# therefore not prove that the result is.
#
# ### By hand: a margin
#
# The distance between the two best logits is called the **margin**. When does a change move the
# greedy token? Only if their distance changes by at least as much as it is: moves against each
# other count, a common move does not. Between 8 and 16, bf16 has steps of 1/16. **Prediction.** The
# logits 10.02 and 9.99 have a margin of .03, less than a step: both become 10.0, a **tie**, and a
# rule that knows neither decides (`argmax` here takes the lower id). 10.2 and 9.9 stay apart.

# %%
near, far = torch.tensor([10.02, 9.99]), torch.tensor([10.2, 9.9])
assert near.bfloat16().unique().numel() == 1 and far.bfloat16().argmax() == 0
near.bfloat16().tolist(), far.bfloat16().tolist()

# %% [markdown]
# ### On a real model
#
# `tiny-target` is a small Llama that has learnt the source of Python's standard library, and
# `tiny-draft` a smaller one. We take code that neither has seen, stop before a closing bracket, 100
# times before `)` and 100 times before `]`, show the model the 160 characters before it, and keep
# the logits of the next token. **One set of 200 rows of logits will answer the questions of all
# three levels.**

# %%
text = (paths.DATA / "models" / "held_out.txt").read_text(encoding="utf-8")


def places(bracket):
    found = np.array([i for i, character in enumerate(text) if character == bracket and i >= 160])
    return found[np.linspace(0, len(found) - 1, N_PER_BRACKET).astype(int)]


# %%
stops = np.concatenate([places(")"), places("]")])
prompts = [target.tokenizer(text[i - 160 : i])["input_ids"] for i in stops]
n = len(prompts)
print(text[stops[-1] - 160 : stops[-1]], "   <-- which bracket comes next?")


# %%
def read(model, batch_size=1, **options):
    """Raw logits [n, vocab_size] of the token after each prompt, as `generate` computes them."""
    engine = TransformersEngine(model, **options)
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    return torch.cat([row for batch in batches for row in engine.score(batch, [[0]] * len(batch))])


reference = read(target)

# %% [markdown]
# Now five changes. Two only re-order sums: attention is computed step by step as its formula is
# written ("eager") instead of by one kernel, or prompts share a batch with seven others. The
# third rounds everything to bf16, the fourth multiplies the logits by a number, and the fifth is
# no optimisation at all: it swaps the model for the small one.

# %%
candidates = {"eager attention": read(target, attention="eager")}
candidates["batches of 8"] = read(target, batch_size=8)
candidates["bf16"] = read(models.load(MODEL, dtype="bfloat16"))
candidates[f"logits × {SCALE}"] = SCALE * reference
candidates["draft instead"] = read(draft)

# %% [markdown]
# **Prediction.** Re-ordering touches the last digits of nearly every row (1a fails) and hardly
# ever a greedy token (1b holds). bf16 too should fail 1a and keep 1b, with coarser digits. In
# both cases the difference should be a few rounding steps of the format at the size of the
# largest logit (printed below): if that lies between 8 and 16, a step is a millionth in fp32 and
# 1/16 in bf16.

# %%
frames = {k: divergences(reference, c, prompt_id=k).frame for k, c in candidates.items()}
tied = {k: np.equal(*c.topk(2).values.T.numpy()) for k, c in candidates.items()}

# %%
level_1 = pd.DataFrame(index=list(candidates))
level_1["1a: rows equal"] = [int((reference == c).all(-1).sum()) for c in candidates.values()]
level_1["1b: greedy tokens equal"] = [int(f["top1_agree"].sum()) for f in frames.values()]
level_1["of these, ties"] = [int((tied[k] & f["top1_agree"]).sum()) for k, f in frames.items()]
level_1["largest difference (centred RMS)"] = [f["logit_rms"].max() for f in frames.values()]

# %%
difference = level_1["largest difference (centred RMS)"]
formats = ["bfloat16" if name == "bf16" else "float32" for name in candidates]
print(f"largest logit: {float(reference.max()):.3g}")
level_1["in rounding steps"] = difference / [ulp_of(reference.max(), f) for f in formats]
floor = difference.iloc[:2].max()
level_1["1c: times the floor"] = (difference / floor).where(difference > floor, "defines the floor")
level_1

# %% [markdown]
# *Centred*: the mean of a row's differences is removed first, which softmax would ignore. Read
# the last two columns. Re-ordering and bf16 are off by a few rounding steps *of their own format*
# at most; the last two rows are not rounding. Level 1c uses a unit that needs no such knowledge,
# the **noise floor**: the largest difference that harmless re-orderings made. The first two rows
# cannot fail 1c: they define it. bf16 lies far above it and is therefore another computation,
# however natural its rounding.
#
# 1b survived, though 1a was lost at once. Here are the closest calls: the margin of the reference,
# and what bf16 made of the same two logits.

# %%
closest = frames["bf16"].nsmallest(3, "reference_margin").set_index("position")
rows = closest.index.tolist()
pair = candidates["bf16"][rows].gather(1, reference[rows].topk(2).indices).numpy()
closest[["bf16: best", "bf16: second"]] = pair
closest[["reference_margin", "bf16: best", "bf16: second", "top1_agree"]]

# %% [markdown]
# Equal logits are a tie. The token is "equal" there only because the reference's favourite happens
# to have the lower id; the column *of these, ties* counts such rows, and no claim should rest on
# them.

# %% [markdown]
# ## Level 2: the same law
#
# ### By hand: three tokens and a rejection rule
#
# In *speculative decoding* a small **draft** model proposes a token, and the large **target** model
# accepts it with probability min(1, target/draft). Proposed with probability *draft* and then
# accepted, a token comes out with the smaller of the two probabilities. After a rejection another
# token is drawn, and everything depends on the law it is drawn from.
#
# | | A | B | C | sum |
# |---|---|---|---|---|
# | target | .7 | .2 | .1 | 1 |
# | draft | .2 | .5 | .3 | 1 |
# | proposed and accepted: the smaller one | .2 | .2 | .1 | .5 |
# | still missing: target − draft, where positive | .5 | 0 | 0 | .5 |
# | **right rule**: fill up with what is missing | .2 + .5 = **.7** | **.2** | **.1** | 1 |
# | **broken rule**: draw from target again | .2 + .35 = **.55** | .2 + .10 = **.30** | .1 + .05 = **.15** | 1 |
#
# **Prediction.** The right rule gives exactly target: TV 0. The broken rule sounds as sensible,
# writes as fluently, raises no error, and has a TV of .7 − .55 = .15.


# %%
def speculative_law(target_probs, draft_probs, after_rejection):
    accepted = np.minimum(target_probs, draft_probs)
    return accepted + (1 - accepted.sum(-1, keepdims=True)) * after_rejection


def missing(target_probs, draft_probs):
    positive = (target_probs - draft_probs).clip(0)
    return positive / positive.sum(-1, keepdims=True)


# %%
abc = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.5, 0.3])  # target, draft
right, broken = speculative_law(*abc, missing(*abc)), speculative_law(*abc, abc[0])
assert np.allclose(right, abc[0]) and np.allclose(broken, [0.55, 0.30, 0.15])
assert np.isclose(np.abs(broken - abc[0]).sum() / 2, 0.15)
pd.DataFrame({"target": abc[0], "right rule": right, "broken rule": broken}, index=[*"ABC"]).T

# %%
laws = pd.DataFrame({"token": [*"ABC"], "target_prob": abc[0], "draft_prob": abc[1]})
ax = plots.acceptance_picture(laws, ax=plots.axes())
with plots.style():
    ax.legend(reverse=True, loc="lower left", bbox_to_anchor=(0, 1), fontsize="small")
about = {"notebook": "01_three_levels", "target": [*abc[0]], "draft": [*abc[1]]}
print(figures.save(ax.figure, "01_three_tokens", laws, about))

# %% [markdown]
# Green is kept. The orange part is rejected, and it is exactly as large as the blue one, which
# replaces it: that is why the right rule comes out even.
#
# ### On the real pair
#
# The same two functions take all 512 tokens and all 200 places: nothing is sampled, the law itself
# is computed. Beside `tiny-draft` we try a hopeless draft that finds all tokens equally likely.
#
# **Prediction.** A proposal is accepted with probability 1 − TV(target, draft), so the hopeless
# draft will be *slow*. It will not be *wrong*: the right rule gives target for any draft, up to the
# last of the 16 digits of fp64.


# %%
def judge(target_probs, draft_probs):
    rules = {"right rule": missing(target_probs, draft_probs), "broken rule": target_probs}
    laws = {k: speculative_law(target_probs, draft_probs, rule) for k, rule in rules.items()}
    tv = {f"TV, {k}": np.abs(law - target_probs).sum(-1).mean() / 2 for k, law in laws.items()}
    return {"accepted": np.minimum(target_probs, draft_probs).sum(-1).mean(), **tv}


# %%
target_probs = reference.double().softmax(-1).numpy()
draft_probs = candidates["draft instead"].double().softmax(-1).numpy()
drafts = {
    DRAFT: draft_probs,
    "hopeless draft": np.full_like(draft_probs, 1 / draft_probs.shape[-1]),
}
level_2 = pd.DataFrame({name: judge(target_probs, probs) for name, probs in drafts.items()}).T
level_2

# %%
(accepted, _, broken_tv), (_, hopeless_tv, _) = level_2.values[0], level_2.values[1]
formula = 1 - frames["draft instead"]["total_variation"].mean()
Markdown(
    f"Accepted: **{accepted:.4f}**; the formula 1 − TV gives {formula:.4f}, ratio "
    f"{accepted / formula:.4f}. The broken rule is off by a TV of **{broken_tv:.3f}**."
)

# %% [markdown]
# The broken rule errs through accepted tokens alone, because after a rejection it draws from target
# itself. Its TV is therefore at most the share in the first column, and the hopeless draft, with
# little accepted, does less harm here: a better draft does not make this bug smaller.

# %% [markdown]
# ## Level 3: the same usefulness
#
# ### By hand: two answers, one of them right
#
# *How large is the KV cache of 8 texts of 4,096 tokens, with 32 layers, 8 KV heads of 128
# dimensions, keys and values, 2 bytes each?* (KV heads are those whose keys and values are stored;
# several attention heads may share one.) In powers of two, 2³ · 2¹² · 2⁵ · 2³ · 2⁷ · 2 · 2 =
# 2³² bytes: 4.00 GiB.
#
# **Prediction.** An answer of 27 characters with one wrong character has a similarity of 26/27 =
# .963 to the right one. An answer in other words scores low, however right it is.

# %%
assert 8 * 4096 * 32 * 8 * 128 * 2 * 2 == 2**32 == 4 * 1024**3
first = "The KV cache needs 4.00 GiB"
others = {"The KV cache needs 1.00 GiB": "no", "Exactly 2^32 bytes, or four gibibytes": "yes"}
alike = {answer: similarity(first, answer) for answer in others}
assert round(alike["The KV cache needs 1.00 GiB"], 3) == round(26 / 27, 3) == 0.963
pd.DataFrame({"right": others, "similarity": alike})

# %% [markdown]
# The wrong answer is the more similar one. Similarity is worth a look and decides nothing: level 3
# needs tasks, each of them solved or not.
#
# ### On the real model: which bracket closes?
#
# Our 200 places are such a task. It is solved where the model finds the right one of `)` and `]`
# likelier than the other. **Prediction.** Rounding and scaling leave the order of two logits alone
# unless they nearly tie, so the first four changes should lose next to nothing. The small model has
# learnt less; whether that costs brackets is for the count to say.

# %%
closers = target.tokenizer.convert_tokens_to_ids([")", "]"])
option_ids = np.array([closers if text[i] == ")" else closers[::-1] for i in stops])


def lead(logits):  # of the right bracket, the first of the two options; 0 is a tie
    right, wrong = np.take_along_axis(logits.numpy(), option_ids, axis=1).T
    return right - wrong


before = lead(reference) > 0

# %%
after = {name: lead(logits) for name, logits in candidates.items()}
level_3 = pd.DataFrame({"solved": {name: (a > 0).sum() for name, a in after.items()}})
level_3["lost"] = [(before & (a <= 0)).sum() for a in after.values()]
level_3["of these, ties"] = [(before & (a == 0)).sum() for a in after.values()]
level_3["won"] = [(~before & (a > 0)).sum() for a in after.values()]
bounds = [share_interval(int(lost), n, alternative="less").high for lost in level_3["lost"]]
level_3["share lost, at most"] = bounds
print(f"The reference solves {before.sum()} of {n}.")
level_3

# %% [markdown]
# Read *lost* and *won*, not only the sums: a change that loses ten and wins ten solves as many
# tasks as before, and is another model. A tie is scored as lost here, since it prefers neither
# bracket; a rule that took the lower id might score it as kept. The last column says how many of
# all such places may be lost, given that only so many were tried (one-sided 95 %). That number,
# not the count, is held against the margin: with a margin of 2 points, every row whose last
# column exceeds .02 has failed to show that it is as good. Failing to show it is not the same as
# being worse; more places would tell.
#
# ## A vector, not a ladder
#
# It is tempting to think of the levels as a ladder, where whoever stands on one step has climbed
# the others. Equal bits imply everything. Apart from that, keeping one level within its margin does
# not keep another. Put the answers side by side. In the row of the scaled logits 1b and 3 are kept
# and 2 is lost. And compare 1b with 3 in the last row: the small model often has another favourite
# among all tokens, and seldom another preference between two brackets.

# %%
vector = pd.DataFrame(index=list(candidates))
vector["1a: rows changed"] = n - level_1["1a: rows equal"]
vector["1b: greedy tokens changed"] = n - level_1["1b: greedy tokens equal"]
vector["1c: times the floor"] = level_1["1c: times the floor"]
vector["2: mean TV"] = [frame["total_variation"].mean() for frame in frames.values()]
vector["3: brackets changed"] = level_3["lost"] + level_3["won"]
vector

# %% [markdown]
# Multiplying by a positive number keeps every order, so 1b and 3 hold *by proof*; the law becomes
# sharper, so level 2 fails. By how much can be estimated beforehand: TV is about (scale − 1)/2
# times the mean distance of a logit from the mean logit, both taken under the law itself (the
# first term of a series; it comes out high, because a law cannot sharpen beyond 1). The tables
# only count; they do not know the proof, and so *share lost, at most* is above 0 beside a
# certainty.

# %%
mean = (target_probs * reference.numpy()).sum(-1, keepdims=True)
distance = (target_probs * np.abs(reference.numpy() - mean)).sum(-1).mean()
estimate = (SCALE - 1) / 2 * distance
scaled_tv = vector.loc[f"logits × {SCALE}", "2: mean TV"]
Markdown(
    f"Estimate {estimate:.3f}, measured {scaled_tv:.3f}, ratio {scaled_tv / estimate:.2f}. (The "
    f"broken rule was off by {broken_tv:.3f}: a resemblance without a common cause.)"
)

# %%
data = pd.concat(frames.values())[["prompt_id", "position", "total_variation"]]
ax = plots.divergence_by_prompt(data, ax=plots.axes(preset="double"))
ax.invert_yaxis()  # the smallest on top, in the order of the tables
provenance = {"notebook": "01_three_levels", "model": MODEL, "scale": SCALE, **stamp}
print(figures.save(ax.figure, "01_total_variation", data, provenance, preset="double"))

# %% [markdown]
# Mean and largest TV of each change over the 200 places. Re-ordering, bf16 and the rest lie many
# powers of ten apart, which no look at greedy tokens could have told.
#
# Equal laws do not make sampled tokens equal. Sample the *same* law twice, with two seeds: level 2
# holds by construction, and the tokens differ all the same. **Prediction.** Two draws agree with a
# probability that is the sum of the squared probabilities.


# %%
def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(torch.from_numpy(target_probs), 1000, True, generator=generator)


agree, expected = (draw(0) == draw(1)).double().mean().item(), (target_probs**2).sum(-1).mean()
Markdown(f"Draws that agree: {agree:.4f}, expected {expected:.4f}, ratio {agree / expected:.3f}.")

# %% [markdown]
# ## What does "no difference found" show?
#
# If a share *s* of all prompts differ, *n* prompts show no difference with probability (1 − s)ⁿ. So
# long as that is above 5 %, such an *s* is not excluded. The largest one left is 1 − .05^(1/n),
# about 3/n. **By hand:** for n = 3, .05^(1/3) = .37, which leaves 63 %.

# %%
largest_share = pd.Series({m: 1 - 0.05 ** (1 / m) for m in (3, 20, 58, 59, n, 1000)})
assert round(largest_share[3], 2) == 0.63 and largest_share[59] < 0.05 < largest_share[58]
largest_share.rename_axis("identical outputs").to_frame("share that may still differ")

# %% [markdown]
# "3 of 3 identical" leaves room for two thirds of all prompts to differ. Say beforehand which
# share would matter to you; 59 identical outputs are needed to stay below 5 %. Hence the words
# that this workbench uses: *PROVEN* for equal bits or equal laws, *EQUIVALENT* only with such a
# bound below a stated margin, *DIFFERENT*, and otherwise *INCONCLUSIVE*, with the number of
# prompts that it takes.
#
# ## Turn the knobs yourself
#
# The panel holds the 200 rows of logits and answers all levels exactly while you move. Before each
# move, say which answers will change:
#
# 1. *logits times* from 1.0 to 1.2;
# 2. back to 1.0, and *noise* up step by step: which answer falls first, which last?
# 3. noise back to 0, and the *draft rule* through its four settings.

# %%
arrays = reference.numpy(), candidates["draft instead"].numpy(), option_ids
panels.which_level_breaks(*arrays, decode=target.tokenizer.decode)

# %% [markdown]
# The same answers without a panel, for five settings of the knobs. Each is held against a margin:
# the share of places whose greedy token (1b) or bracket (3) may change, and the mean TV (2). 1c
# is missing, because one set of logits has no noise floor.

# %%
settings = {
    f"logits × {SCALE}": {"scale": SCALE},
    "noise .001": {"noise": 1e-3},
    "noise .1": {"noise": 0.1},
    "noise 1": {"noise": 1.0},
    "broken draft rule": {"rule": "resample from target"},
}
tables = {k: levels(*arrays, **v).table.set_index("level")["answer"] for k, v in settings.items()}
margin = {level: f"{level} (margin {m:g})" for level, m in MARGINS.items()}
pd.DataFrame(tables).T.rename(columns=margin)

# %% [markdown]
# Scaling breaks 1a and 2. Noise breaks 1a at once and the others one after another, each when it
# exceeds that level's margin; INCONCLUSIVE means that too few places were tried to say. The draft
# rule touches the law and nothing else, because neither greedy decoding nor our task samples.
#
# ## Fifteen sentences that you will read elsewhere
#
# Each sounds right. Eight were settled above, five are here, and two (11 and 12) in notebook 02.
#
# *"`model = torch.compile(model)`, then `model.generate(…)`, tests the compiler."* A compiler that
# counts its calls says how often; one compiled layer shows that the counter works.


# %%
def counting(graph, _):
    calls.append(graph)
    return graph.forward


calls = []
wrapped = torch.compile(target.network, backend=counting)
wrapped.generate(torch.tensor(prompts[:1]), max_new_tokens=4, do_sample=False)
assert len(calls) == 0
torch.compile(target.network.lm_head, backend=counting)(torch.zeros(1, 256))
assert len(calls) == 1

# %% [markdown]
# *"Compare prompt and answer together"*; *"drop blank lines first"*. Two answers without a common
# character, after the same 95 characters of prompt, share 2 · 95 of 2 · 105 characters. And of four
# answers one pair differs, but the first file has a blank line there:

# %%
prompt, before_, after_ = text[:95], ["4", "", "7", "9"], ["4", "5", "7", "9"]
assert round(similarity(prompt + "ABCDEFGHIJ", prompt + "0123456789"), 3) == 0.905
kept = zip([line for line in before_ if line], after_, strict=False)
moved = [pair for pair in kept if pair[0] != pair[1]]
print(f"differ without the blank line: {moved} of 3; really 1 of 4")

# %% [markdown]
# *"A fixed seed steadies greedy decoding."* Nothing is drawn, so there is nothing to steady; the
# batch, which did move logits, is not touched by a seed. *"Weight-only quantization saves
# arithmetic."* It stores fewer bytes, and multiplies as often:

# %%
few = Decoding(max_new_tokens=16)
seeded = [TransformersEngine(target).generate(prompts[:4], few, seed=s) for s in (0, 1)]
assert [c.output_ids for c in seeded[0]] == [c.output_ids for c in seeded[1]]
weight = target.network.model.layers[0].mlp.up_proj.weight.detach()
scale = weight.abs().amax(1, keepdim=True) / 127
stored, x = (weight / scale).round().to(torch.int8), torch.ones(8, weight.shape[1])

# %%
cost = {}
for name, held in {"float32": weight, "int8": stored}.items():
    with FlopCounterMode(display=False) as counter:
        x @ (held.float() * (scale if name == "int8" else 1)).T
    cost[name] = {"bytes stored": held.nbytes, "operations": counter.get_total_flops()}
pd.DataFrame(cost).T

# %% [markdown]
# | | the sentence | is | as shown by |
# |---|---|---|---|
# | 1 | `model = torch.compile(model)` and then `generate` tests the compiler. | false: it never runs | just above; [00](00_start_here.ipynb) calls it VACUOUS, a test that nothing could fail |
# | 2 | After a rejection, sample from the target. | false: TV .15 | *Level 2*, broken rule |
# | 3 | A poor draft makes the output wrong. | false: slow | *Level 2*, hopeless draft |
# | 4 | Continuous batching is unstable because memory runs short. | false: it is the order of sums; short memory is another fault | *Level 1*, batches of 8; [10](10_troubleshooting.ipynb), symptom 2, tells them apart |
# | 5 | The formula is the same, so batching and paging are lossless. | it depends: batching lost 1a and kept 1b here; paging is not tried here | *Level 1*, both parts; [10](10_troubleshooting.ipynb), symptom 2, has a paged cache |
# | 6 | Nearly all outputs are equal, so there is no effect. | false: 3 of 3 leave 63 % | *What does "no difference found" show?* |
# | 7 | Compare prompt and answer together. | false: disjoint answers score .905 | just above |
# | 8 | Drop blank lines before comparing. | false: pairs shift | just above |
# | 9 | A similarity near 1 is harmless. | false: 4.00 and 1.00 GiB have .963 | *Level 3*, by hand |
# | 10 | A fixed seed steadies greedy decoding. | false: nothing is drawn | just above |
# | 11 | The real KV cache is always above the estimate. | it depends: blocks lie above, latent caches (one short vector in place of a token's keys and values) 57 times below the naive formula | [02](02_kv_cache_sizing.ipynb), *Fewer heads, or a latent* |
# | 12 | An 8B model in fp16 fits a 16 GB card. | false: its weights alone are 14.96 GiB = 16.06 GB, more than a card of 16·10⁹ bytes, and all but 1 GiB of one with 16 GiB | [02](02_kv_cache_sizing.ipynb), *The formula* |
# | 13 | Weight-only quantization saves arithmetic. | false: it saves bytes | just above |
# | 14 | Numbers, texts and tasks were checked, so everything was. | false: the law has no row there | *A vector, not a ladder*: logits × 1.2 |
# | 15 | Attention heads size the KV cache. | it depends: KV heads do, and only in old models are they as many | *Level 3*, by hand; [02](02_kv_cache_sizing.ipynb) |
#
# ## Five neighbours of the word
#
# | what is done | level that can hold | why |
# |---|---|---|
# | **Lossy inference with calibration**: coarser weights, scales fitted to sample texts | 3; also 2 within a margin, at 8 bits | The weights are others, so all of level 1 and the exact law are gone. Calibration makes the error small on texts like its own: test on others. [04](04_quantization_error.ipynb) |
# | **Quantization-aware training** | 3 against the original; level 1 only against itself | Training has made another model. Take it as the new reference, and its integer kernels can be held to it bit by bit. [04](04_quantization_error.ipynb) |
# | **Speculative decoding** | 2 exactly; greedy: 1b but for near ties | The right rule gives target for any draft. Several tokens are checked in one pass, which re-orders sums: no 1a. [05](05_speculative_decoding.ipynb) |
# | **Streaming** | 1a | The same tokens, shown earlier. Only their display can go wrong: below. ("StreamingLLM" is another thing: it forgets tokens, as the last row does.) |
# | **Cache optimisation** | paged or shared: 1c, 1b but for near ties; rounded or thinned out: 3, and 2 within a margin | Paging stores the same numbers elsewhere, and only the order of sums may change. A rounded cache is read by every later token. [02](02_kv_cache_sizing.ipynb), [04](04_quantization_error.ipynb) |

# %%
ids = target.tokenizer("中", add_special_tokens=False)["input_ids"]
one_by_one = [target.tokenizer.decode([i]) for i in ids]
assert target.tokenizer.decode(ids) == "中" and "中" not in "".join(one_by_one)
print(f"{len(ids)} tokens, one by one: {one_by_one}; together: {target.tokenizer.decode(ids)}")

# %% [markdown]
# ## Verdict

# %%
scaled, noisy, bf16 = vector.loc[f"logits × {SCALE}"], vector.iloc[:2].max(), vector.loc["bf16"]
ties = [table.loc["bf16", "of these, ties"] for table in (level_1, level_3)]
bound = share_interval(int(noisy.iloc[1]), n, alternative="less").high
Markdown(
    f"""Equal bits imply everything; apart from that, keeping one level within its margin does not keep
another. On {MODEL}, logits × {SCALE} changed {scaled.iloc[1]} of {n} greedy tokens, {scaled.iloc[4]}
choices between brackets, and the sampling law by a mean TV of {scaled.iloc[3]:.3f}.
Re-ordering the same sums changed {noisy.iloc[1]} tokens, hence at most {bound:.1%} of all such places (one-sided 95 %), at a mean TV of {noisy.iloc[3]:.0e}; bf16, at {bf16.iloc[3]:.0e},
changed {bf16.iloc[1]} tokens (of the others {ties[0]} hung on a tie) and {bf16.iloc[4]} choices between brackets
(ties: {ties[1]}). Not shown: later tokens, other texts and
models, engines, GPUs, and any task but {n} closing brackets."""
)

# %% [markdown]
# ## Exercises
#
# Write your answers into the next cell, in forms such as `{1: "z", 3: 0.01, 4: (0.3, 0.3, 0.4)}`,
# and run it with the one after it, which says what is wrong, but never the solution.
#
# 1. A candidate's logits are those of the reference **plus 3**, for every token. Which claims are
#    broken, rounding apart, with 1c as worded in the table of levels? (a) 1a only (b) 1a and 2
#    (c) all of them
# 2. fp16 keeps 11 binary digits. Find three numbers, as above, whose sum depends on the order.
# 3. Target has the law .5, .5 and the draft .9, .1. Which share of the proposals is accepted?
# 4. A real bug: the draft of the three tokens proposed its *likeliest* token, but was judged by its
#    softmax probabilities. Which law comes out?
# 5. How many identical outputs does it take until a share of 2 % is excluded (at 95 %)?
# 6. Write a right answer that holds a number, in digits, and a wrong one with another number whose
#    similarity to it is above .99.
# 7. A program parses the JSON that your service writes greedily. Which claim do you have to check:
#    1a, 1b, 2 or 3?
# 8. A million sampled dialogues are to train another model. Which claim?
# 9. An assistant explains recipes to people. Which claim?
# 10. An audit repeats last year's run and compares checksums of its logits. Which claim?

# %%
ANSWERS = {1: None, 2: None, 3: None, 4: None, 5: None}
ANSWERS |= {6: None, 7: None, 8: None, 9: None, 10: None}

# %%
for exercise, answer in ANSWERS.items():
    print(f"{exercise}: {check(exercise, answer)}")

# %% [markdown]
# <details><summary>Where to look</summary>
#
# 1: *The words*. 2: *Level 1*, the first sum. 3 and 4: the table of *Level 2*. 5: *What does "no
# difference found" show?* 6: *Level 3*, by hand. 7 to 10: the last column of the table of levels.
#
# </details>
#
# Teachers: worked solutions, and what each wrong answer tells about its author, stand in
# [solutions/01_three_levels.md](solutions/01_three_levels.md).
#
# ## Glossary · 词汇表

# %%
glossary = pd.read_csv(paths.DATA / "glossary" / "glossary.csv")
glossary.columns = ["English", "中文", "Definition", "定义"]
Markdown(figures.to_markdown(glossary))

# %% [markdown]
# ## Sources
#
# - The right rule, and why it is exact: Leviathan, Kalman, Matias, *Fast inference from transformers
#   via speculative decoding* (2023), arXiv 2211.17192; Chen et al. (2023), arXiv 2302.01318.
# - The bug of exercise 4: huggingface/transformers, issue 32867.
# - Rounding: Goldberg, *What every computer scientist should know about floating-point arithmetic*,
#   ACM Computing Surveys 23 (1991).
# - The rule of three: Hanley and Lippman-Hand, *If nothing goes wrong, is everything all right?*,
#   JAMA 249 (1983).
# - The models: `data/models`, trained on the source of Python's standard library.
#
# Next: 02 (how much memory a cache takes), 03 (where compiled code departs), 05 (speculative
# decoding in full).
