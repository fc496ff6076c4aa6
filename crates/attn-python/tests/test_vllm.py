"""The vLLM plugin against stubs of vLLM's interface: its contract on the CPU, its steps on a GPU."""

import ast
import copy
import gc
import inspect
import os
import pathlib
import pickle
import subprocess
import sys
from types import SimpleNamespace

import attn
import pytest
from conftest import require

try:
    import torch

    REASON = None
except ImportError as error:
    torch, REASON = None, str(error)
else:
    import vllm_stubs as stubs

    stubs.install()
    import attn.vllm as plugin
    from attn import _largest_plans, _outlier_keys
    from attn.torch._plan import _PLANS


@pytest.fixture(autouse=True)
def has_torch():
    if REASON is not None:
        require("torch", REASON)


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        require("cuda", "torch sees no CUDA device")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("tokens", [1, 4, 8193])
def test_places_of_tokens_begin_where_kernels_read_them(tokens):
    """vLLM serves any number of sequences: a list that began behind an odd number of others stopped its start."""
    from attn._token_places import TokenPlaces

    places = TokenPlaces(tokens, torch.device("cpu"))
    for count in (tokens, tokens + 1):
        starts, lens, first_pages = (torch.tensor(x, dtype=torch.int32) for x in ([0, count], [count + 7], [5]))
        firsts, positions = places.of(starts, lens, first_pages, count)
        assert firsts.data_ptr() % 16 == positions.data_ptr() % 16 == 0
        assert (firsts == 5).all() and positions.tolist() == list(range(7, count + 7))


def test_registering_twice_is_registering_once():
    for _ in range(2):
        plugin.register()
    assert stubs.AttentionBackendEnum["ATTN"].value == "attn.vllm.AttnBackend"
    assert set(stubs.HANDLERS) == {"attn_int8", "attn_int8_int4", "attn_int4", "attn_bf16"}
    assert len({handler.torch_dtype() for handler in stubs.HANDLERS.values()}) == 4
    assert all(handler.torch_dtype().itemsize == 1 for handler in stubs.HANDLERS.values())
    assert all(handler.quant_mode() == stubs.KVQuantMode.CUSTOM for handler in stubs.HANDLERS.values())


def in_a_process_of_its_own(program, given=b""):
    """What a new process prints that has vLLM's stubs, and has not loaded the plugin."""
    setup = "import sys, pickle, vllm_stubs as stubs; stubs.install()\n"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", setup + program], input=given, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def test_the_backends_name_reaches_a_process_that_has_not_loaded_the_plugin():
    plugin.register()
    names = [stubs.AttentionBackendEnum["ATTN"], stubs.AttentionBackendEnum["TRITON_ATTN"]]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(names, protocol)) == names == copy.deepcopy(names)
    program = """
assert "attn" not in sys.modules
own, other = pickle.load(sys.stdin.buffer)
assert own is stubs.AttentionBackendEnum["ATTN"] and own.value == "attn.vllm.AttnBackend"
assert other is stubs.AttentionBackendEnum["TRITON_ATTN"]
print(sorted(stubs.HANDLERS))
"""
    said, _ = in_a_process_of_its_own(program, pickle.dumps(names))
    assert said == "['attn_bf16', 'attn_int4', 'attn_int8', 'attn_int8_int4']\n"


# The first three are as 0.32 is.
LACKS = [
    ("vllm.config.cache", "register_kv_cache_dtype"),
    ("vllm.config.cache", "get_kv_cache_dtype_handler"),
    ("vllm.v1.kv_cache_interface", "KVQuantMode.CUSTOM"),
    ("vllm.v1.kv_cache_interface", "KVQuantMode"),
    ("vllm.v1.attention.backends.registry", "register_backend"),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum"),
    ("vllm.platforms", "current_platform"),
]


def test_another_vllm_is_left_as_it_is_and_told_so_once():
    program = f"""
import copyreg
from attn.vllm import register
for module, name in {LACKS}:
    module, whole = sys.modules[module], name.partition(".")[0]
    own = getattr(module, whole)
    if whole == name:
        delattr(module, name)
    else:
        setattr(module, whole, type(whole, (), dict(NONE=0)))
    register()
    setattr(module, whole, own)
    is_served = stubs.CpuPlatform.get_attn_backend_cls(stubs.AttentionBackendEnum.TRITON_ATTN, None) != "vllm's own"
    print(stubs.HANDLERS, [x.name for x in stubs.AttentionBackendEnum], stubs.AttentionBackendEnum in copyreg.dispatch_table or is_served)
register()
print(len(stubs.HANDLERS), stubs.AttentionBackendEnum in copyreg.dispatch_table)
"""
    said, warned = in_a_process_of_its_own(program)
    assert said.splitlines() == ["{} ['TRITON_ATTN'] False"] * len(LACKS) + ["4 True"]
    warnings = [line for line in warned.splitlines() if "ATTN" in line]
    assert len(warnings) == len(LACKS)
    for warning, (_, name) in zip(warnings, LACKS):
        assert "needs the interface of vLLM 0.33" in warning and "vLLM works without it" in warning
        assert name.rpartition(".")[2] in warning


def test_a_cell_has_the_bytes_of_a_token_for_every_block_size():
    for name, dtype in plugin.ELEMENTS.items():
        for dim in plugin.HEAD_SIZES:
            # vLLM asks for windowed layers with a block of one token.
            spec = stubs.AttentionSpec(1, 2, dim, dtype, stubs.KVQuantMode.CUSTOM)
            cell = plugin.AttnBackend.customize_spec(spec).state_content_bytes
            wanted = {"attn_int8": 2 * dim + 4, "attn_int8_int4": dim + dim // 2 + 4, "attn_int4": dim + 8, "attn_bf16": 4 * dim}
            centres = dim // 16 if name in ("attn_int8", "attn_int8_int4") else 0
            assert cell == wanted[name] + centres
            for block in plugin.BLOCK_SIZES:
                cache = attn.Cache(plugin.FORMATS[name], heads=2, dim=dim, max_tokens=0, pages=0, page_size=block, device="cpu")
                assert cache.stats().page_bytes == 2 * block * wanted[name]
                for kind in (stubs.AttentionSpec, stubs.FullAttentionSpec):
                    blocks = plugin.Blocks.of(plugin.FORMATS[name], kind(block, 2, dim, dtype))
                    has_centres = centres > 0 and block >= 64 and kind is stubs.FullAttentionSpec
                    assert (blocks.has_centres, blocks.used) == (has_centres, 2 * (block * wanted[name] + 4 * dim * has_centres)) and blocks.used <= 2 * block * cell
    for dtype in (torch.bfloat16, torch.float16):
        plain = stubs.AttentionSpec(16, 2, 64, dtype)
        assert plugin.AttnBackend.customize_spec(plain) is plain
    # Before memory is taken.
    with pytest.raises(attn.UnsupportedError, match="torch.float32.*--dtype bfloat16"):
        plugin.AttnBackend.customize_spec(stubs.AttentionSpec(16, 2, 64, torch.float32))


def test_the_cpu_platform_answers_with_it_where_it_is_asked_for():
    plugin.register()
    answer = stubs.CpuPlatform.get_attn_backend_cls
    own, other = stubs.AttentionBackendEnum["ATTN"], stubs.AttentionBackendEnum["TRITON_ATTN"]
    good = stubs.AttentionSelectorConfig(64, torch.bfloat16, "attn_int8")
    assert answer(own, good) == answer(selected_backend=own, attn_selector_config=good, num_heads=8) == "attn.vllm.AttnBackend"
    assert answer(other, good) == answer(None, good) == "vllm's own"
    for change, reason in ((dict(head_size=72), "head_size"), (dict(kv_cache_dtype="fp8"), "kv_cache_dtype"), (dict(use_mla=True), "MLA")):
        with pytest.raises(ValueError, match=reason):
            answer(own, good._replace(**change))


def test_the_cpu_platform_is_warned_of_spinning_threads(monkeypatch, caplog):
    plugin.register()
    own, good = stubs.AttentionBackendEnum["ATTN"], stubs.AttentionSelectorConfig(64, torch.bfloat16, "attn_int8")
    for name in plugin.IDLE_THREADS:
        monkeypatch.delenv(name, raising=False)
    stubs.CpuPlatform.get_attn_backend_cls(own, good)
    assert "set GOMP_SPINCOUNT=1000" in caplog.text
    for name in plugin.IDLE_THREADS:
        caplog.clear()
        with monkeypatch.context() as environment:
            environment.setenv(name, "1")
            stubs.CpuPlatform.get_attn_backend_cls(own, good)
        assert not caplog.text


def test_what_it_cannot_do_is_said():
    usual = dict(num_heads=8, head_size=64, scale=0.125, num_kv_heads=2, kv_cache_dtype="attn_int8")
    plugin.AttnImpl(**usual)
    for wrong in (dict(kv_cache_dtype="fp8"), dict(attn_type="encoder")):
        with pytest.raises(attn.UnsupportedError) as error:
            plugin.AttnImpl(**{**usual, **wrong})
        assert len(str(error.value)) > 40
    # Layers that --kv-cache-dtype-skip-layers names keep the model's own type.
    plugin.AttnImpl(**{**usual, "kv_cache_dtype": "auto"})
    backend = plugin.AttnBackend
    assert all(backend.supports_kv_cache_dtype(name) for name in (*plugin.FORMATS, "auto", None)) and not backend.supports_kv_cache_dtype("fp8")
    gpu = SimpleNamespace(major=9, minor=0)
    for dim, name, where, reason in (
        (512, "attn_int8", gpu, None),
        (512, "auto", None, None),
        (256, "attn_bf16", gpu, None),
        (512, "attn_bf16", gpu, None),
        (320, None, gpu, None),
        (72, "attn_int8", gpu, "head_size not supported"),
    ):
        reasons = backend.validate_configuration(dim, torch.bfloat16, name, False, where)
        assert len(reasons) == (reason is not None) and all(said.startswith(reason) for said in reasons), (dim, name, reasons)


def names_of(module):
    """The names that a module of Python's defines or imports, and those inside its classes, `Class.name`."""
    found = set()

    def add(nodes, prefix):
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update(prefix + (alias.asname or alias.name) for alias in node.names)
            if isinstance(node, (ast.If, ast.Try)):
                add([*node.body, *node.orelse], prefix)

    add(ast.parse(module).body, "")
    return found


# What the plugin reads of classes, those that reach it as arguments included. `AttentionSpec` has fields of its base's.
MEMBERS = {
    "vllm.v1.attention.backend": ["AttentionCGSupport.UNIFORM_BATCH", "AttentionType.DECODER"],
    "vllm.v1.kv_cache_interface": [
        "KVQuantMode.CUSTOM",
        *(f"AttentionSpec.{field}" for field in ("num_kv_heads", "head_size", "dtype", "kv_quant_mode", "state_content_bytes")),
        "KVCacheSpec.block_size",
    ],
    "vllm.v1.kv_cache_layout": ["KVCacheLayout.LBHNC"],
}


def missing_names(source):
    """The names that the plugin takes from vLLM and the package in this folder does not have."""
    needed = {module: list(members) for module, members in MEMBERS.items()}
    for node in ast.walk(ast.parse(inspect.getsource(plugin))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            needed.setdefault(node.module, []).extend(alias.name for alias in node.names)
    assert {"vllm.config.cache", "vllm.v1.attention.backends.registry"} <= set(needed)
    missing = []
    for module, names in needed.items():
        path = pathlib.Path(source, *module.split("."))
        files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
        found = names_of(files[0].read_text()) if files else set()
        missing += [f"{module}.{name}" for name in names if name not in found]
    return missing


def test_the_check_of_names_sees_what_is_missing(tmp_path):
    """The stubs, written out as a package of vLLM's shape, have all names; without one of them, that one is missing."""
    text = pathlib.Path(stubs.__file__).read_text() + "\nclass KVCacheSpec:\n    block_size: int\n"
    modules = {*MEMBERS, "vllm.config", "vllm.config.cache", "vllm.platforms", "vllm.v1.attention.backends.registry"}
    for module in modules:
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert missing_names(tmp_path) == []
    for module, name in [*LACKS, ("vllm.v1.attention.backend", "AttentionImpl"), ("vllm.v1.kv_cache_interface", "AttentionSpec.state_content_bytes")]:
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        whole, _, member = name.partition(".")
        changed = text.replace(f"    {member}", "    other_") if member else text.replace(f"class {whole}", "class Other").replace(f"def {whole}", "def other").replace(f"\n{whole} =", "\nother =")
        assert changed != text
        file.write_text(changed)
        assert f"{module}.{name}" in missing_names(tmp_path)
        file.write_text(text)


def test_names_and_arguments_are_vllms():
    source = os.environ.get("ATTN_VLLM_SOURCE")
    if not source:
        require("vllm-source", "ATTN_VLLM_SOURCE names no folder with vLLM's package")
    assert missing_names(source) == []
    tree = ast.parse((pathlib.Path(source) / "vllm/v1/attention/backend.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def members(name):
        node, found = classes[name], {}
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name) and base.id in classes:
                found.update(members(base.id))
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                found[item.name] = [argument.arg for argument in item.args.args]
            elif isinstance(item, (ast.Assign, ast.AnnAssign)):
                target = item.targets[0] if isinstance(item, ast.Assign) else item.target
                found[target.id] = None
        return found

    # Read by older hosts; sinks come as a keyword where a model has some.
    allowed = {"accept_output_buffer"}
    for own, name in ((plugin.AttnBackend, "AttentionBackend"), (plugin.AttnMetadataBuilder, "AttentionMetadataBuilder"), (plugin.AttnImpl, "AttentionImpl")):
        theirs = members(name)
        for member, value in vars(own).items():
            if member in ("plan", "_build", "_pool", "_host_pages", "_load", "blocks") or member in allowed or member.startswith("__") and member != "__init__":
                continue
            assert member in theirs, f"{name} has no {member}"
            function = getattr(value, "__func__", value)
            if callable(function) and theirs[member] is not None:
                arguments = list(inspect.signature(function).parameters)
                assert arguments[: len(theirs[member])] == theirs[member], member
                assert set(arguments[len(theirs[member]) :]) <= {"sinks"}, member
    fields = members("CommonAttentionMetadata")
    assert {field for field in stubs.CommonAttentionMetadata.__dataclass_fields__} <= set(fields)


class Host:
    """As much of vLLM's runner as a layer sees: blocks, slots, lengths, padding."""

    def __init__(self, device, dtype="attn_int8", block=16, blocks=64, requests=4, **layer):
        self.device, self.block = device, block
        self.impl = plugin.AttnImpl(num_heads=8, head_size=64, scale=0.125, num_kv_heads=2, kv_cache_dtype=dtype, **layer)
        self.impl.process_weights_after_loading(torch.bfloat16)
        # The model's own elements: vLLM then says nothing of the cell.
        element = plugin.ELEMENTS.get(dtype, torch.bfloat16)
        mode = stubs.KVQuantMode.CUSTOM if dtype in plugin.ELEMENTS else stubs.KVQuantMode.NONE
        spec = plugin.AttnBackend.customize_spec(stubs.FullAttentionSpec(block, 2, 64, element, mode))
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=256), scheduler_config=SimpleNamespace(max_num_batched_tokens=256, max_num_seqs=8))
        self.builder = plugin.AttnMetadataBuilder(spec, ["layer"], config, device)
        cell = spec.state_content_bytes or 2 * 64
        self.pool = torch.zeros(blocks, 2, block, cell, dtype=element, device=device)
        self.table = torch.randperm(blocks)[: requests * 16].view(requests, 16).int().to(device)
        self.lens = [0] * requests

    def batch(self, q_lens, padded_requests=0, padded_tokens=0):
        starts = torch.tensor([0, *q_lens, *([0] * padded_requests)]).cumsum(0).int()
        lens = [n + q for n, q in zip(self.lens, q_lens)]
        slots = []
        for i, q in enumerate(q_lens):
            for position in range(self.lens[i], lens[i]):
                slots.append(int(self.table[i, position // self.block]) * self.block + position % self.block)
        self.lens[: len(q_lens)] = lens
        count = len(q_lens) + padded_requests
        return stubs.CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens + [0] * padded_requests, dtype=torch.int32, device=self.device),
            num_reqs=count,
            num_actual_tokens=sum(q_lens) + padded_tokens,
            max_query_len=max(q_lens),
            max_seq_len=max(lens),
            block_table_tensor=self.table[:count],
            slot_mapping=torch.tensor(slots + [-1] * padded_tokens, device=self.device),
        )


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_odd_number_of_blocks_serves_every_layer(gpu, layer):
    """vLLM lays a group's layers behind one another in one tensor, wherever they then begin."""
    host = Host(gpu, blocks=65)
    pools = torch.zeros(3 * host.pool.numel() + 16, dtype=host.pool.dtype, device=gpu)[16:].view(3, *host.pool.shape)
    host.pool = pools[layer]
    assert host.pool.data_ptr() % 256 == 16
    cache = attn.Cache("int8", heads=2, dim=64, max_tokens=256, page_size=16, sequences=2, device="cuda", centres=False)
    for q_lens in ([100, 3], [1, 1]):
        metadata = host.builder.build(0, host.batch(q_lens))
        q, k, v = (rows(sum(q_lens), heads, gpu) for heads in (8, 2, 2))
        out = host.impl.forward(None, q, k, v, host.pool, metadata, torch.empty_like(q))
        cache.append(k, v, sequences=[0, 1], tokens=q_lens)
        assert torch.equal(out, cache.attend(q, sequences=[0, 1], q_lens=q_lens))
    assert not pools[[i for i in range(3) if i != layer]].any()


def rows(tokens, heads, device):
    return torch.randn(tokens, heads, 64, device=device, dtype=torch.bfloat16)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return request.getfixturevalue("gpu") if request.param == "cuda" else torch.device("cpu")


@pytest.mark.parametrize("dtype", ["attn_int8", "attn_int8_int4", "attn_int4", "attn_bf16", "auto"])
@pytest.mark.parametrize("layer", [{}, {"sliding_window": 20}, {"logits_soft_cap": 30.0}, {"sinks": True}, {"block": 64}, {"block": 128, "sliding_window": 20}])
def test_mixed_batches_are_what_a_cache_attends(device, dtype, layer):
    if layer.get("sinks"):
        layer = {"sinks": torch.linspace(-1, 2, 8, device=device)}
    host = Host(device, dtype, **layer)
    format = plugin.FORMATS.get(dtype, "bf16")
    # Only blocks that hold a first tile have room for centres.
    centred = {"centres": host.block >= 64} if dtype in ("attn_int8", "attn_int8_int4") else {}
    cache = attn.Cache(format, heads=2, dim=64, max_tokens=256, page_size=16, sequences=3, device=device.type, **centred)
    options = {"softcap": layer.get("logits_soft_cap"), "window_left": 19 if "sliding_window" in layer else None}
    if "sinks" in layer:
        options["sinks"] = layer["sinks"].tolist()
    for q_lens in ([100, 1, 30], [1, 40, 1], [1, 1, 30], [1, 1, 1], [1, 1, 1], [1, 1, 1], [5, 25, 5], [1, 60, 2]):
        metadata = host.builder.build(0, host.batch(q_lens))
        n = sum(q_lens)
        q, k, v = (rows(n + 3, heads, device) for heads in (8, 2, 2))
        out = torch.full_like(q, 7.0)
        host.impl.forward(None, q, k, v, host.pool, metadata, out)
        cache.append(k[:n], v[:n], sequences=[0, 1, 2], tokens=q_lens)
        wanted = cache.attend(q[:n], sequences=[0, 1, 2], q_lens=q_lens, **options)
        assert (out[n:] == 7.0).all()
        # Floats have no promised bits: kernels of other shapes sum in other orders.
        assert torch.equal(out[:n], wanted) or format == "bf16" and torch.allclose(out[:n].float(), wanted.float(), atol=0.02)


def test_what_keys_have_in_common_costs_nothing_in_blocks_with_centres(device):
    """As biases of a model's keys are: the scores of 8 bits lose what lies beside them, those behind centres do not."""
    errors = []
    for block in (32, 64):
        torch.manual_seed(0)
        host = Host(device, block=block)
        q, k, v = (rows(200, heads, device) for heads in (8, 2, 2))
        k += 40 * torch.linspace(-1, 1, 64, device=device, dtype=k.dtype)
        q *= 0.1
        out = host.impl.forward(None, q, k, v, host.pool, host.builder.build(0, host.batch([200])), torch.empty_like(q))
        keys, values = (x.float().repeat_interleave(4, 1).transpose(0, 1) for x in (k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(q.float().transpose(0, 1), keys, values, is_causal=True, scale=0.125)
        errors.append(float((out.float().transpose(0, 1) - wanted).abs().mean()))
    assert errors[1] < 0.4 * errors[0], errors


def test_keys_with_outlier_channels_are_named(device, caplog):
    layer = SimpleNamespace(layer_name="model.layers.7")

    def step(host, q_lens, bias):
        count = sum(q_lens)
        q, k, v = (rows(count, heads, device) for heads in (8, 2, 2))
        k[:, 1, :4] += bias
        caplog.clear()
        host.impl.forward(layer, q, k, v, host.pool, host.builder.build(0, host.batch(q_lens)), torch.zeros_like(q))
        if q.is_cuda:
            torch.cuda.synchronize()
        _outlier_keys.tell()
        return [record.getMessage() for record in caplog.records if "outlier channels" in record.getMessage()]

    (said,) = step(Host(device), [70], 60.0)
    assert said.startswith("model.layers.7: keys have outlier channels") and "attn_int8 stores" in said and "--kv-cache-dtype-skip-layers" in said
    assert step(Host(device, "attn_bf16"), [70], 60.0) == []
    host = Host(device)
    # Too few tokens of each to tell; then a prompt that is as it should be; the next look is at 512 tokens.
    assert step(host, [40, 40], 60.0) == [] and host.impl.key_look.next_at == 64
    assert step(host, [3, 64], 2.0) == [] and host.impl.key_look.next_at == 512
    assert step(host, [64, 1], 60.0) == []
    assert _outlier_keys.unevenness(torch.zeros(64, 2, 64)) == 1.0


def test_a_layer_attends_anothers_cache(device):
    host = Host(device)
    other = plugin.AttnImpl(num_heads=8, head_size=64, scale=0.125, num_kv_heads=2, kv_cache_dtype="attn_int8", kv_sharing_target_layer_name="layer")
    batch = host.builder.build(0, host.batch([70, 3]))
    (q, k, v) = (rows(73, heads, device) for heads in (8, 2, 2))
    out = host.impl.forward(None, q, k, v, host.pool, batch, torch.zeros_like(q))
    pool = host.pool.clone()
    assert torch.equal(other.forward(None, q, v, k, host.pool, batch, torch.zeros_like(q)), out) and out.abs().sum() > 0
    assert torch.equal(host.pool.view(torch.uint8), pool.view(torch.uint8))


@pytest.mark.parametrize("q_len", [1, 4])
def test_a_graph_with_padded_requests(gpu, q_len):
    host = Host(gpu)
    cache = attn.Cache("int8", heads=2, dim=64, max_tokens=256, page_size=16, sequences=4, device="cuda", centres=False)
    tokens = 4 * q_len
    q, k, v = (rows(tokens, heads, gpu) for heads in (8, 2, 2))
    out = torch.empty_like(q)
    # The host's buffers: graphs keep their addresses.
    capture = host.batch([q_len] * 4)
    host.lens = [0] * 4
    metadata = host.builder.build_for_cudagraph_capture(capture)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.impl.forward(None, q, k, v, host.pool, metadata, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        host.impl.forward(None, q, k, v, host.pool, metadata, out)
    host.pool.zero_()
    for real in (4, 2, 3, 1):
        batch = host.batch([q_len] * real, padded_requests=4 - real, padded_tokens=(4 - real) * q_len)
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        capture.seq_lens.copy_(batch.seq_lens)
        capture.slot_mapping.copy_(batch.slot_mapping)
        graph.replay()
        n = real * q_len
        sequences = list(range(real))
        cache.append(k[:n], v[:n], sequences=sequences, tokens=[q_len] * real)
        assert torch.equal(out[:n], cache.attend(q[:n], sequences=sequences, q_lens=[q_len] * real))
        assert (out[n:] == 0).all()


def test_a_pass_without_a_batch_gives_zeros():
    impl = plugin.AttnImpl(num_heads=8, head_size=64, scale=0.125, num_kv_heads=2, kv_cache_dtype="attn_int8")
    out = torch.ones(3, 8, 64)
    assert (impl.forward(None, out.clone(), None, None, torch.empty(0), None, out) == 0).all()


@pytest.mark.parametrize("dtype", ["attn_int8", "attn_int8_int4", "attn_int4", "attn_bf16"])
def test_the_measuring_pass_makes_the_plans_of_the_largest_steps(gpu, dtype, monkeypatch):
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        cache_config=SimpleNamespace(block_size=32),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
    )
    monkeypatch.setattr(stubs, "CURRENT", [config])
    impl = Host(gpu, dtype).impl
    # vLLM makes builders of batches when it has measured.
    impl.largest_plans = _largest_plans.of_new_layer()
    query = torch.zeros(5000, 8, 64, dtype=torch.bfloat16, device=gpu)
    before = set(_PLANS)
    for _ in range(2):
        impl.forward(None, query, None, None, torch.empty(0, device=gpu), None, torch.ones_like(query))
    torch.cuda.synchronize()
    ((key, plans),) = impl.largest_plans.made.items()
    assert key[0] == impl.key
    made = {(tuple(plan._options.q_lens), plan._options.max_kv_len, plan._options.page_size) for plan in plans}
    decoding, prompts = [(4,), (4,) * 16], [(4096,), (4096,) + (4,) * 15]
    assert made == {(q_lens, longest, 32) for q_lens in decoding for longest in (64, 4096)} | {(q_lens, 4096, 32) for q_lens in prompts}
    assert len(set(_PLANS) - before) == len(plans)
    # The first batch's builder leaves their memory to real steps, and no later pass without a batch takes it again.
    Host(gpu, dtype)
    impl.forward(None, query, None, None, torch.empty(0, device=gpu), None, torch.ones_like(query))
    assert not impl.largest_plans.made and set(_PLANS) <= before


class Closes:
    """A plan that says when it is closed."""

    def __init__(self):
        self.is_closed = False

    def close(self):
        self.is_closed = True


def test_plans_of_the_measuring_pass_are_closed_behind_it_and_made_no_more(monkeypatch):
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        cache_config=SimpleNamespace(block_size=64),
        speculative_config=None,
    )
    monkeypatch.setattr(stubs, "CURRENT", [config])
    made = []
    monkeypatch.setattr(plugin, "Plan", lambda *_, **options: made.append(options) or pytest.fail("a plan is made"))
    layer = lambda: plugin.AttnImpl(num_heads=8, head_size=64, scale=0.125, num_kv_heads=2, kv_cache_dtype="attn_int8")
    Host(torch.device("cpu"))
    first, second, plan = layer(), layer(), Closes()
    assert first.largest_plans is second.largest_plans and not first.largest_plans.is_over
    first.largest_plans.made[first.key] = [plan]
    host = Host(torch.device("cpu"))
    assert plan.is_closed and first.largest_plans.is_over and not first.largest_plans.made
    # A pass of a rank without requests, on a GPU.
    first._load(SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16))
    # The layers of another engine are measured again.
    assert not layer().largest_plans.is_over
    # A builder's plans go with it.
    kept = {"captured": Closes(), "plans": Closes()}
    for name, plan in kept.items():
        getattr(host.builder, name)["a batch"] = plan
    del host
    gc.collect()
    assert all(plan.is_closed for plan in kept.values()) and not made
