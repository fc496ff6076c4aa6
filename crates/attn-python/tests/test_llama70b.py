"""The example of Llama 2 70B's shape: its prediction's arithmetic, and its steps on several ranks of the CPU."""

import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys

import attn
import pytest
from conftest import require

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
DATA = PACKAGE.parent.parent / "docs" / "data"


@pytest.fixture(scope="module")
def llama70b():
    spec = importlib.util.spec_from_file_location("llama70b", PACKAGE / "examples" / "llama70b.py")
    module = sys.modules["llama70b"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bytes_are_those_of_the_shape(llama70b):
    shape = llama70b.Shape()
    assert shape.weights == 80 * (10240 * 8192 + 8192 * 8192 + 57344 * 8192 + 8192 * 28672) == 68_451_041_280
    step = llama70b.predicted(shape, "bf16", 16, 8192, 4)
    assert step.weights_bytes == 68_451_041_280 // 4
    # K and V, 2 bytes, of 2 of the 8 KV heads.
    assert step.cache_bytes == 80 * 16 * 8192 * 2 * 2 * 128 * 2
    # By tokens a GPU has all KV heads of a quarter of the tokens, as many bytes; of 2500 tokens a span of 1024.
    assert llama70b.predicted(shape, "bf16", 16, 8192, 4, by_tokens=True).cache_bytes == step.cache_bytes
    assert llama70b.predicted(shape, "bf16", 1, 2500, 4, by_tokens=True).cache_bytes == 80 * 1024 * 8 * 2 * 128 * 2
    # A residual page beside those of int4's codes, at half a byte and two bytes of scale for each row.
    assert llama70b.predicted(shape, "int4", 1, 64, 1).cache_bytes > 80 * 64 * 8 * 2 * (64 + 2)


def test_a_step_is_the_sum_of_its_parts(llama70b):
    shape = llama70b.Shape(hidden=1000, layers=10, heads=8, kv_heads=8, dim=64, feed=2000)
    machine = llama70b.Machine(
        memory=5e9,
        weights_per_second=1e9,
        products_per_second=4e10,
        small_seconds={"bf16": 0.5},
        row_seconds=0.25,
        row_share_whole=0.5,
        collective_seconds=1e-3,
        link_per_second=1e6,
        shard_seconds=3e-3,
        shard_per_second=1e5,
        cache_per_second={"bf16": 1e8},
    )
    weights = 10 * 1000 * (3 * 512 + 512 + 3 * 2000)
    one = llama70b.predicted(shape, "bf16", 1, 1024, 1, machine=machine)
    assert one.weights_bytes == weights and one.exchange == 0
    assert one.products == pytest.approx(weights / 1e9)
    assert one.attention == pytest.approx(10 * 1024 * 8 * 2 * 64 * 2 / 1e8)
    assert one.small == pytest.approx(0.75)
    assert one.ms == pytest.approx(1e3 * (one.products + one.attention + one.small))
    # 64 rows take longer than the weights' read; two GPUs have half of each, and a row's whole part and half of the rest.
    two = llama70b.predicted(shape, "bf16", 64, 1024, 2, machine=machine)
    assert two.products == pytest.approx(2 * weights / 2 * 64 / 4e10)
    assert two.attention == pytest.approx(64 * one.attention / 2)
    assert two.small == pytest.approx(0.5 + 64 * 0.25 * 0.75)
    # Of a sum over two GPUs each sends half of the row twice; 2 bytes an element.
    row = 2 * 64 * 1000
    assert two.exchange == pytest.approx(10 * 2 * (1e-3 + row / 1e6))
    # By tokens: half of q, k and v of the batch, and the other GPU's half of the heads' states of a span.
    by_tokens = llama70b.predicted(shape, "bf16", 64, 2048, 2, by_tokens=True, machine=machine)
    gather, states = 2 * 64 * 3 * 512 / 2, 64 * 8 * 66 * 4 / 2
    assert by_tokens.exchange == pytest.approx(10 * (2 * (1e-3 + row / 1e6) + 3e-3 + (gather + states) / 1e5))
    # Weights, cache and 2 GB for the step.
    least = two.weights_bytes + two.cache_bytes + 2e9
    for memory, fits in ((least, True), (least - 1, False)):
        assert llama70b.predicted(shape, "bf16", 64, 1024, 2, machine=llama70b.Machine(memory=memory)).fits is fits
    with pytest.raises(SystemExit, match="formats to predict"):
        llama70b.predicted(shape, "int8", 1, 1, 1, machine=machine)


@pytest.mark.parametrize("name, most", [("llama70b", 0.06), ("llama70b-2", 0.09), ("llama70b-4", 0.09), ("llama70b-tokens", 0.09)])
def test_steps_are_predicted_as_they_were_measured(llama70b, name, most):
    path = DATA / f"{name}-h200.json"
    if not path.exists():
        pytest.skip("docs/data is not here")
    for row in json.loads(path.read_text()):
        step = llama70b.predicted(llama70b.Shape(), row["format"], row["batch"], row["context"], row["gpus"], row["by"] == "tokens")
        # The caches that were measured had no residual page of a sequence's first tile, which int4 has.
        shape, kv_heads = llama70b.Shape(), llama70b.Shape().kv_heads // (1 if row["by"] == "tokens" else row["gpus"])
        one = attn.Cache(row["format"], heads=kv_heads, dim=shape.dim, max_tokens=0, pages=0, device="cpu")
        first_tile = shape.layers * row["batch"] * one.stats().page_bytes if row["format"] == "int4" else 0
        assert (step.cache_bytes - first_tile) / 1e9 == pytest.approx(row["cache_gb"], abs=0.006)
        assert step.fits == (row["ms"] is not None), row
        assert not step.fits or step.ms == pytest.approx(row["ms"], rel=most), row


@pytest.mark.parametrize("name, by_tokens", [("llama70b-predicted", False), ("llama70b-predicted-tokens", True)])
def test_the_prediction_on_record_is_the_programs(llama70b, name, by_tokens):
    path = DATA / f"{name}.json"
    if not path.exists():
        pytest.skip("docs/data is not here")
    recorded = json.loads(path.read_text())
    lists = [list(dict.fromkeys(row[key] for row in recorded)) for key in ("format", "batch", "context")]
    assert recorded == llama70b.predictions(llama70b.Shape(), *lists, by_tokens)


def _steps(ranks, *arguments):
    """The example's rows of so many ranks on the CPU."""
    pytest.importorskip("torch", reason="torch is absent")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, str(PACKAGE / "examples" / "llama70b_step.py"), "--device", "cpu", "--tiny", "--steps", "1", *arguments]
    environments = [dict(os.environ, RANK=str(i), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1") for i in range(ranks)]
    processes = [subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for environment in environments]
    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert not any(codes), "\n".join(f"rank {rank}, status {code}: {text[-3000:]}" for rank, (code, text) in enumerate(zip(codes, said)))


def test_ranks_step_to_the_same_bits(tmp_path):
    try:
        import torch  # noqa: F401
    except ImportError as error:
        require("torch", str(error))
    common = ["--batch", "2", "--context", "3000", "--formats", "int8,int4", "--sums", "ordered"]
    found = []
    for i, (ranks, more) in enumerate([(1, []), (8, []), (4, ["--context-parallel"])]):
        path = tmp_path / f"{i}.json"
        _steps(ranks, *common, *more, "--json", str(path))
        rows = json.loads(path.read_text())
        assert [row["by"] for row in rows] == ["tokens" if more else "heads"] * 2
        found.append([(row["tokens"], row["digest"]) for row in rows])
    assert found == found[:1] * len(found) and len(found[0][0][0]) == 2 and found[0][0][1] != found[0][1][1]
