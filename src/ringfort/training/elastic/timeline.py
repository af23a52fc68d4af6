"""The time line of a run: what happened when, at debug level, for those who ask where the seconds went.

    logging.getLogger("ringfort.elastic.timeline").setLevel(logging.DEBUG)

`python -m benchmarks.elastic --timeline` prints it for each recovery and each joiner.
"""

from __future__ import annotations

import logging
from typing import Final

LOGGER: Final = "ringfort.elastic.timeline"

note: Final = logging.getLogger(LOGGER).debug
"""Takes a format and its arguments."""
