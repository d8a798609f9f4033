"""Every published figure: engine logs, papers, and caches measured on meta tensors."""

import json
import re
from pathlib import Path

import pytest

from lossless_lab.kv_cache import engine, geometry, kv_cache_bytes
from lossless_lab.kv_cache.allocators import Request
from lossless_lab.kv_cache.formats import storage_formats

CASES = json.loads((Path(__file__).parent / "cases" / "kv_cache_cases.json").read_text("utf-8"))
MORE = json.loads((Path(__file__).parent / "cases" / "kv_cache_more.json").read_text("utf-8"))
UNITS = {"MiB": 2**20, "GiB": 2**30, "B": 1}
# A setting of a case, and the argument or engine option of ours that it is.
ARGUMENTS = {
    "batch": "batch_size",
    "beams": "num_beams",
    "enc_len": "encoder_len",
    "vision_tokens": "encoder_len",
    "tp": "tensor_parallel",
    "tensor_parallel": "tensor_parallel",
}
OPTIONS = {
    "kv_unified": "kv_unified",
    "max_cache_len": "max_cache_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "n_batch": "n_batch",
    "n_ubatch": "n_ubatch",
    "num_gpu_blocks": "n_blocks",
    "num_tokens": "n_tokens",
    "page_size": "page_size",
    "swa_cells": "swa_cells",
}
# What a log answers rather than what the user set; the rule must give it, see below.
ANSWERED = {"allocated_tokens", "allocated_enc_tokens", "attn_bytes_per_token_per_layer"}


def request(case, *, given=True):
    """Our arguments for a case's settings; `given=False` leaves out what a log answered."""
    settings = dict(case["settings"])
    arguments = {"seq_len": settings.get("seq_len", 1), "dtype": settings.get("kv_dtype", "bf16")}
    if settings.get("engine"):
        arguments["engine"] = settings["engine"]
    if settings.get("swa") == "full-size" and settings["engine"].startswith("llama.cpp"):
        arguments["swa_full"] = True
    if "block_size" in settings and settings["scope"] != "state_per_layer":
        arguments["block_size"] = settings["block_size"]
    state = re.search(r"(?:ssm|state) (f\d+|bf16)", str(settings.get("state_dtype", "")))
    if state and "vllm" in settings["engine"].lower():
        arguments["ssm_dtype"] = state[1]
    names = {**ARGUMENTS, **OPTIONS}
    for name, value in settings.items():
        if name in names and (given or name != "swa_cells"):
            arguments[names[name]] = value
    return arguments


def answer(size, scope):
    """The part of the cache that a case's figure is about."""
    if scope == "per_token":
        return size.bytes_per_token
    if scope == "full_attention_layers":
        return size.of_kind("full", "latent")
    if scope == "recurrent_state_total":
        return size.of_kind("state")
    if scope == "cross_kv":
        return size.of_kind("cross")
    if scope == "self_kv":
        return size.bytes - size.of_kind("cross")
    if scope == "state_per_layer":
        state = next(part for part in size.parts if part.kind == "state")
        return state.stored_bytes // state.n_layers // size.n_sequences
    assert scope in ("total", "per_gpu", "self+cross"), scope
    return size.bytes


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["expected_bytes"] is not None], ids=lambda c: c["id"]
)
def test_bytes_equal_the_published_figure(case):
    size = kv_cache_bytes(case["config"], **request(case))
    expected, tolerance = case["expected_bytes"], case["tolerance_rel"]
    assert answer(size, case["settings"]["scope"]) == pytest.approx(expected, rel=tolerance), size


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.get("expected_unit") == "elements"], ids=lambda c: c["id"]
)
def test_elements_per_token_equal_the_paper(case):
    elements = sum(layer.elements for layer in geometry(case["config"]).layers)
    assert elements == pytest.approx(case["expected_value"], rel=case["tolerance_rel"])


def test_rolling_buffer_is_eight_times_smaller():
    case = next(c for c in CASES if c["id"] == "mistral7b-rolling-8x")
    windowed = kv_cache_bytes(case["config"], seq_len=32768).bytes
    full = kv_cache_bytes({**case["config"], "sliding_window": None}, seq_len=32768).bytes
    assert full / windowed == 8.0


@pytest.mark.parametrize(
    "case", [c for c in CASES if "swa_cells" in c["settings"]], ids=lambda c: c["id"]
)
def test_window_cells_come_out_of_the_rule(case):
    arguments = request(case, given=False)
    if "missing_fact" in case:
        arguments["engine"] = case["missing_fact"]["engine"]
    size = kv_cache_bytes(case["config"], **arguments)
    window = next(part for part in size.parts if part.kind == "sliding")
    assert window.cells == case["settings"]["swa_cells"]


@pytest.mark.parametrize(
    ("name", "kind"), [("allocated_tokens", "full"), ("allocated_enc_tokens", "cross")]
)
def test_padded_tokens_come_out_of_the_rule(name, kind):
    for case in (c for c in CASES if name in c["settings"]):
        size = kv_cache_bytes(case["config"], **request(case))
        part = next(p for p in size.parts if p.kind == kind)
        assert part.cells == case["settings"][name], case["id"]


def test_hybrid_block_size_comes_out_of_the_rule():
    for case in (c for c in CASES if c["settings"]["scope"] == "state_per_layer"):
        key, value = storage_formats(case["settings"].get("kv_dtype", "bf16"))
        asked = Request(seq_len=1, n_sequences=1, key_format=key, value_format=value)
        rules = engine(case["settings"]["engine"])
        found = rules.hybrid_block_size(geometry(case["config"]), asked)
        assert found == case["settings"]["block_size"], case["id"]


def test_every_case_is_used_and_has_a_source():
    assert len(CASES) == 73
    assert all(case["source"] for case in CASES)
    known = set(ARGUMENTS) | set(OPTIONS) | ANSWERED
    known |= {"engine", "seq_len", "kv_dtype", "scope", "swa", "block_size", "state_dtype"}
    known |= {"engine_variant"}  # in words, and in the engine's flags as well
    assert {name for case in CASES for name in case["settings"]} <= known


@pytest.mark.parametrize("case", MORE, ids=lambda c: c["id"])
def test_what_an_engine_logged(case):
    """A log prints two decimals; two such figures are added for K and V in GiB."""
    arguments, scope = dict(case["arguments"]), case["scope"]
    if scope == "block":
        key, value = storage_formats(arguments.pop("dtype"))
        asked = Request(seq_len=1, n_sequences=1, key_format=key, value_format=value)
        rules = engine(arguments.pop("engine"), **arguments)
        assert rules.hybrid_block_size(geometry(case["config"]), asked) == case["expected"]
        return
    size = kv_cache_bytes(case["config"], **arguments)
    states = size.of_kind("state")
    wanted = {"total": size.bytes, "state": states, "attention": size.bytes - states}
    found = wanted[scope] if scope in wanted else size.of_kind(scope)
    slack = {"MiB": 0.0101, "GiB": 0.0151, "B": 0}[case["unit"]]
    assert abs(found / UNITS[case["unit"]] - case["expected"]) <= slack, size


def test_more_cases_are_all_different_and_have_sources():
    assert len({json.dumps([c["config"], c["arguments"], c["scope"]]) for c in MORE}) == len(MORE)
    assert len(MORE) >= 90 and all(case["source"] for case in MORE)
