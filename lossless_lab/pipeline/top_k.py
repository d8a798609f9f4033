"""Two stored runs that kept the likeliest tokens alone: the distance that these still prove."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lossless_lab.pipeline.subjects import shared_positions
from lossless_lab.runs import Run
from lossless_lab.statistical.censored import kl_lower_bound


def compare_top_k(reference: str | Path, candidate: str | Path) -> pd.DataFrame:
    """The least KL(reference‖candidate) that the top_logprobs of two run folders allow.

    Laws are compared as long as the contexts agree: up to and including the first token that
    differs. What the lists leave out is unknown: the KL may be larger than what is printed, the
    mean over positions with the reference's mass that both lists name, never smaller.

    Returns
    -------
    DataFrame
        A row per position: prompt_id, sample_index, position, kl_at_least_nats, covered_mass.

    Raises
    ------
    ValueError
        For log-probabilities of different kinds, other prompts, or outputs without such lists.
    """
    runs, rows = (Run(reference), Run(candidate)), []
    kinds = [run.manifest.logprobs_kind for run in runs]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"`candidate` must have {kinds[0]} logprobs as `reference`; got {kinds[1]}"
        )
    theirs = {(r.prompt_id, r.sample_index, r.prompt_ids): r for r in runs[1].records}
    for own in runs[0].records:
        key = own.prompt_id, own.sample_index, own.prompt_ids
        pair = own, theirs.get(key)
        lists = [len(r.top_logprobs or ()) - len(r.output_ids or ()) for r in pair if r]
        if lists != [0, 0] or not own.top_logprobs:
            told = "be in both runs with the same ids and top_logprobs, one list per token"
            raise ValueError(f"prompt {key[0]!r}, sample {key[1]} must {told}; it is not")
        n = shared_positions(*(r.output_ids for r in pair))
        for i, tops in enumerate(zip(*(r.top_logprobs[:n] for r in pair), strict=True)):
            known = ([(token, x) for token, x in top if x is not None] for top in tops)
            rows.append((*key[:2], i, *kl_lower_bound(*known)[:2]))
    columns = ["prompt_id", "sample_index", "position", "kl_at_least_nats", "covered_mass"]
    frame = pd.DataFrame(rows, columns=columns)
    kl, mass = frame[columns[3:]].mean()
    told = f"the lists name {mass:.3f} of the reference's mass"
    print(f"mean KL(reference‖candidate) at least {kl:.2g} nats over {len(frame)} tokens; {told}")
    return frame
