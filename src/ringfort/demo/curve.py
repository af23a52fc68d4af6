"""A loss curve in characters. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
    losses = [loss for _, loss in points]
    top, bottom = max(losses), min(losses)
    label = max(len(f"{value:.2f}") for value in (top, bottom))
    columns = _columns(points, steps, max(1, width - label - 3))
    spread = (top - bottom) or 1.0
    lines: list[str] = []
    for row in range(height, 0, -1):
        # A column shows at least an eighth, so that the lowest loss is visible too.
        filled = [None if one is None else max(1, round((one - bottom) / spread * 8 * height)) for one in columns]
        cells = (0 if one is None else min(8, max(0, one - 8 * (row - 1))) for one in filled)
        drawn = "".join(BLOCKS[cell] if blocks else " #"[cell >= 4 or (row == 1 and cell > 0)] for cell in cells)
        value = f"{top:.2f}" if row == height else f"{bottom:.2f}" if row == 1 else ""
        lines.append(f"{value:>{label}} {'│' if blocks else '|'} {drawn}".rstrip())
    lines.append(f"{'':>{label}}   step 1 to {steps}: loss {losses[0]:.2f} at first, {losses[-1]:.2f} now")
    return lines


def _columns(points: Sequence[tuple[int, float]], steps: int, width: int) -> list[float | None]:
    """The mean loss per column. A column without points, between columns with points, repeats the one before it."""
    sums = [(0.0, 0)] * width
    for step, loss in points:
        place = min(width - 1, (step - 1) * width // max(1, steps))
        total, count = sums[place]
        sums[place] = (total + loss, count + 1)
    last = max(place for place, (_, count) in enumerate(sums) if count)
    found: list[float | None] = []
    before: float | None = None
    for place, (total, count) in enumerate(sums):
        before = total / count if count else before
        found.append(before if place <= last else None)
    return found
