"""The demo: processes of this machine train a small language model together, and prove that the result is right."""

from __future__ import annotations
