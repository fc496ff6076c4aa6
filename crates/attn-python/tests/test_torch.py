"""torch tensors on the CPU, and what needs no GPU of `attn.torch`."""

import attn
import numpy
import pytest
from conftest import require, rows

try:
    import torch

    REASON = None
except ImportError as error:
    torch, REASON = None, str(error)


@pytest.fixture(autouse=True)
def has_torch():
    if REASON is not None:
        require("torch", REASON)


def test_tensors_are_arrays(rng):
    k, v, q = rows(rng, 50, 2, 64), rows(rng, 50, 2, 64), rows(rng, 3, 8, 64)
    of_numpy, of_torch = (attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu") for _ in range(2))
    of_numpy.append(k, v)
    # As models have them: heads before tokens, and in the middle of a fused projection.
    fused = torch.from_numpy(numpy.concatenate([k, v], 1)).transpose(0, 1).contiguous().transpose(0, 1)
    of_torch.append(fused[:, :2], fused[:, 2:])
    assert of_numpy.save() == of_torch.save()
    out, lse = of_torch.attend(torch.from_numpy(q), return_lse=True)
    wanted, wanted_lse = of_numpy.attend(q, return_lse=True)
    assert isinstance(out, torch.Tensor) and (out.numpy() == wanted).all() and (lse.numpy() == wanted_lse).all()
    narrow = of_torch.attend(torch.from_numpy(q).bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, of_torch.attend(torch.from_numpy(q).bfloat16().float()).bfloat16())


def test_weights_with_gradients_are_read(rng):
    cache = attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu")
    k = torch.from_numpy(rows(rng, 5, 2, 64)).requires_grad_()
    cache.append(k, k)
    assert not cache.attend(k).requires_grad
    with pytest.raises(attn.ShapeError, match="meta"):
        cache.append(k.to("meta"), k.to("meta"))


def test_negations_that_torch_keeps_for_later_are_read_and_never_written(rng):
    x, q = torch.from_numpy(rows(rng, 20, 2, 64)), torch.from_numpy(rows(rng, 2, 4, 64))
    lazy, plain = (attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu") for _ in range(2))
    # The imaginary part of a conjugate: torch's public way to such a view.
    conjugate = torch.complex(q, q).conj().imag
    for negated, of in ((torch._neg_view(x), x), (torch._neg_view(q), q), (conjugate, q)):
        assert negated.is_neg() and torch.equal(negated, -of)
    lazy.append(torch._neg_view(x), torch._neg_view(x))
    plain.append(-x, -x)
    assert lazy.save() == plain.save()
    wanted = plain.attend(-q)
    for negated in (torch._neg_view(q), conjugate):
        assert torch.equal(lazy.attend(negated), wanted)
    out = torch.full_like(q, 9.0)
    with pytest.raises(attn.ShapeError, match="negates"):
        lazy.attend(q, out=torch._neg_view(out))
    assert (out == 9.0).all()
    # What goes to a GPU leaves torch by the same function.
    from attn._arrays import torch_capsule

    with pytest.raises(attn.ShapeError, match="resolve_neg"):
        torch_capsule("k", torch._neg_view(x))


@pytest.mark.parametrize(
    "made, said",
    [
        (lambda x: x.to_sparse(), "to_dense"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "dequantize"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "to_dense"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_a_number_for_each_element_are_refused(rng, made, said):
    cache = attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu")
    x = torch.from_numpy(rows(rng, 5, 2, 64))
    for call in (lambda: cache.append(made(x), made(x)), lambda: cache.attend(made(x)), lambda: cache.attend(x, out=made(x))):
        with pytest.raises(attn.ShapeError, match=said):
            call()
    assert cache.lens == [0]


def test_shards_are_merged(rng):
    import attn.torch

    k, v, q = (torch.from_numpy(rows(rng, n, heads, 64)) for n, heads in ((100, 2), (100, 2), (3, 8)))
    whole = attn.Cache("f16", heads=2, dim=64, max_tokens=128, device="cpu")
    whole.append(k, v)
    wanted, wanted_lse = whole.attend(q, return_lse=True)
    outs, lses = [], []
    # The last shard has the queries' own tokens; those before are seen whole, and one is empty.
    for start, end in ((0, 64), (64, 64), (64, 100)):
        shard = attn.Cache("f16", heads=2, dim=64, max_tokens=128, device="cpu")
        shard.append(k[start:end], v[start:end])
        out, lse = shard.attend(q, return_lse=True, causal=end == 100)
        outs.append(out)
        lses.append(lse)
    out, lse = attn.torch.merge(torch.stack(outs), torch.stack(lses))
    assert (out - wanted).abs().max() < 1e-5 and (lse - wanted_lse).abs().max() < 1e-5
    nothing, lse = attn.torch.merge(torch.zeros(2, 1, 1, 64), torch.full((2, 1, 1), float("-inf")))
    assert (nothing == 0).all() and (lse == float("-inf")).all()
    with pytest.raises(attn.ShapeError):
        attn.torch.merge(torch.zeros(2, 1, 1, 64), torch.zeros(2, 1))


@pytest.mark.parametrize("name", ["attend", "attend_rows", "step", "step_rotary"])
def test_operators_have_results_without_a_launch(name):
    """What `torch.compile` sees of an operator: shapes and types, and no plan."""
    import attn.torch  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensorMode

    operator = getattr(torch.ops.attn, name)
    with FakeTensorMode():
        q = torch.empty(3, 8, 64, dtype=torch.bfloat16)
        given = {"q": q, "plan": 1, "interleaved": False, "v_dim": 96}
        names = [argument.name for argument in operator.default._schema.arguments]
        results = operator(*(given.get(name, torch.empty(3)) for name in names))
        out, *lse = results if name.startswith("attend") else [results]
        assert (out.shape, out.dtype) == ((3, 8, 96), q.dtype)
        assert [(x.shape, x.dtype) for x in lse] == [((3, 8), torch.float32)] * name.startswith("attend")
    with pytest.raises(attn.ParameterError, match="no plan"):
        operator(*({"plan": 0, "interleaved": False, "v_dim": 64}.get(name, torch.zeros(3, 8, 64)) for name in names))


@pytest.mark.parametrize("name", ["float64", "int64", "bool", "complex64", "float8_e4m3fn"])
def test_a_type_that_is_refused_has_its_name_in_torch(name):
    cache = attn.Cache(heads=1, dim=64, max_tokens=64, device="cpu")
    x = torch.zeros(1, 1, 64).to(getattr(torch, name))
    with pytest.raises(attn.ShapeError, match=f"k has elements of type {name}; allowed: float32, float16, bfloat16"):
        cache.append(x, x)
    assert cache.stats().free_pages == cache.stats().pages
