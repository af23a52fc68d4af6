"""`python -m ringfort`: the same as the `ringfort` script, for where that is not on the path."""

from __future__ import annotations

from ringfort.cli.app import main

main()
