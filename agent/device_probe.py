"""Finds the GPUs of this container: by the driver's library, else by what the kernel shows.

Never starts CUDA in this process: that would fix its devices and break a later fork.
"""

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.device_nvml import LIBRARY, DeviceNvmlError, nvml_cards
from agent.device_visible import Card, Instance

_ORDER_DEADLINE_SECONDS: Final = 10.0
"""CUDA takes up to seconds to start on a machine with many cards."""

_ASK_CUDA: Final = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
found = []
for ordinal in range(count.value):
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    assert cuda.cuDeviceGetUuid(ctypes.byref(uuid), device) == 0
    found.append(bytes(uuid).hex())
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a container's GPUs are looked for.

    Attributes:
        library: the driver's library.
        proc_gpus: the driver's list of GPUs; NVIDIA's runtime leaves those of the container.
        dev: holds `nvidia0`, `nvidia1` and so on.
    """

    library: str = LIBRARY
    proc_gpus: Path = Path("/proc/driver/nvidia/gpus")
    dev: Path = Path("/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found.

    Attributes:
        cards: in CUDA's order, as far as that is known.
        doubt: why the order may be another, "" where it is known.
    """

    cards: tuple[Card, ...]
    doubt: str = ""


def find_cards(
    environment: Mapping[str, str], *, machine: Machine, deadline_seconds: float
) -> Found:
    """Return the GPUs of this container, () where there are none.

    Args:
        environment: `CUDA_DEVICE_ORDER`, and what the container was given.
        machine: where to look.
        deadline_seconds: the driver's library is given up after so long; then nobody knows how
            busy they are.
    """
    cards = _by_library(machine.library, deadline_seconds)
    if cards is None:
        cards = _by_kernel(machine, environment)
    return _in_cudas_order(cards, environment)


def _by_library(library: str, deadline_seconds: float) -> tuple[Card, ...] | None:
    """Ask in a thread of its own: a call to a lost card may never return."""
    found: list[tuple[Card, ...]] = []

    def ask() -> None:
        with contextlib.suppress(DeviceNvmlError):
            found.append(nvml_cards(library))

    thread = threading.Thread(target=ask, name="nvml", daemon=True)
    thread.start()
    thread.join(deadline_seconds)
    return found[0] if found else None


def _by_kernel(machine: Machine, environment: Mapping[str, str]) -> tuple[Card, ...]:
    cards = tuple(_from_proc(machine.proc_gpus)) or tuple(_from_dev(machine.dev))
    given = environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    instances = [name.partition("::")[0] for name in given if name.startswith("MIG-")]
    if cards and instances:
        return (Card(uuid="", instances=tuple(Instance(uuid=uuid) for uuid in instances)),)
    return cards


def _from_proc(directory: Path) -> list[Card]:
    cards = []
    with contextlib.suppress(OSError):
        for entry in sorted(directory.iterdir()):  # named by PCI address, all of one length
            text = (entry / "information").read_text(encoding="utf-8", errors="replace")
            fields = {
                name.strip(): value.strip()
                for name, _, value in (line.partition(":") for line in text.splitlines())
            }
            minor = fields.get("Device Minor", "")
            cards.append(
                Card(
                    uuid=fields.get("GPU UUID", "")
                    if "?" not in fields.get("GPU UUID", "")
                    else "",
                    minor=int(minor) if minor.isdigit() else None,
                    model=fields.get("Model", ""),
                )
            )
    return cards


def _from_dev(directory: Path) -> list[Card]:
    with contextlib.suppress(OSError):
        names = (re.fullmatch(r"nvidia(\d+)", entry.name) for entry in directory.iterdir())
        return [Card(uuid="", minor=minor) for minor in sorted(int(one[1]) for one in names if one)]
    return []


def _in_cudas_order(cards: tuple[Card, ...], environment: Mapping[str, str]) -> Found:
    """Put cards of different models into CUDA's order, fastest first unless set otherwise.

    How CUDA ranks models is not documented, so CUDA is asked, in a process of its own. Cards of
    one model keep the order of their PCI addresses.
    """
    is_by_address = environment.get("CUDA_DEVICE_ORDER", "").strip() == "PCI_BUS_ID"
    if is_by_address or len({card.model for card in cards}) <= 1:
        return Found(cards=cards)
    order = _ask_cuda(environment)
    places = {uuid: place for place, uuid in enumerate(order)}
    if not all(_plain(card.uuid) in places for card in cards):
        return Found(
            cards=cards,
            doubt="models differ and CUDA cannot be asked for its order: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    return Found(cards=tuple(sorted(cards, key=lambda card: places[_plain(card.uuid)])))


def _plain(uuid: str) -> str:
    return uuid.partition("-")[2].replace("-", "").lower()


def _ask_cuda(environment: Mapping[str, str]) -> Sequence[str]:
    hidden = {"CUDA_VISIBLE_DEVICES"}  # it selects from the order that is asked for
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ASK_CUDA],
            env={name: value for name, value in environment.items() if name not in hidden},
            capture_output=True,
            text=True,
            timeout=_ORDER_DEADLINE_SECONDS,
            check=True,
        )
        answer = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    return [str(uuid) for uuid in answer]
