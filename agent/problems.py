"""What goes wrong with a driver, in words: what failed, why, and what to do."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agent.backend import Code, NvmlError
from agent.report import Problem

HUNG: Final = "Hung"
GONE: Final = "Gone"
NO_GPU: Final = "NoGpu"

_RESTART: Final = "this container must start anew, and does once /healthz has failed long enough"

_CAUSES: Final[Mapping[Code, str]] = MappingProxyType(
    {
        Code.Uninitialized: "NVML lost its connection to the driver: it is started anew",
        Code.NoPermission: "the container may not open the GPU: give it the devices "
        "(NVIDIA_VISIBLE_DEVICES=all), and for MIG run it privileged; where it might before, "
        f"{_RESTART}",
        Code.DriverNotLoaded: "the NVIDIA kernel module is not loaded: load it (modprobe nvidia), "
        "or wait for the GPU operator to",
        Code.LibraryNotFound: "there is no NVIDIA driver library (libnvidia-ml.so.1) here: install "
        "the driver; in a container use runtimeClassName: nvidia with NVIDIA_VISIBLE_DEVICES=all "
        "and NVIDIA_DRIVER_CAPABILITIES=utility",
        Code.FunctionNotFound: "the driver is too old for this call: upgrade it",
        Code.CorruptedInforom: "the GPU's infoROM is damaged: reset the GPU; if it stays, "
        "have the card replaced",
        Code.GpuIsLost: "the GPU has fallen off the bus: drain the node and restart the machine",
        Code.ResetRequired: "the GPU must be reset: drain the node and run nvidia-smi --gpu-reset",
        Code.OperatingSystem: "the operating system refuses access to the GPU, as after `systemctl "
        f"daemon-reload` on the host, which takes the devices from containers: {_RESTART}",
        Code.LibRmVersionMismatch: "the driver was upgraded under this process, and its library "
        f"does not fit the new kernel module: {_RESTART}",
        Code.InUse: "another program uses the GPU exclusively (profiling, or a change of its MIG "
        "layout): wait until it ends",
        Code.GpuNotFound: "the driver does not list the GPU any more: see dmesg for XID errors",
        Code.Timeout: "the GPU did not answer in time: see dmesg for XID errors",
        Code.NotReady: "the driver is still starting",
        Code.Unknown: "the driver gives no cause; where it lasts, the container has lost its "
        f"devices: {_RESTART}",
    }
)

NEEDS_RESTART: Final = frozenset(
    {Code.LibRmVersionMismatch, Code.Unknown, Code.OperatingSystem, Code.NoPermission}
)
"""What only a new container mends, where it worked before."""


def problem_of(error: NvmlError, what: str) -> Problem:
    """Say why something cannot be read.

    Args:
        error: what NVML said.
        what: what failed, such as `cannot start NVML`.
    """
    cause = _CAUSES.get(error.code, f"{error.call} answered so: see dmesg for errors of the driver")
    return Problem(code=error.code.name, text=f"{what}: {error.text}: {cause}")


def hung_problem(call: str, seconds: float) -> Problem:
    """Say that a call did not return."""
    return Problem(
        code=HUNG,
        text=f"{call} has not returned for {seconds:g} s: the driver hangs, as with a GPU that has "
        "fallen off the bus: see dmesg; where it lasts, drain the node and restart the machine",
    )


def exhausted_problem(count: int) -> Problem:
    """Say that nothing is read any more because too many calls hang."""
    return Problem(
        code=HUNG,
        text=f"{count} calls of NVML have not returned: nothing is read until they do: {_RESTART}",
    )
