"""torchft's lighthouse where its command is not installed, only its package: `python lighthouse.py OPTIONS`.

It reads the command line of the process, so it must be started as a file.
"""

from __future__ import annotations

import sys

from torchft._torchft import lighthouse_main

if __name__ == "__main__":
    sys.exit(lighthouse_main())
