"""One call of NVML: errors in the agent's words, and older calls for older drivers."""

from collections.abc import Callable
from typing import Any, Final

from agent.backend import Code, NvmlError

OLD_DRIVER: Final = frozenset(
    {Code.FunctionNotFound, Code.ArgumentVersionMismatch, Code.NotSupported, Code.Deprecated}
)
"""The driver, or the card, does not know the call: it never will, until it is replaced."""

_TYPE_FIELDS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Fields of NVML's union of values, by value type; the other fields hold garbage."""


class Library:
    """The library behind a name.

    Args:
        module: pynvml, or what stands in for it; it has no types.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._outdated: set[str] = set()
        self._unsupported: set[tuple[str, str]] = set()

    def forget(self) -> None:
        """Forget what the driver and its cards lacked: it may be another one now."""
        self._outdated.clear()
        self._unsupported.clear()

    def ask(self, name: str, *arguments: object) -> Any:
        """Make a call.

        Raises:
            NvmlError: it failed.
        """
        try:
            return getattr(self.module, name)(*arguments)
        except self.module.NVMLError as error:
            raise NvmlError(name, error.value, str(error)) from error
        except self.module.NVMLLibraryMismatchError as error:  # said of a driver before 510
            raise NvmlError(name, Code.FunctionNotFound, "Function Not Found") from error

    def ask_supported(self, name: str, uuid: str, *arguments: object) -> Any:
        """Make a call, unless the card has said that it does not know it; None where it does not.

        Args:
            name: the call.
            uuid: of the card.
            *arguments: of the call.

        Raises:
            NvmlError: it failed for another cause.
        """
        if (name, uuid) in self._unsupported:
            return None
        try:
            return self.ask(name, *arguments)
        except NvmlError as error:
            if error.code not in OLD_DRIVER:
                raise
        self._unsupported.add((name, uuid))
        return None

    def ask_newest(
        self, new: str, old: str, *arguments: object, since: tuple[int, ...] = ()
    ) -> Any:
        """Make the newer of two calls, or the older where the driver lacks that.

        Args:
            new: the newer call.
            old: the older; the same name where it is the same call with fewer arguments.
            *arguments: of both.
            since: further arguments of the newer one.

        Raises:
            NvmlError: it failed.
        """
        return self.newest(
            new,
            lambda: self.ask(new, *arguments, *since),
            lambda: self.ask(old, *arguments),
        )

    def newest(self, name: str, newer: Callable[[], Any], older: Callable[[], Any]) -> Any:
        """Ask in the newer of two ways, or in the older where the driver lacks that.

        Args:
            name: of the newer way; that the driver lacks it is remembered.
            newer: asks so.
            older: asks in the older way.

        Raises:
            NvmlError: it failed.
        """
        if name not in self._outdated:
            try:
                return newer()
            except NvmlError as error:
                if error.code not in OLD_DRIVER:
                    raise
                if error.code is Code.NotSupported:  # said of this card: another one may know it
                    return older()
        answer = older()
        self._outdated.add(name)
        return answer


def number(union: Any, value_type: int) -> float:
    """Return what a union of values holds."""
    return float(getattr(union, _TYPE_FIELDS[value_type]))


def text(value: Any) -> str:
    """Return text; older bindings say it in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
