"""Describe driver errors for operators: the failed operation, the cause, and the remedy."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agent.gpu.backend import Code, NvmlError
from agent.report.contract import Problem

_HUNG: Final = "Hung"
GONE: Final = "Gone"
NO_GPU: Final = "NoGpu"

_RESTART: Final = "this container must restart, and does so once /healthz has failed long enough"

_RESET: Final = (
    "drain the node, the agent too, because an open GPU cannot be reset (kubectl "
    "label node NODE idlegpu.io/agent=false, and remove the label afterwards), and run "
    "nvidia-smi --gpu-reset"
)

_CAUSES: Final[Mapping[Code, str]] = MappingProxyType(
    {
        Code.Uninitialized: "NVML lost its connection to the driver: the agent starts it again",
        Code.NoPermission: "the container may not open the GPU: give it the devices "
        "(NVIDIA_VISIBLE_DEVICES=all), and for MIG run it privileged; if it had access before, "
        f"{_RESTART}",
        Code.DriverNotLoaded: "the NVIDIA kernel module is not loaded: load it (modprobe nvidia), "
        "or wait for the GPU operator to load it",
        Code.LibraryNotFound: "the NVIDIA driver library (libnvidia-ml.so.1) is missing: install "
        "the driver; in a container use runtimeClassName: nvidia with NVIDIA_VISIBLE_DEVICES=all "
        "and NVIDIA_DRIVER_CAPABILITIES=utility",
        Code.FunctionNotFound: "the driver is too old for this call: upgrade it",
        Code.CorruptedInforom: f"the GPU's infoROM is damaged: {_RESET}; if it stays, "
        "replace the card",
        Code.GpuIsLost: "the GPU has fallen off the bus: drain the node and restart the machine",
        Code.ResetRequired: f"the GPU must be reset: {_RESET}",
        Code.OperatingSystem: "the operating system refuses access to the GPU, as after `systemctl "
        f"daemon-reload` on the host, which takes the devices from containers: {_RESTART}",
        Code.LibRmVersionMismatch: "the driver was upgraded under this process, and its library "
        f"does not fit the new kernel module: {_RESTART}",
        Code.InUse: "another program uses the GPU exclusively (profiling, or a change of its MIG "
        "layout): wait until that program ends",
        Code.GpuNotFound: "the driver does not list the GPU any more: see dmesg for XID errors",
        Code.Timeout: "the GPU did not answer in time: see dmesg for XID errors",
        Code.NotReady: "the driver is still starting",
        Code.Unknown: "the driver gives no cause; if it persists, the container has lost its "
        f"devices: {_RESTART}",
    }
)

NEEDS_RESTART: Final = frozenset(
    {Code.LibRmVersionMismatch, Code.Unknown, Code.OperatingSystem, Code.NoPermission}
)
"""Errors that only a new container fixes, if the GPU was readable before."""


def problem_of(error: NvmlError, what: str) -> Problem:
    """Describe a failed NVML call.

    Args:
        error: the NVML error.
        what: the operation that failed, such as `cannot start NVML`.
    """
    cause = _CAUSES.get(error.code, f"{error.call} failed: see dmesg for driver errors")
    return Problem(code=error.code.name, text=f"{what}: {error.text}: {cause}")


def hung_problem(call: str, seconds: float) -> Problem:
    """Describe a call that did not return within `seconds`."""
    return Problem(
        code=_HUNG,
        text=f"{call} did not return within {seconds:g} s: the driver hangs, as with a GPU that "
        "has fallen off the bus: see dmesg; if it persists, drain the node and restart the machine "
        "(a new container does not help)",
    )
