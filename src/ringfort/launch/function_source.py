"""How a function of a notebook gets to another process without pickle: by name if it can be imported, else by source.

`pack` describes a function as plain values, and `unpack` makes it again. A function of an importable module is named. A
function of a notebook or of the main script is sent as source, with everything that it uses from outside: modules and
what they define by name, other functions and classes as source, plain values and arrays as they are. What cannot be
sent is refused by its name, in the notebook, before anything runs.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import inspect
import linecache
import symtable
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, cast

from ringfort.collectives import objects
from ringfort.config import DistributedConfig
from ringfort.errors import DistributedError, InvalidArgumentError

Step = dict[str, Any]
"""How to make one name: `kind` is `import`, `from`, `value` or `source`."""
_PLAIN: Final = "numbers, strings, lists, dicts or arrays"
_ANNOTATIONS: Final = __future__.annotations.compiler_flag
_FUNCTION: Final = "ringfort_function"
"""The name of the last step."""
MAX_BYTES: Final = DistributedConfig().max_object_bytes
"""For a function with all that it uses, for its arguments, and for what it returns: as in the object collectives."""


def pack(fn: Callable[..., Any]) -> list[Step]:
    """Return how to make `fn` in another process: the steps, of which the last makes the function itself.

    Raises `InvalidArgumentError` if it cannot be sent; the message says what to change.
    """
    if not callable(fn):
        raise InvalidArgumentError(
            "fn", fn, "must be a function: pass it without parentheses, and its arguments after it"
        )
    if type(fn) is functools.partial:
        raise _refused(cast("Any", fn), "is a partial; pass the function itself, and its arguments after it")
    if inspect.ismethod(fn):
        raise _refused(fn, "is a method of an object, which cannot be sent; write a function that makes the object")
    if inspect.iscoroutinefunction(fn):
        raise _refused(fn, "is async; write a function that calls asyncio.run()")
    if not _home(fn) and not isinstance(_inner(fn), (types.FunctionType, type)):
        raise _refused(fn, f"is an object of type {type(fn).__name__}; pass a function that makes it and calls it")
    packer = _Packer(fn)
    packer.add(_FUNCTION, fn)
    return packer.steps


def unpack(steps: list[Step]) -> Callable[..., Any]:
    """Return the function that `pack` has described. Its module becomes the `__main__` of this process."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    names = vars(module)
    for step in steps:
        names[step["name"]] = _made(step, names)
    return cast("Callable[..., Any]", names.pop(_FUNCTION))


def _made(step: Step, names: dict[str, Any]) -> Any:
    match step["kind"]:
        case "import":
            return importlib.import_module(step["module"])
        case "from":
            return functools.reduce(getattr, step["path"].split("."), importlib.import_module(step["module"]))
        case "value":
            return step["value"]
        case _:
            file: str = step["file"]
            lines: list[str] = step["lines"]
            _remember(file, step["line"], lines)
            tree = _parsed(lines, step["line"], has_decorators=step["has_decorators"])
            flags: int = step["flags"]
            exec(compile(tree, file, "exec", flags=flags, dont_inherit=True), names)
            return names[step["defines"]]


def _remember(file: str, line: int, lines: list[str]) -> None:
    """Let tracebacks show the lines of a cell, which has no file."""
    if linecache.getline(file, line):
        return
    known = linecache.cache.get(file)
    shown = list(known[2]) if known is not None and len(known) == 4 else []
    shown += ["\n"] * (line - 1 + len(lines) - len(shown))
    shown[line - 1 : line - 1 + len(lines)] = [f"{text}\n" for text in lines]
    linecache.cache[file] = (len(shown), None, shown, file)


def _parsed(lines: list[str], line: int, *, has_decorators: bool) -> ast.Module:
    """The source of one function or class, at its place in its file. Annotations of functions are left out: a type that
    is only named there need not exist in the other process."""
    if lines[0][:1].isspace():  # inside a function or class; removing the indentation would change long strings
        tree = ast.parse("\n".join(("if True:", *lines)))
        tree.body = cast("ast.If", tree.body[0]).body
        line -= 1
    else:
        tree = ast.parse("\n".join(lines))
    ast.increment_lineno(tree, line - 1)
    definition = tree.body[0]
    if not has_decorators and isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        definition.decorator_list = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return tree


class _Text(NamedTuple):
    """The source of a function or class, and the name that it defines."""

    file: str
    line: int
    lines: list[str]
    defines: str


class _Packer:
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.steps: list[Step] = []
        self._fn = fn
        self._known: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Add the steps that make `value` under `name`, and before them those for what it uses."""
        if name in self._known:
            if self._known[name] is not value:
                raise self._two(name)
            return
        self._known[name] = value
        if isinstance(value, types.ModuleType):
            self.steps.append({"kind": "import", "name": name, "module": value.__name__})
        elif home := _home(value):
            self.steps.append({"kind": "from", "name": name, "module": home, "path": value.__qualname__})
        elif isinstance(value, type) or isinstance(_inner(value), types.FunctionType):
            self._add_source(name, value)
        else:
            self._add_value(name, value)

    def _two(self, name: str) -> InvalidArgumentError:
        return _refused(self._fn, f"uses two different things that are named {name!r}; rename one of them")

    def _add_value(self, name: str, value: Any) -> None:
        try:
            plain = objects.decode(objects.encode(value, MAX_BYTES))
        except DistributedError as exc:
            what = f"uses {name!r}, which is of type {type(value).__name__} and cannot be sent"
            raise _refused(self._fn, f"{what}; make it inside the function, or pass {_PLAIN}") from exc
        self.steps.append({"kind": "value", "name": name, "value": plain})

    def _add_source(self, name: str, value: Any) -> None:
        inner = _inner(value)
        text = _text_of_class(value) if isinstance(value, type) else _text_of_function(inner)
        if text is None:
            what = "" if value is self._fn else f"uses {name!r}, and "
            raise _refused(
                self._fn, f"{what}its source is not available; define it in a cell of a notebook or in a .py file"
            )
        # A wrapper is what its decorators make; a plain function with decorators is what they were given.
        has_decorators = inner is not value or isinstance(value, type)
        flags = max((code.co_flags & _ANNOTATIONS for code in _codes(value)), default=0)
        tree = _parsed(text.lines, 1, has_decorators=has_decorators)
        outside = _outside(value)
        if self._known.setdefault(text.defines, value) is not value:
            raise self._two(text.defines)
        for used in sorted(_names(ast.unparse(tree))):
            if used != text.defines and used in outside:
                self.add(used, outside[used])
        self.steps.append(
            {
                "kind": "source",
                "name": name,
                "defines": text.defines,
                "file": text.file,
                "line": text.line,
                "lines": text.lines,
                "flags": flags,
                "has_decorators": has_decorators,
            }
        )


def _refused(fn: Callable[..., Any], why: str) -> InvalidArgumentError:
    return InvalidArgumentError("fn", getattr(fn, "__qualname__", type(fn).__name__), why)


def _inner(value: Any) -> Any:
    """The function inside the wrappers of its decorators."""
    try:
        return inspect.unwrap(value) if callable(value) else value
    except ValueError:  # a wrapper that wraps itself
        return value


def _home(value: Any) -> str | None:
    """The module from which another process can import `value`; None if there is none."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module == "__main__" or "<" in path:
        return None
    loaded = sys.modules.get(module)
    if loaded is None or (getattr(loaded, "__spec__", None) is None and module != "builtins"):
        return None
    found: Any = loaded
    for part in path.split("."):
        found = getattr(found, part, None)
    return module if found is value else None


def _functions(value: Any) -> list[types.FunctionType]:
    """The function itself, or the methods of a class that were written in it."""
    if not isinstance(value, type):
        return [_inner(value)]
    inside: list[Any] = [*vars(value).values()]
    # A property keeps its function as `fget`, class and static methods as `__func__`.
    found = [_inner(getattr(item, "fget", None) or getattr(item, "__func__", item)) for item in inside]
    return [item for item in found if isinstance(item, types.FunctionType) and item.__module__ == value.__module__]


def _codes(value: Any) -> list[types.CodeType]:
    return [function.__code__ for function in _functions(value)]


def _outside(value: Any) -> dict[str, Any]:
    """What the names in the source of a function or class may mean, other than builtins."""
    found = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    for function in _functions(value):
        found |= function.__globals__
    for function in _functions(value):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    return found


def _names(source: str) -> set[str]:
    """The names that a piece of source takes from outside of itself; attributes and local names do not count."""

    def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
        yield table
        for child in table.get_children():
            yield from tables(child)

    return {
        symbol.get_name()
        for table in tables(symtable.symtable(source, "<source>", "exec"))
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module")
    }


def _text_of_function(fn: types.FunctionType) -> _Text | None:
    line = fn.__code__.co_firstlineno
    return _found(fn.__code__.co_filename, fn.__code__.co_name, line)


def _text_of_class(cls: type) -> _Text | None:
    for code in _codes(cls):
        if text := _found(code.co_filename, cls.__name__, None, inside=code.co_firstlineno):
            return text
    # Without methods, the class does not know its file: it is the main script or a cell, the latest first.
    script = getattr(sys.modules.get(cls.__module__), "__file__", None)
    for file in [*([script] if script else []), *reversed([*linecache.cache])]:
        is_cell = file.startswith("<") or "ipykernel" in file
        if (file == script or is_cell) and (text := _found(file, cls.__name__, None)):
            return text
    return None


def _found(file: str, name: str, line: int | None, inside: int | None = None) -> _Text | None:
    """The definition in a file or cell of the function that begins in `line`, or else of the class that has the line
    `inside`."""
    lines = [text.rstrip("\n") for text in linecache.getlines(file)]
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:
        return None
    kinds = ast.ClassDef if line is None else (ast.FunctionDef, ast.AsyncFunctionDef)
    if name == "<lambda>":
        return _text_of_lambda(file, lines, tree, line)
    for node in reversed([*ast.walk(tree)]):
        if not isinstance(node, kinds) or node.name != name:
            continue
        first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
        last = node.end_lineno or node.lineno
        if first <= (line or inside or first) <= (last if line is None else node.lineno):
            return _Text(file, first, lines[first - 1 : last], name)
    return None


def _text_of_lambda(file: str, lines: list[str], tree: ast.Module, line: int | None) -> _Text | None:
    """A lambda, if it is the only one that begins in its line: there is no telling them apart."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and node.lineno == line]
    source = ast.get_source_segment("\n".join(lines), found[0]) if len(found) == 1 else None
    if source is None or line is None:
        return None
    return _Text(file, line, f"ringfort_lambda_{line} = ({source})".split("\n"), f"ringfort_lambda_{line}")
