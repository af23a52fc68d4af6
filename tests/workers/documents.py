"""One of two ranks that run every code block of the documents, in turn: `python -m tests.workers.documents`.

Each block finds what a launcher would have told it, with a port of its own, and begins with nothing defined.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from tests.helpers.documents import CLUSTERS, Block, blocks

FIRST_PORT = 29600
"""The tests give these processes a network of their own, so no port is anybody else's."""


def has(need: str) -> bool:
    """Whether these two ranks have what a block needs."""
    if need in CLUSTERS:
        return False
    if need == "cuda":
        import torch

        return torch.cuda.is_available()
    return find_spec(need) is not None


def run(number: int, block: Block) -> None:
    """Runs a block, and ends what it leaves open."""
    os.environ["MASTER_PORT"] = str(FIRST_PORT + number)
    variables = dict(os.environ)
    names: dict[str, Any] = {"__name__": "__main__"}
    # As a notebook does for its cells: so the source of a function can be found.
    linecache.cache[block.where] = (len(block.code), None, block.code.splitlines(keepends=True), block.where)
    try:
        exec(compile(block.code, block.where, "exec"), names)
    finally:
        for name in ("agent", "ctx", "backend"):
            with suppress(AttributeError, KeyError):
                names[name].close()
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is not None:  # it remembers the group
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()  # Lightning takes WORLD_SIZE away when it is done
        os.environ.update(variables)


def main() -> None:
    for number, block in enumerate(blocks()):
        missing = [need for need in block.needs if not has(need)]
        if missing:
            print(f"left out {block.where} (needs {', '.join(missing)})", flush=True)
            continue
        try:
            run(number, block)
        except BaseException:
            print(f"failed {block.where}", flush=True)
            traceback.print_exc()
            os._exit(1)  # whatever the block has begun
        print(f"ran {block.where}", flush=True)


if __name__ == "__main__":
    main()
