"""Keep a real GPU busy for a known share of time; needs only the driver, no CUDA toolkit.

A kernel spins on every SM for `duty` of each 200 ms; the process sleeps for the rest. Prints
`running` once the load runs. Ends after `--seconds`, or when stdin is closed.
"""

import argparse
import ctypes
import sys
import time
from uuid import UUID

PERIOD_SECONDS = 0.2
THREADS = 128
BLOCKS_PER_SM = 4
SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
GIB = 1 << 30

KERNELS = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %t<4>;
    .reg .pred %again;
    ld.param.u64 %t0, [nanoseconds];
    mov.u64 %t1, %globaltimer;
    add.u64 %t2, %t1, %t0;
LOOP:
    mov.u64 %t3, %globaltimer;
    setp.lt.u64 %again, %t3, %t2;
    @%again bra LOOP;
    ret;
}
.visible .entry trespass()
{
    .reg .u64 %t0;
    .reg .u32 %t1;
    mov.u64 %t0, 64;
    mov.u32 %t1, 1;
    st.global.u32 [%t0], %t1;
    ret;
}
"""


class Cuda:
    """Driver API calls that a load needs."""

    def __init__(self, index: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device = self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        count = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(count), SM_COUNT, device)
        self._blocks = count.value * BLOCKS_PER_SM
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(KERNELS))
        self._spin, self._trespass = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(self._spin), module, b"spin")
        self._call("cuModuleGetFunction", ctypes.byref(self._trespass), module, b"trespass")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise SystemExit(f"{name} failed with CUDA error {code}")

    def uuid(self) -> str:
        """Return the card's UUID in NVML's format."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(raw), self._device)
        return f"GPU-{UUID(bytes=bytes(raw))}"

    def allocate(self, size: int) -> None:
        """Allocate GPU memory until the process ends."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))

    def spin(self, seconds: float) -> None:
        """Keep every SM busy for a number of seconds."""
        nanoseconds = ctypes.c_uint64(int(seconds * 1e9))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
        dimensions = (self._blocks, 1, 1, THREADS, 1, 1)
        self._call("cuLaunchKernel", self._spin, *dimensions, 0, None, parameters, None)
        self._call("cuCtxSynchronize")

    def trespass(self) -> None:
        """Write to an invalid address, as a buggy program would; the driver ends the context."""
        dimensions = (1, 1, 1, 1, 1, 1)
        self._call("cuLaunchKernel", self._trespass, *dimensions, 0, None, None, None)
        self._call("cuCtxSynchronize")


def main() -> None:
    """Run the load."""
    parser = argparse.ArgumentParser(prog="python -m testkit.agent.gpu_load", description=__doc__)
    parser.add_argument("--index", type=int, default=0, help="which GPU, as CUDA counts")
    parser.add_argument("--duty", type=float, default=0.5, help="share of time busy, 0 to 1")
    parser.add_argument("--gib", type=float, default=0.0, help="memory to hold")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--trespass", action="store_true", help="write where no memory is")
    arguments = parser.parse_args()
    cuda = Cuda(arguments.index)
    if arguments.gib:
        cuda.allocate(int(arguments.gib * GIB))
    if arguments.trespass:
        cuda.trespass()
    sys.stdout.write("running\n")
    sys.stdout.flush()
    end = time.monotonic() + arguments.seconds
    due = time.monotonic()
    while time.monotonic() < end:
        if arguments.duty > 0:
            cuda.spin(PERIOD_SECONDS * min(arguments.duty, 1.0))
        due = max(due + PERIOD_SECONDS, time.monotonic())
        time.sleep(max(due - time.monotonic(), 0.0))


if __name__ == "__main__":
    main()
