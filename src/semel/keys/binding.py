"""Which argument goes to which parameter, and the name a function goes by."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from semel.errors import SettingsError


class Binder:
    """Says which argument goes to which parameter, the way the function itself would.

    `names` are the parameters; `self_name` is the one that stands for the object of a method. A
    partial counts with what it holds, a bound method with its object.

    Binding by `inspect.Signature.bind` takes longer than claiming a key in memory. So a stub with
    the function's own parameters is compiled once, and Python binds: at its speed, and with the
    very TypeError of the function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn, self._held, self._named = _opened(fn)
        try:
            parameters = list(inspect.signature(self._fn).parameters.values())
        except (ValueError, TypeError) as error:
            raise SettingsError(
                f"the parameters of {type(fn)} cannot be read; wrap it in a function"
            ) from error
        self.names = tuple(parameter.name for parameter in parameters)
        self.self_name = _self_name(self._fn, self.names)
        self._parameters = parameters
        self._stub = self.compiled(_dict_of({name: name for name in self.names}), {})
        kinds = inspect.Parameter
        in_order = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self._positional = [p.name for p in parameters if p.kind in in_order]
        self._by_name = [p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY]
        self._star = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None)
        self._stars = next((p.name for p in parameters if p.kind is kinds.VAR_KEYWORD), None)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every parameter with its argument, defaults included."""
        if self._held or self._named:
            args, kwargs = (*self._held, *args), {**self._named, **kwargs}
        bound: dict[str, Any] = self._stub(*args, **kwargs)
        return bound

    def compiled(self, expression: str, space: dict[str, Any]) -> Callable[..., Any]:
        """A function with these parameters that answers an expression over them.

        `space` holds what else the expression names, by names that are `free`.
        """
        return _stub(self._fn, self._parameters, expression, space)

    def free(self, name: str) -> str:
        """A name that is longer than any parameter's, so none of them hides what it stands for."""
        return name + "_" * max(map(len, self.names), default=0)

    @property
    def holds(self) -> bool:
        """Does it bind more than the caller gives, as a partial or a bound method does?"""
        return bool(self._held or self._named)

    def spread(
        self, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call as if every default had been spelled out.

        What a partial holds was never the caller's to give, so its calls stay as they are.
        """
        if self._held or self._named:
            return args, kwargs
        spelled = tuple(bound[name] for name in self._positional)
        if self._star:
            spelled += bound[self._star]
        named = {name: bound[name] for name in self._by_name}
        if self._stars:
            named |= bound[self._stars]
        return spelled, named


def _opened(fn: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function inside a partial, a bound method or a callable object, and what those hold."""
    if isinstance(fn, functools.partial):
        inner, held, named = _opened(fn.func)
        return inner, (*held, *fn.args), {**named, **fn.keywords}
    if isinstance(fn, MethodType):
        return fn.__func__, (fn.__self__,), {}
    if isinstance(fn, (FunctionType, BuiltinFunctionType, type)):
        return fn, (), {}
    return _opened_object(fn)


def _opened_object(fn: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A decorator that is an object, such as `functools.cache`, stands for what it wraps."""
    if hasattr(fn, "__wrapped__"):
        return fn, (), {}
    call = type(fn).__call__
    if not isinstance(call, FunctionType):
        raise SettingsError(f"the parameters of {type(fn)} cannot be read; wrap it in a function")
    return call, (fn,), {}


def _self_name(fn: Any, names: tuple[str, ...]) -> str | None:
    """Inside a class body the class does not exist yet: the name and the place are all there is."""
    owner = getattr(fn, "__qualname__", "").rpartition(".")[0]
    in_class = bool(owner) and not owner.endswith("<locals>")
    return names[0] if in_class and names and names[0] in {"self", "cls"} else None


def _dict_of(pairs: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{name!r}: {source}' for name, source in pairs.items())}}}"


def _stub(
    fn: Any, parameters: list[inspect.Parameter], expression: str, space: dict[str, Any]
) -> Callable[..., Any]:
    """A function with these parameters that answers an expression.

    Of the caller, the source holds nothing but the parameters' names, which Python has checked to
    be names, and literals that were escaped. Defaults are handed over as they are.
    `inspect.signature` may have followed `__wrapped__`.
    """
    source = f"lambda {', '.join(_declared(parameters))}: {expression}"
    stub: FunctionType = eval(source, {"__builtins__": {}, **space})  # noqa: S307
    given = [p for p in parameters if p.default is not p.empty]
    stub.__defaults__ = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY)
    stub.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    stub.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
    return stub


_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def _declared(parameters: list[inspect.Parameter]) -> Iterable[str]:
    """The parameters as they stand in a `def`, with `/` and `*` where they belong."""
    by_kind = {
        kind: [_STARS.get(kind, "") + p.name for p in group]
        for kind, group in itertools.groupby(parameters, lambda p: p.kind)
    }
    for kind, declared in by_kind.items():
        if kind is inspect.Parameter.KEYWORD_ONLY and inspect.Parameter.VAR_POSITIONAL not in (
            by_kind
        ):
            yield "*"
        yield from declared
        if kind is inspect.Parameter.POSITIONAL_ONLY:
            yield "/"


def operation_of(fn: Any) -> str:
    """The name that a function goes by: `module.qualname`.

    A function inside another keeps one name from run to run. A lambda has none.
    """
    inner = _opened(fn)[0]
    name = getattr(inner, "__qualname__", None)
    if name is None or "<lambda>" in name:
        raise SettingsError(
            "a lambda has no name to know it by in the next process; give operation=, or use def"
        )
    return f"{_module_of(inner)}.{name}"


def short_name(fn: Any) -> str:
    """Return the function's `__qualname__` without its enclosing functions."""
    return str(_opened(fn)[0].__qualname__).rpartition("<locals>.")[2]


def _module_of(fn: Any) -> str:
    """The module's name as others import it: a script is `__main__` only to itself."""
    name: str = fn.__module__
    if name not in ("__main__", "__mp_main__"):
        return name
    main = sys.modules.get(name)
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    path = getattr(main, "__file__", None)
    return name if path is None else Path(path).stem
