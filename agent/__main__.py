"""Starts the command line, with what has to be set before anything is loaded."""

import os
import sys

# Else numpy starts a thread for each core of the machine, and GPU machines have hundreds.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from agent.command_line import main

if __name__ == "__main__":
    sys.exit(main())
