"""A real llama.cpp server logs exactly the KV cache that the rules predict."""

import json
import urllib.request

import pytest

from lossless_lab import paths
from lossless_lab.engines.llamacpp import kv_log, serve
from lossless_lab.kv_cache import kv_cache_bytes

GGUF = paths.CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def needs(request):
    if request.node.get_closest_marker("engine"):
        pytest.importorskip("xllamacpp")
        if not GGUF.is_file():
            pytest.skip("SmolLM2's GGUF is not in the cache")


def predicted(options):
    return kv_cache_bytes(
        "smollm2-135m",
        seq_len=options["n_ctx"] // options.get("n_parallel", 1),
        batch_size=options.get("n_parallel", 1),
        dtype={"k": options.get("cache_type_k", "f16"), "v": options.get("cache_type_v", "f16")},
        engine="llama.cpp",
        kv_unified=options.get("kv_unified", False),
    )


@pytest.mark.engine
@pytest.mark.smollm2
@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 256},
        {"n_ctx": 1000},
        {"n_ctx": 4096},
        {"n_ctx": 2048, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"n_ctx": 2048, "cache_type_k": "q4_0", "cache_type_v": "q4_0"},
        {"n_ctx": 1536, "cache_type_k": "q8_0"},
        {"n_ctx": 1024, "cache_type_k": "q5_1", "cache_type_v": "iq4_nl"},
        {"n_ctx": 512, "cache_type_k": "f32", "cache_type_v": "f32"},
        {"n_ctx": 1024, "cache_type_k": "bf16", "cache_type_v": "bf16"},
        {"n_ctx": 2000, "n_parallel": 4},
        {"n_ctx": 2000, "n_parallel": 4, "kv_unified": True},
    ],
    ids=lambda o: "-".join(str(v) for v in o.values()),
)
def test_log_line_is_predicted(options):
    with serve(GGUF, **options) as server:
        caches = kv_log(server.log())
    size = predicted(options)
    part = size.parts[0]
    streams = 1 if options.get("kv_unified") else options.get("n_parallel", 1)
    assert len(caches) == 1
    row = caches.iloc[0]
    assert row.cells * streams == part.cells
    assert row.n_layers == part.n_layers
    assert f"{row.size_mib:.2f}" == f"{size.bytes / 2**20:.2f}"


@pytest.mark.engine
@pytest.mark.smollm2
def test_server_answers_on_loopback_and_stops():
    with serve(GGUF, n_ctx=256) as server:
        assert server.address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{server.address}/health", timeout=30) as reply:
            assert json.load(reply)["status"] == "ok"
    assert server.process.returncode is not None


@pytest.mark.engine
@pytest.mark.smollm2
def test_a_server_that_cannot_start_says_why(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(RuntimeError, match="did not start"):
        serve(broken)


def test_missing_file_is_named(tmp_path):
    with pytest.raises((FileNotFoundError, ImportError), match=r"gguf|xllamacpp"):
        serve(tmp_path / "none.gguf")


def test_log_of_an_interleaved_model_has_two_caches():
    log = """
llama_kv_cache: size = 3072.00 MiB (131072 cells,  12 layers,  1/1 seqs), K (f16): 1536.00 MiB, V (f16): 1536.00 MiB
llama_kv_cache: size =   18.00 MiB (   768 cells,  12 layers,  1/1 seqs), K (f16):    9.00 MiB, V (f16):    9.00 MiB
llama_memory_recurrent: size =  149.62 MiB (     1 cells,  64 layers,  1 seqs), R (f32):    5.62 MiB, S (f32):  144.00 MiB
"""  # noqa: E501
    caches = kv_log(log)
    assert caches.kind.tolist() == ["kv", "kv", "state"]
    size = kv_cache_bytes("gpt-oss-20b", seq_len=131072, dtype="f16", engine="llama.cpp")
    assert sorted(part.cells for part in size.parts) == sorted(caches.cells[:2])
    assert caches.size_mib[:2].sum() * 2**20 == size.bytes
