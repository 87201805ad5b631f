"""Start the command line with numpy limited to one thread."""

import os
import sys

# numpy would start one thread for each core, in this process and in the worker process. Those
# threads do no work here, but they use memory and compete with the event loop for the CPU.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from extender.command_line import main

if __name__ == "__main__":
    sys.exit(main())
