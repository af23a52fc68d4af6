"""The ticket of this machine: what its launcher was asked to run."""

from __future__ import annotations

import platform
import shlex
import sys
from hashlib import sha256
from pathlib import Path

from ringfort.cluster.net.profile import own_version
from ringfort.errors import InvalidArgumentError
from ringfort.launch.agreement_messages import MAX_ARGUMENTS, Ticket
from ringfort.launch.run_options import RunOptions


def ticket_of(options: RunOptions) -> Ticket:
    """The ticket of this machine. Raises `InvalidArgumentError` if the script cannot be read."""
    arguments = shlex.join(options.arguments)
    digest, modified = "", 0.0
    if not options.module:
        script = Path(options.script)
        try:
            digest, modified = sha256(script.read_bytes()).hexdigest(), max(0.0, script.stat().st_mtime)
        except OSError as exc:
            raise InvalidArgumentError("script", options.script, f"cannot be read: {exc.strerror}") from exc
    # The command line may contain bytes that are not text.
    given = arguments.encode(errors="surrogateescape")
    return Ticket(
        host=platform.node()[:64],
        script=options.title[:256],
        nodes=options.nodes,
        arguments=given.decode(errors="replace")[:MAX_ARGUMENTS],
        arguments_digest=sha256(given).hexdigest(),
        script_digest=digest,
        modified=modified,
        max_restarts=options.max_restarts,
        patience=options.patience_seconds,
        torch_backend=options.torch_backend or "",
        python=".".join(map(str, sys.version_info[:2])),
        version=own_version(),
    )
