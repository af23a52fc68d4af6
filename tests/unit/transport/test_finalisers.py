"""What is done when an object is gone."""

from __future__ import annotations

import queue
import subprocess
import sys

from ringfort.transport.finalisers import when_gone


class Item:
    """Something with a weak reference."""


def test_it_is_done_once_the_object_is_gone() -> None:
    done: queue.Queue[str] = queue.Queue()
    item = Item()
    when_gone(item, lambda: done.put("done"))
    assert done.empty()
    del item
    assert done.get(timeout=10) == "done"


def test_it_is_not_done_where_it_was_called_off() -> None:
    done: queue.Queue[str] = queue.Queue()
    first, second = Item(), Item()
    farewell = when_gone(first, lambda: done.put("first"))
    when_gone(second, lambda: done.put("second"))
    farewell.call_off()
    farewell.call_off()
    del first, second
    assert done.get(timeout=10) == "second"
    assert done.empty()


def test_the_end_of_the_program_is_quiet() -> None:
    """From Python 3.12 on no thread starts any more when the interpreter frees what is left."""
    program = """if True:
        from ringfort.transport.finalisers import when_gone

        class Item:
            pass

        kept = Item()
        when_gone(kept, int)  # not a function of this module, which would keep all of it
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")
