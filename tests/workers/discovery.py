"""A process that announces itself and prints whom it hears, one JSON line each, until its input ends.

python -m tests.workers.discovery NETWORK_ID_HEX PORT [INTERFACE...]
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys

from ringfort.cluster.discovery.interfaces import choose
from ringfort.cluster.discovery.mdns import TOKEN_BYTES, MdnsDiscovery
from ringfort.cluster.discovery.system import list_interfaces, watch_interfaces


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(network_id: str, port: str, *wanted: str) -> None:
    discovery = MdnsDiscovery(
        bytes.fromhex(network_id),
        secrets.token_hex(TOKEN_BYTES),
        on_heard=lambda heard: say(heard=heard._asdict()),
        on_gone=lambda token: say(gone=token),
        on_trouble=lambda trouble: say(trouble=trouble._asdict()),
        port=int(port),
    )
    loop = asyncio.get_running_loop()
    choice = choose(list_interfaces(), wanted)
    changes: asyncio.Queue[object] = asyncio.Queue()
    await discovery.listen(choice)
    say(started=choice.addresses)
    watching = asyncio.ensure_future(watch_interfaces(choice, wanted, changes.put_nowait, period=0.1))
    ending = loop.run_in_executor(None, sys.stdin.read)
    while not ending.done():
        change = asyncio.ensure_future(changes.get())
        await asyncio.wait((change, ending), return_when=asyncio.FIRST_COMPLETED)
        if change.done():
            choice = change.result()
            await discovery.listen(choice)
            say(changed=choice.addresses)
        change.cancel()
    watching.cancel()
    await discovery.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
