"""A loss curve in characters. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Eighths of the height of a character."""


def curve(
    points: Sequence[tuple[int, float]], steps: int, *, width: int, height: int, blocks: bool = True
) -> list[str]:
    """Draw the losses of `points` (step, loss) over `steps` steps as lines of at most `width` characters.

    The height of a column is the mean loss of its steps. Without points there are no lines. Without `blocks`, the curve
    is plain ASCII.
    """
    if not points:
        return []
    steps_done, losses = (np.array(column) for column in zip(*points, strict=True))
    labels = {height: f"{losses.max():.2f}", 1: f"{losses.min():.2f}"}
    label = max(map(len, labels.values()))
    room = max(1, width - label - 3)
    places = np.minimum(room - 1, (steps_done - 1) * room // max(1, steps))
    totals, counts = np.bincount(places, losses), np.bincount(places)
    # A column without points repeats the one before it.
    used = np.maximum.accumulate(np.where(counts > 0, np.arange(len(counts)), places[0]))
    # A column shows at least an eighth, so that the lowest loss is visible too.
    share = (totals[used] / counts[used] - losses.min()) / (np.ptp(losses) or 1.0)
    levels = np.maximum(1, np.rint(share * 8 * height)).astype(int)
    cells, bar = (BLOCKS, "│") if blocks else (" ########", "|")
    lines = [
        f"{labels.get(row, ''):>{label}} {bar} {''.join(cells[level] for level in np.clip(levels - 8 * row + 8, 0, 8))}"
        for row in range(height, 0, -1)
    ]
    caption = f"{'':>{label}}   step 1 to {steps}: loss {losses[0]:.2f} at first, {losses[-1]:.2f} now"
    return [*(line.rstrip() for line in lines), caption]
