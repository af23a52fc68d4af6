"""A terminal for tests: what a person would see of what was written to it."""

from __future__ import annotations

import re


class Screen:
    """What a terminal shows: enough of one for what a printer writes."""

    def __init__(self) -> None:
        self.rows: list[str] = [""]
        self.y = self.x = 0

    def wrap(self, columns: int) -> None:
        """Make it narrower, with the cursor at the end: rows that are too long continue in the next ones."""
        parts = [[row[at : at + columns] for at in range(0, max(1, len(row)), columns)] for row in self.rows]
        self.rows = [part for row in parts for part in row]
        self.y, self.x = len(self.rows) - 1, len(self.rows[-1])

    def feed(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\r\n\x1b]+", text):
            if token == "\r":
                self.x = 0
            elif token == "\n":
                self.y, self.x = self.y + 1, 0  # as after a terminal's own carriage return
                if self.y == len(self.rows):
                    self.rows.append("")
            elif token == "\x1b[A":
                assert self.y > 0
                self.y -= 1
            elif token == "\x1b[J":
                self.rows = [*self.rows[: self.y], self.rows[self.y][: self.x]]
            elif not token.startswith("\x1b"):
                row = self.rows[self.y].ljust(self.x)
                self.rows[self.y] = row[: self.x] + token + row[self.x + len(token) :]
                self.x += len(token)
