"""The demo: local peers train a small language model together, and then prove that they did it right."""

from __future__ import annotations
