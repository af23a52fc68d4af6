"""`python -m ringfort.cli`: the same as the `ringfort` script, if that is not on the path."""

from __future__ import annotations

from ringfort.cli.app import main

main()
