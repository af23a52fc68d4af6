"""The benchmark: collectives over sizes and world sizes, beside other engines in the same run."""

from __future__ import annotations
