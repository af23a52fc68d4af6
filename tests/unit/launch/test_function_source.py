"""Functions that travel without pickle: what comes along with them, what is refused, and how a traceback looks."""

from __future__ import annotations

import contextlib
import functools
import linecache
import math
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfort.errors import InvalidArgumentError
from ringfort.launch.function_source import pack, unpack

Cell = Callable[[str], dict[str, Any]]


@pytest.fixture(autouse=True)
def own_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """`unpack` takes the place of the main module."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def cell() -> Iterator[Cell]:
    """Runs source as a cell of a notebook, whose names are those of the main module; returns them."""
    kept = sys.modules["__main__"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    added: list[str] = []

    def run(source: str) -> dict[str, Any]:
        name = f"<ipython-input-{len(added)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        added.append(name)
        exec(compile(source, name, "exec", dont_inherit=True), vars(module))
        return vars(module)

    yield run
    sys.modules["__main__"] = kept
    for name in added:
        linecache.cache.pop(name, None)


def sent(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function as another process would have it."""
    return unpack(pack(fn))


def test_a_function_of_a_module_is_sent_by_its_name() -> None:
    assert pack(math.sqrt) == [
        {"kind": "from", "name": "ringfort_function", "module": "math", "path": "sqrt"},
    ]
    assert sent(math.sqrt) is math.sqrt


def test_a_function_of_a_cell_brings_all_that_it_uses(cell: Cell) -> None:
    cell("import math\nimport numpy as np\nfrom math import floor as down\nSCALE = {'by': [2.0]}\nWEIGHTS = np.ones(3)")
    cell("def helper(x):\n    return down(x) * SCALE['by'][0]\nsquare = lambda x: x * x")
    names = cell("def run(x, *, plus=math.tau):\n    return helper(x) + square(x) + plus + WEIGHTS.sum()")
    run = sent(names["run"])
    assert run is not names["run"]
    assert run(1.5, plus=1.0) == 1 * 2.0 + 1.5 * 1.5 + 1.0 + 3.0
    assert run.__globals__["WEIGHTS"] is not names["WEIGHTS"]
    assert run.__globals__["__name__"] == "__main__"


def test_classes_of_cells_come_along_with_their_bases_with_or_without_methods(cell: Cell) -> None:
    cell("from dataclasses import dataclass\n@dataclass\nclass Settings:\n    rate: float = 0.5")
    cell("class Base:\n    size = 3")
    cell("class Model(Base):\n    @property\n    def total(self): return self.size * Settings().rate")
    names = cell("def run():\n    return Model().total")
    assert sent(names["run"])() == 1.5


def test_a_redefined_cell_is_sent_as_it_is_now(cell: Cell) -> None:
    cell("def run():\n    return 1")
    names = cell("def run():\n    return 2")
    assert sent(names["run"])() == 2


def test_functions_that_call_each_other_or_themselves_are_sent_once(cell: Cell) -> None:
    cell("def even(n):\n    return n == 0 or odd(n - 1)")
    names = cell(
        "def odd(n):\n    return n != 0 and even(n - 1)\ndef fac(n):\n    return 1 if n < 2 else n * fac(n - 1)"
    )
    assert sent(names["odd"])(7)
    assert sent(names["fac"])(5) == 120
    assert len(pack(names["odd"])) == 2


def test_decorators_that_say_what_they_wrap_are_applied_again(cell: Cell) -> None:
    cell("import functools")
    cell("def twice(fn):\n    @functools.wraps(fn)\n    def call(x):\n        return fn(fn(x))\n    return call")
    names = cell("@twice\ndef run(x):\n    return x + 1")
    assert sent(names["run"])(0) == 2


def test_decorators_that_do_not_are_sent_as_the_closure_that_they_made(cell: Cell) -> None:
    cell("def thrice(fn):\n    def call(x):\n        return fn(fn(fn(x)))\n    return call")
    names = cell("@thrice\ndef run(x):\n    return x + 1")
    assert sent(names["run"])(0) == 3


def test_a_function_inside_another_brings_its_closure_and_its_long_strings() -> None:
    factor = 3

    def inner(x: np.ndarray) -> tuple[np.ndarray, str]:
        return (
            x * factor,
            """
at the margin""",
        )

    result, text = sent(inner)(np.ones(2))
    assert result.tolist() == [3, 3]
    assert text == "\nat the margin"


def test_types_that_are_only_in_annotations_need_not_be_sent(cell: Cell) -> None:
    names = cell("Alias = dict[str, object()]\ndef run(x: Alias) -> Alias:\n    return x")
    assert sent(names["run"])(1) == 1


def test_local_names_and_attributes_are_no_names_of_the_notebook(cell: Cell) -> None:
    names = cell("model = object()\ndef run(x):\n    model = x.real\n    return [model for model in (model,)]")
    assert sent(names["run"])(1) == [1]


def test_a_traceback_shows_the_lines_of_the_cell(cell: Cell) -> None:
    names = cell("# first\n\ndef run():\n    raise KeyError('here')")
    steps = pack(names["run"])
    linecache.cache.pop("<ipython-input-0>")  # as in another process
    with pytest.raises(KeyError) as caught:
        unpack(steps)()
    text = "".join(traceback.format_exception(caught.value))
    assert "File \"<ipython-input-0>\", line 4, in run\n    raise KeyError('here')" in text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "lock = open\nfile = lock(0, closefd=False)\ndef run():\n    file.read()",
            "uses 'file', .* inside the function",
        ),
        (
            "def inner():\n    import threading\n    lock = threading.Lock()\n    return lambda: lock\nrun = inner()",
            "'lock'",
        ),
        ("pair = (lambda: 1), (lambda: 2)\nrun = pair[0]", "source is not available; define it in a cell"),
        ("async def run(): pass", r"is async; .* asyncio\.run"),
        ("import functools\ndef f(x): pass\nrun = functools.partial(f, 1)", "is a partial; pass the function itself"),
        ("class C:\n    def run(self): pass\nrun = C().run", "is a method of an object"),
        ("class C:\n    def __call__(self): pass\nrun = C()", "is an object of type C; pass a function"),
        ("run = 3", "must be a function"),
        (
            "def make(k):\n    return lambda: k\na, b = make(1), make(2)\ndef run():\n    return a() + b()",
            "two different things that are named",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_with_what_to_do(cell: Cell, source: str, why: str) -> None:
    names = cell(source)
    with contextlib.ExitStack() as stack:
        if hasattr(names.get("file"), "close"):
            stack.callback(names["file"].close)
        with pytest.raises(InvalidArgumentError, match=why):
            pack(names["run"])


def test_a_function_without_source_is_refused() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def run(): pass", names)
    with pytest.raises(InvalidArgumentError, match="fn='run': its source is not available; define it in a cell"):
        pack(names["run"])


@dataclass
class Settings:
    """Of an importable module."""

    rate: float


def test_classes_of_modules_are_imported_and_not_copied() -> None:
    def inner() -> Any:
        return Settings(0.5), functools.reduce

    assert sent(inner)() == (Settings(0.5), functools.reduce)


def test_the_main_script_need_not_guard_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from ringfort.launch.function_source import pack, unpack\n"
        "class Held:\n    value = 4\n"
        "def run():\n    return Held.value\n"
        "print(unpack(pack(run))())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "4\n"
