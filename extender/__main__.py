"""Starts the command line, with what has to be set before anything is loaded."""

import os
import sys

# Else numpy starts a thread for each core of the machine, here and in the worker process: they
# have nothing to do, each keeps memory, and some take turns with the loop for nothing.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from extender.command_line import main

if __name__ == "__main__":
    sys.exit(main())
