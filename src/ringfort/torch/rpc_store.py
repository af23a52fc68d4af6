"""`RpcStore`: torch's key-value store over calls between the ranks of a group. Rank 0 owns the contents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any, Final

import msgspec

from ringfort.config import RpcConfig
from ringfort.context import DistributedContext
from ringfort.errors import OperationTimeoutError, RpcTimeoutError
from ringfort.rpc.agent import RpcAgent
from ringfort.torch.key_value import Answer, KeyValueStore, Request, Verb
from ringfort.torch.linked_store import LinkedStore

_OWNER: Final = 0
_FUNCTION: Final = "torch.store"


class RpcStore(LinkedStore):
    """The store of all ranks of `context`, which make it at the same place among their collectives."""

    def __init__(self, context: DistributedContext) -> None:
        super().__init__()
        self._contents = KeyValueStore()
        self._waiting: dict[tuple[str, int], asyncio.Future[Answer]] = {}
        """The requests that the owner has not answered, by rank and number. Only its event loop uses them."""
        self._numbers = count(1)
        self._agent = RpcAgent(context, config=RpcConfig(workers=1))
        if context.rank == _OWNER:
            self._agent.register(_FUNCTION, self._serve, raw=True)
        context.barrier()  # before it, the owner might not know the function yet

    def close(self) -> None:
        """Stop to send and answer requests."""
        self._agent.close()

    def _request(self, verb: Verb, keys: Sequence[str], *, seconds: float | None = None, **more: Any) -> Answer:
        seconds = self._seconds if seconds is None else seconds
        request = msgspec.msgpack.encode(Request(next(self._numbers), verb, tuple(keys), **more))
        try:
            answer = self._agent.rpc_sync(_OWNER, _FUNCTION, request, timeout=seconds)
        except RpcTimeoutError as exc:
            raise OperationTimeoutError(f"{verb} of {', '.join(keys[:3])} at the store", seconds) from exc
        return msgspec.msgpack.decode(answer, type=Answer)

    async def _serve(self, data: bytes) -> bytes:
        """Carry out a request, at the owner. A call that its caller gives up is cancelled here."""
        call = RpcAgent.current_call()
        assert call is not None
        rank, request = str(call.peer), msgspec.msgpack.decode(data, type=Request)
        place = rank, request.number
        answer = self._waiting[place] = asyncio.get_running_loop().create_future()
        try:
            for peer, due in self._contents.handle(rank, request):
                waiting = self._waiting[peer, due.number]
                if not waiting.done():  # its caller may have given up a moment ago
                    waiting.set_result(due)
            return msgspec.msgpack.encode(await answer)
        except asyncio.CancelledError:
            self._contents.handle(rank, Request(0, "forget", amount=request.number))
            raise
        finally:
            del self._waiting[place]
