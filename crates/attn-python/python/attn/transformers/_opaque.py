"""What stands for a tensor that a model is to pass on as it got it: any computation with it is refused."""

from __future__ import annotations

from typing import Any, Callable, List, NoReturn


class Opaque:
    """Refuses every operator, attribute and function of torch that a subclass does not define, by `refuse`."""

    def refuse(self, operation: str) -> NoReturn:
        """Raises a sentence about a model that computes with this."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        for x in _flat([*args, *(kwargs or {}).values()]):
            if isinstance(x, Opaque):
                x.refuse(getattr(func, "__name__", str(func)))
        raise TypeError(f"{func} got no {cls.__name__}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__dict__:
            # What Python's own protocols ask of any object, such as copies.
            raise AttributeError(name)
        self.refuse(name)


def _flat(values: List[Any]) -> List[Any]:
    """Values, and in the place of lists and tuples what they hold."""
    return [inner for x in values for inner in (x if isinstance(x, (list, tuple)) else (x,))]


def _refusal(operator: str) -> Callable[..., NoReturn]:
    return lambda self, *others: self.refuse(operator)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "matmul", "pow", "mod", "and", "or", "xor")
_OTHERS = ("lt", "le", "gt", "ge", "getitem", "setitem", "invert", "neg", "abs", "len", "iter", "bool", "float", "int")
# Python looks operators up in the class.
for _name in [*_BINARY, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY), *_OTHERS]:
    setattr(Opaque, f"__{_name}__", _refusal(_name))
