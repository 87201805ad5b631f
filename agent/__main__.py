"""Run the agent's command line; set environment variables that imports read before importing it."""

import os
import sys

# Otherwise NumPy starts one thread per CPU core, and GPU nodes have hundreds of cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from agent.command_line import main

if __name__ == "__main__":
    sys.exit(main())
