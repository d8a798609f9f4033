# %% [markdown]
# # 07 · Is it as good at the job, and how sure can we be?
#
# **Question.** An optimised model answers the same questions as before. Is it as good, within a
# stated margin, and could this set of questions have shown harm at all?

# %% [markdown]
# **What you will learn**
#
# - to read a 2×2 table of items gained and lost, and to test it as what it is: paired;
# - why equal accuracy is not equal behaviour;
# - what *non-inferior within a margin* means, and how many items it takes;
# - what *assay sensitivity* is: a test that could not have failed proves nothing;
# - why the margin of the right answer sees more than the accuracy does, and text similarity less.
#
# **What you need**: two CPU cores and about six minutes; SmolLM2 (98 MB, fetched once). The tiny
# pair answers at chance, so there this level is NOT APPLICABLE.

# %%
import pandas as pd
from IPython.display import Markdown

from lossless_lab import figures, models, plots
from lossless_lab.optimizations import quantized
from lossless_lab.pipeline.tasks import choose
from lossless_lab.prompts.task_items import read_tasks
from lossless_lab.semantic import paired
from lossless_lab.semantic.paired import PairedTable, items_needed, mcnemar, smallest_margin
from lossless_lab.semantic.tasks import compare_tasks
from lossless_lab.semantic.text import text_scores

# %% [markdown]
# `CANDIDATES` are number formats of the weights (notebook 04); `CONTROL` is one that is known to be bad. Every
# `EVERY`-th item is asked: 1 asks all 1,843 of them.

# %% tags=["parameters"]
MODEL = "smollm2"
CANDIDATES = ("int8-channel", "int4-group32")
CONTROL = "int2-group32"
EVERY = 4
MARGIN = 0.02

# %%
model = models.load(MODEL)
tasks = read_tasks()[::EVERY]
stamp = {"model": MODEL, "items": len(tasks), "margin": MARGIN}
pd.options.display.float_format = "{:.3g}".format
print(model, stamp, sep="\n")

# %% [markdown]
# ## Eight items, by hand
#
# Both sides answer the same eight questions. Seven times they agree; once the reference is right
# and the candidate is not. **Prediction.** One lost item and none gained is a coin tossed once: it
# shows heads. The p-value is 1.

# %%
table = paired.paired_table([1, 1, 1, 1, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0, 0, 1])
assert (table.only_reference, table.only_candidate, mcnemar(table)) == (1, 0, 1.0)
print(table)

# %% [markdown]
# **Read back.** Accuracy fell from .750 to .625, and nothing is shown. How low could the candidate
# really be? The interval says: anything from far worse to somewhat better.

# %%
low, high = paired.score_interval(table)
print(
    f"difference {100 * table.difference:+.1f} points, limits {100 * low:+.0f} to {100 * high:+.0f}"
)

# %% [markdown]
# ## Paired beats unpaired
#
# 220 questions; both right 180 times, only the reference 15, only the candidate 3. Two accuracies
# compared as if they came from different questions differ by p = .10. **Prediction.** Of 18 items
# that changed, 15 went one way; a fair coin does that about once in 130 times.

# %%
seen = PairedTable(both=180, only_reference=15, only_candidate=3, neither=22)
print(f"exact McNemar p = {mcnemar(seen):.4f}, once in {1 / mcnemar(seen):.0f}")

# %% [markdown]
# **Read back.** What all 202 unchanged items have in common tells nothing about the change.
# The opposite trap: 20 lost, 20 gained.

# %%
same = PairedTable(both=150, only_reference=20, only_candidate=20, neither=30)
print(same)

# %% [markdown]
# ## How many items does it take?
#
# To rule out a loss of m with 80 % power when a share ψ of items flips, n ≈ ψ (2.49 / m)². A rule
# that ignores the pairing pays 2 p (1 − p) instead of ψ.

# %%
sizes = [100, 200, 300, 500, 1_000, 1_319, 2_000, 5_000, 10_000]
rules = {f"paired, {100 * d:g} % flip": d for d in (0.02, 0.05, 0.10)} | {"unpaired": 0.5}
curves = pd.DataFrame(
    [(name, n, 100 * smallest_margin(n, d)) for name, d in rules.items() for n in sizes],
    columns=["rule", "n_items", "margin_points"],
)
ax = plots.margin_by_items(curves, ax=plots.axes())
print(figures.save(ax.figure, "07_items_needed", curves, stamp))

# %%
known = curves[curves["n_items"] == 1_319].set_index("rule")["margin_points"]
ratio = known["unpaired"] / known["paired, 5 % flip"]
print(
    f"1,319 items: {known['paired, 5 % flip']:.2f} points paired, {known['unpaired']:.2f} not: × {ratio:.1f}"
)
print(f"one point at 5 % flips takes {items_needed(0.01, 0.05):,} items")

# %% [markdown]
# **Read back.** 1,319 items is the size of GSM8K. TensorRT-LLM's published rule, unpaired, resolves
# 4.84 points there; the paired one resolves a third of that.
#
# ## A real model
#
# Each item is a prompt with two to four continuations; the answer is the one that the model gives
# the highest likelihood. The *margin* is how far the right one lies above the best wrong one, in
# nats: it moves before an answer flips.

# %%
answers = {"reference": choose(model, tasks)}
for name in (*CANDIDATES, CONTROL):
    answers[name] = choose(quantized(name).apply(model).model, tasks)

# %%
control = answers[CONTROL]
compared = {
    name: compare_tasks(answers["reference"], answers[name], margin=MARGIN, control=control)
    for name in CANDIDATES
}

# %%
first = compared[CANDIDATES[0]].frame
columns = ["category", "n_groups", "reference_accuracy", "candidate_accuracy", "lost", "gained"]
first[[*columns, "word", "why"]]

# %% [markdown]
# **Read back.** A category counts only where the reference beats chance *and* the two-bit control
# is told from it. Where either fails, "no difference" would have been the answer to any damage.


# %%
def changes(estimate, low, high, scale):
    rows = [c.frame.assign(candidate=name) for name, c in compared.items()]
    frame = pd.concat(rows).query("why == ''")
    values = {"estimate": estimate(frame), "low": frame[low], "high": frame[high]}
    return frame[["candidate", "category"]].assign(**{k: scale * v for k, v in values.items()})


points = changes(lambda f: f["candidate_accuracy"] - f["reference_accuracy"], "low", "high", 100)
assert len(points), f"{MODEL} answers at chance: this level is NOT APPLICABLE to it"
ax = plots.task_changes(points, ax=plots.axes(preset="double"), margin=100 * MARGIN)
print(figures.save(ax.figure, "07_accuracy", points, stamp, preset="double"))

# %%
nats = changes(lambda f: f["margin_change_nats"], "margin_change_low", "margin_change_high", 1)
ax = plots.task_changes(nats, ax=plots.axes(preset="double"), unit="nats")
print(figures.save(ax.figure, "07_margin", nats, stamp, preset="double"))

# %% [markdown]
# **Read back.** The accuracy's limits are wide, since only items that flip speak. The margin is
# known for each item, so the same questions say more.
#
# ## What was lost
#
# The items whose margin fell most, the right choice beside what the candidate chose.

# %%
worst = list(compared[CANDIDATES[-1]].worst[:6])
shown = answers[CANDIDATES[-1]].set_index("id").loc[worst, ["category", "chosen", "margin_nats"]]
by_id = {task.id: task for task in tasks}
shown["right choice"] = [by_id[i].choices[by_id[i].answer] for i in worst]
shown["reference margin"] = answers["reference"].set_index("id").loc[worst, "margin_nats"]
shown

# %% [markdown]
# ## Text similarity decides nothing
#
# **Prediction.** One digit in a sentence changes the answer and hardly the similarity; leaving out
# one character of a Chinese sentence turns it into its opposite.

# %%
pairs = {
    "a digit": (
        "The cache takes 4.00 GiB at 4,096 tokens.",
        "The cache takes 1.00 GiB at 4,096 tokens.",
    ),
    "not": ("量化之后输出没有变化。", "量化之后输出有变化。"),
    "other words, same meaning": ("It did not change.", "Nothing was altered."),
}
pd.concat([text_scores(*pair).to_frame().assign(what=what) for what, pair in pairs.items()])[
    ["what", "characters", "edit_distance", "bleu", "chrf", "rouge_l"]
].set_index("what")

# %% [markdown]
# ## Verdict

# %%
Markdown("\n".join(f"- **{name}** on {MODEL}: {found}." for name, found in compared.items()))

# %% [markdown]
# **What was not shown.** Items of other kinds and languages; free answers; long ones; what happens
# in the categories without assay sensitivity; and a loss smaller than the margin.
#
# ## Exercises
#
# 1. A colleague reports "accuracy .71 before, .71 after, p = 1: lossless". What do you ask for?
# 2. You must rule out one point at 5 % flips, and have 300 items. What can you do?
# 3. Why is a category at chance dropped *before* looking at the candidate?
#
# <details><summary>Answers</summary>
#
# 1. The 2×2 table. Twenty lost and twenty gained give the same numbers (first half of this page).
# 2. Not with accuracy: 300 items rule out 3.2 points. Use the margin change in nats, or ten times
#    as many items.
# 3. Choosing categories by what the candidate did there would bias the answer; and where the
#    reference guesses, a candidate that guesses is as good.
#
# </details>

# %%
print(f"300 items: {100 * smallest_margin(300, 0.05):.1f} points")
assert paired.non_inferiority(same, margin=0.02) == "INCONCLUSIVE"

# %% [markdown]
# ## Sources
#
# McNemar 1947 (Psychometrika 12); Tango 1998 (Statist. Med. 17, 891), checked against R's PropCIs;
# lm-evaluation-harness issue 3831 (unpaired against paired); "Accuracy is not all you need"
# (arXiv 2407.09141); ICH E10 for assay sensitivity; Post 2018 for BLEU with a signature.
