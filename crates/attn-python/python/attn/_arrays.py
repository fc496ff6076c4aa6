"""Arrays of any library, as the extension takes them: DLPack capsules, and the stream that their work is enqueued on.

numpy, torch and CuPy are known by name, because outputs are allocated by the library that the queries came from. Of other libraries, anything with
`__dlpack__` is taken as an input; their outputs must be given (`out=`), or come as numpy arrays, as those of JAX do, whose arrays cannot be written.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Sequence

from ._errors import AttnError, OutOfMemoryError, ShapeError

_CUDA = 2


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_jax(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ImportError("attn needs numpy for arrays on the CPU that are not torch tensors: pip install numpy") from error
    return numpy


def _has_rows(strides: Sequence[int], shape: Sequence[int], step: int) -> bool:
    """Whether the last dim is contiguous and no dim runs backwards: what the extension reads in place. `step`: the stride of a neighbour."""
    if 0 in shape or not shape:
        return True
    return (shape[-1] == 1 or strides[-1] == step) and all(s >= 0 and s % step == 0 for s in strides)


def _without_dlpack(x: Any) -> ShapeError:
    return ShapeError(f"a {type(x).__name__} of type {getattr(x, 'dtype', '?')} has no DLPack form; convert it to float32, float16 or bfloat16")


def _check_dense(what: str, x: Any) -> None:
    """Refuses torch's tensors whose memory does not have their numbers, one for each element."""
    import torch

    if x.layout is not torch.strided or x.is_nested:
        raise ShapeError(f"{what} is no dense tensor but of the layout {x.layout}; pass what .to_dense() gives")
    if x.is_quantized:
        raise ShapeError(f"{what} is a quantized tensor; pass what .dequantize() gives")


def _resolved(what: str, x: Any, writable: bool) -> Any:
    """A tensor whose memory has its numbers: torch keeps the negation and the conjugation of some views for later."""
    _check_dense(what, x)
    if not (x.is_neg() or x.is_conj()):
        return x
    if writable:
        raise ShapeError(f"{what} is a view that negates or conjugates what lies in its memory, and cannot be written; pass another tensor")
    return x.resolve_conj().resolve_neg()


def torch_capsule(what: str, x: Any) -> Any:
    """A DLPack capsule of torch's tensor: the one place where tensors leave torch, which hands out memory alone."""
    import torch

    x = x.detach()
    if x.is_neg() or x.is_conj():
        raise ShapeError(f"{what} is a view that negates or conjugates what lies in its memory; pass what .resolve_neg() gives")
    try:
        return torch.utils.dlpack.to_dlpack(x)
    except Exception as error:
        raise _without_dlpack(x) from error


class Rows:
    """An array on its way into the extension.

    On the host, only the last dim is contiguous; on a GPU, heads and dims lie together.
    """

    __slots__ = ("array", "shape", "on_cuda", "_torch", "_writable")

    def __init__(self, what: str, x: Any, *, writable: bool = False) -> None:
        try:
            self._take(what, x, writable)
        except (AttnError, ImportError):
            raise
        except MemoryError as error:
            raise OutOfMemoryError(f"there is no memory for a copy of {what}: {error}") from error
        except Exception as error:
            # Libraries raise what they like for arrays that they cannot hand out.
            raise ShapeError(f"{what} is a {type(x).__name__} that cannot be read: {error}") from error

    def _take(self, what: str, x: Any, writable: bool) -> None:
        self._torch = _is_torch(x)
        self._writable = writable
        if self._torch:
            x = _resolved(what, x.detach(), writable)
            self.on_cuda = x.is_cuda
            if x.device.type not in ("cpu", "cuda"):
                raise ShapeError(f"{what} lies on torch's device {x.device}; allowed: cpu, cuda")
        elif writable and _is_jax(x):
            raise ShapeError(f"{what} is an array of JAX, which cannot be written; pass one of numpy or torch, or none")
        elif hasattr(x, "__dlpack_device__"):
            self.on_cuda = int(x.__dlpack_device__()[0]) == _CUDA
            if self.on_cuda and _is_jax(x):
                # JAX frees an array's memory without regard to work that it has not enqueued itself.
                raise ShapeError(f"{what} is an array of JAX on a GPU; allowed: those on the CPU: pass jax.device_put({what}, jax.devices(\"cpu\")[0])")
        else:
            if writable:
                raise ShapeError(f"{what} is a {type(x).__name__}; needed: an array that can be written in place")
            numpy = _numpy()
            try:
                # What numpy makes of text, None and flags are no numbers that anybody meant.
                if numpy.asarray(x).dtype.kind not in "iuf":
                    raise TypeError("no numbers")
                x = numpy.asarray(x, dtype="float32")
            except Exception as error:
                raise ShapeError(f"{what} is a {type(x).__name__}; needed: an array, or lists of numbers") from error
            self.on_cuda = False
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(x, numpy.ndarray):
            if isinstance(x, numpy.ma.MaskedArray):
                raise ShapeError(f"{what} is a masked array, whose memory has numbers behind the mask, too; pass what .filled() gives")
            if writable:
                if not x.flags.writeable:
                    raise ShapeError(f"{what} cannot be written; pass a writable array")
            elif x.dtype == numpy.float64:
                raise ShapeError(f"{what} has elements of type float64; allowed: float32, float16; convert with .astype(numpy.float32)")
            elif not (_has_rows(x.strides, x.shape, x.itemsize) and x.flags.writeable and x.dtype.isnative):
                # DLPack hands out neither arrays that are read-only nor other byte orders.
                x = numpy.array(x, dtype=x.dtype.newbyteorder("="), order="C", copy=True)
        elif self._torch and not writable and not self.on_cuda and not _has_rows(x.stride(), x.shape, 1):
            x = x.contiguous()
        self.array = x
        self.shape = tuple(x.shape)

    def flat(self, what: str, rank: int) -> "Rows":
        """The array with its leading dims joined, so that `rank` are left: of arrays on a GPU, since the extension takes all dims of those on the
        host. An array to be written is not copied."""
        if len(self.shape) == rank or not self.on_cuda:
            return self
        lead = 1
        for n in self.shape[: len(self.shape) - rank + 1]:
            lead *= n
        made = Rows.__new__(Rows)
        shape = (lead, *self.shape[len(self.shape) - rank + 1 :])
        flags = getattr(self.array, "flags", None)
        is_contiguous = self.array.is_contiguous() if self._torch else flags is None or flags.c_contiguous
        if self._writable and not is_contiguous:
            raise ShapeError(f"{what} is not contiguous; outputs on a GPU are")
        made.array, made.shape, made._writable = self.array.reshape(shape), shape, self._writable
        made.on_cuda, made._torch = self.on_cuda, self._torch
        return made

    def with_rows_together(self) -> "Rows":
        """The array with heads and dims that lie together."""
        if not self._torch or not self.on_cuda or self.array.ndim < 2:
            return self
        shape, strides = self.array.shape, self.array.stride()
        expected = 1
        for n, stride in zip(reversed(shape[1:]), reversed(strides[1:])):
            if n != 1 and stride != expected:
                self.array = self.array.contiguous()
                break
            expected *= n
        if self.array.data_ptr() % 16 and self.array.numel():
            self.array = self.array.clone()
        return self

    def contiguous(self) -> "Rows":
        """The array in C order, where it is on a GPU."""
        if self._torch and self.on_cuda:
            self.array = self.array.contiguous()
        return self

    def capsule(self, stream: Optional[int]) -> Any:
        """A DLPack capsule; another library's array is made ready on `stream`."""
        if self._torch:
            return torch_capsule("an array", self.array)
        try:
            return self.array.__dlpack__(stream=stream or 1) if self.on_cuda else self.array.__dlpack__()
        except Exception as error:
            raise _without_dlpack(self.array) from error

    def stream(self) -> Optional[int]:
        """The stream that work on the array is enqueued on; None for host memory."""
        if not self.on_cuda:
            return None
        if self._torch:
            import torch

            return torch.cuda.current_stream(self.array.device).cuda_stream
        cupy = sys.modules.get("cupy")
        if cupy is not None and isinstance(self.array, cupy.ndarray):
            return cupy.cuda.get_current_stream().ptr
        return 0

    def empty(self, shape: Sequence[int], *, single: bool = False) -> Any:
        """A new array beside this one, of its type or float32."""
        try:
            return self._made(shape, single)
        except (MemoryError, RuntimeError, ValueError) as error:
            if isinstance(error, AttnError):
                raise
            raise OutOfMemoryError(f"there is no memory for results of the shape {list(shape)}: {error}") from error

    def _made(self, shape: Sequence[int], single: bool) -> Any:
        if self._torch:
            import torch

            dtype = torch.float32 if single else self.array.dtype
            return torch.empty(shape, dtype=dtype, device=self.array.device)
        numpy = _numpy()
        if self.on_cuda:
            cupy = sys.modules.get("cupy")
            if cupy is not None and isinstance(self.array, cupy.ndarray):
                return cupy.empty(shape, dtype=cupy.float32 if single else self.array.dtype)
            raise ShapeError(f"outputs beside a {type(self.array).__name__} must be given: pass out= (and lse=)")
        dtype = numpy.float32
        if not single and isinstance(self.array, numpy.ndarray):
            dtype = self.array.dtype
        return numpy.empty(shape, dtype=dtype)


class Results:
    """What an attention of the queries `rows` over values of `v_dim` writes: `out`, made here where it is not given; and log-sum-exps, if they are asked for."""

    __slots__ = ("out", "lse", "_out", "_lse")

    def __init__(self, rows: Rows, v_dim: int, out: Any, with_lse: bool) -> None:
        shape = (*rows.shape[:-1], v_dim)
        self._out = rows.empty(shape) if out is None else out
        self._lse = rows.empty(rows.shape[:-1], single=True) if with_lse else None
        self.out = Rows("out", self._out, writable=True)
        self.lse = None if self._lse is None else Rows("lse", self._lse, writable=True)
        if self.out.shape != shape:
            raise ShapeError(f"out has the shape {list(self.out.shape)}; needed: {list(shape)}")

    def arrays(self) -> Any:
        """The caller's arrays."""
        return self._out if self._lse is None else (self._out, self._lse)
