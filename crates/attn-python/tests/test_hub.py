"""The repository for Hugging Face's Hub that `.ci/hub` makes, loaded by `kernels` and by transformers; `.ci/hub --check` gives its folder in ATTN_HUB."""

import base64
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import expected, require, rows

REPOSITORY = os.environ.get("ATTN_HUB")


@pytest.fixture
def repository():
    if REPOSITORY is None:
        require("kernels", "ATTN_HUB names no repository; run .ci/hub --check")
    return pathlib.Path(REPOSITORY)


@pytest.fixture
def with_torch(repository):
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            require(name, f"no module {name}")


def variants(repository):
    return sorted(path for path in (repository / "build").iterdir())


def run(program, **environment):
    """What a new process prints."""
    done = subprocess.run([sys.executable, "-c", program], env=dict(os.environ, **environment), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_variant_is_what_its_metadata_says(repository):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    names = set()
    for variant in variants(repository):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        assert (str(metadata.name), metadata.version) == ("attn-kv", 1) and not metadata.python_depends
        assert str(metadata.backend.backend_type).upper() == ("CPU" if "-cpu-" in variant.name else "CUDA")
        names.add(metadata.id)
        hashes = json.loads((variant / "metadata.json").read_text())["digest"]["files"]
        assert hashes["__init__.py"] == base64.b64encode(hashlib.sha256((variant / "__init__.py").read_bytes()).digest()).decode()
        # The extension, and the parts for torch and transformers.
        assert {"attn/_attn.abi3.so", "attn/torch/_plan.py", "attn/transformers/_cache.py"} <= set(hashes)
    assert len(names) == 2


@pytest.mark.parametrize(
    "torch, cuda, wanted",
    [("2.6", None, "cpu"), ("2.13", None, "cpu"), ("2.6", "12.4", "cu120"), ("2.14", "13.1", "cu130"), ("2.5", None, None), ("2.9", "11.8", None)],
)
def test_each_torch_and_cuda_has_a_variant_from_the_oldest_on(repository, torch, cuda, wanted):
    from kernels.backends import CPU, CUDA
    from kernels.variants import _resolve_variant_for_system, get_variants_local
    from packaging.version import Version

    first = variants(repository)[0].name
    cpu, system = re.fullmatch(r".*-([a-z0-9_]+)-([a-z]+)", first).groups()
    backend = CPU() if cuda is None else CUDA(version=Version(cuda))
    asked = dict(cpu=cpu, os=system, torch_version=Version(torch), torch_cxx11_abi=True, tvm_ffi_version=None)
    found, _ = _resolve_variant_for_system(get_variants_local(repository / "build"), backend, **asked)
    assert [x.variant_str.split("-")[3] for x in found[:1]] == ([wanted] if wanted else [])


def test_kernels_loads_it_and_it_attends(repository, rng):
    from kernels import get_local_kernel

    (variant,) = (path for path in variants(repository) if "-cpu-" in path.name)
    attn = get_local_kernel(variant)
    assert attn.__name__.startswith("_attn_kv_cpu_") and attn.__version__ and "attn" not in sys.modules
    cache = attn.Cache("bf16", heads=2, dim=64, max_tokens=128, device="cpu")
    cache.append(rows(rng, 90, 2, 64), rows(rng, 90, 2, 64))
    q = rows(rng, 3, 8, 64)
    out, lse = cache.attend(q, return_lse=True)
    out_64, lse_64 = expected(q, *cache.export())
    assert np.abs(out - out_64).max() < 1e-5 and np.abs(lse - lse_64).max() < 1e-5
    with pytest.raises(attn.CacheFullError):
        cache.append(rows(rng, 90, 2, 64), rows(rng, 90, 2, 64))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        attn.nothing


def test_the_card_has_the_readmes_table_and_a_chart_that_is_there(repository):
    card, readme = (repository / "README.md").read_text(), (pathlib.Path(__file__).parents[3] / "README.md").read_text()
    head, text = card.split("---\n")[1:3]
    assert "library_name: kernels" in head and "license: apache-2.0" in head
    lines = [line for line in readme.split("<!-- table: what runs where -->\n")[1].split("<!-- end of table -->")[0].splitlines()]
    assert len(lines) > 8 and all(f"\n{line}\n" in text for line in lines)
    charts = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert charts and all((repository / chart).is_file() for chart in charts)
    # Every other link leads to a place of its own.
    assert all(link.startswith("https://") or link in charts for link in re.findall(r"\]\((.*?)\)", text))
    assert "QuantizedCache" in text and "<!--" not in text


GENERATE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
prompt = {"input_ids": torch.randint(1, 64, (2, 70)), "attention_mask": torch.ones(2, 70, dtype=torch.long)}
# A row that is padded on the left.
prompt["input_ids"][1, :9], prompt["attention_mask"][1, :9] = 0, 0

def tokens(implementation, cache=None):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        options = {} if cache is None else {"past_key_values": cache(model.config)}
        return model.generate(**prompt, **options, max_new_tokens=12, do_sample=False).tolist()
"""


def test_transformers_takes_it_by_repository(repository, with_torch):
    """`attn_implementation="OWNER/NAME"`, which fetches a repository; `kernels` takes the one of this folder for it."""
    program = GENERATE + """
from kernels import get_kernel
attn = get_kernel("someone/attn-kv", version=1)
quantized = lambda config: attn.transformers.QuantizedCache(config, "f16")
wanted = tokens("sdpa")
assert tokens("someone/attn-kv") == wanted, "without a quantized cache it is sdpa"
assert tokens("someone/attn-kv", quantized) == wanted
assert tokens("attn", quantized) == wanted
first = tokens("someone/attn-kv", lambda config: attn.transformers.QuantizedCache(config, "int8"))
assert first == tokens("attn", lambda config: attn.transformers.QuantizedCache(config, "int8"))
import sys
assert "attn" not in sys.modules
print("held")
"""
    assert run(program, LOCAL_KERNELS=f"someone/attn-kv={repository}").endswith("held\n")


def test_a_repositorys_attention_without_its_masks_is_refused(repository, with_torch):
    """A cache that was made for another configuration gives no masks of its own to a model, and is refused by it."""
    program = GENERATE + """
from kernels import get_kernel
attn = get_kernel("someone/attn-kv", version=1)
other = LlamaConfig(**dict(config.to_dict()))
try:
    tokens("someone/attn-kv", lambda _: attn.transformers.QuantizedCache(other))
except attn.UnsupportedError as error:
    print("refused:", error)
"""
    assert "refused: this pass has a mask of its own" in run(program, LOCAL_KERNELS=f"someone/attn-kv={repository}")
