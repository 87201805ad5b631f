"""Bytes that an agent sends on a connection, recorded for each release with their meaning.

`python -m tests.contract.reports` records this checkout's agent under its version.
"""

import asyncio
import json
import math
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from agent.push.updates import Digest, UpdateBuilder
from agent.report.contract import (
    LENGTH_BYTES,
    Device,
    Foreign,
    Place,
    Problem,
    Process,
    Report,
    Tenant,
    Verdict,
    decode_update,
    encode,
    frame,
)
from extender.core.policy import Foreign as ForeignPolicy
from extender.sources.agents.states import AgentState, readings_of
from tests.contract.handshake import handshake

ROOT: Final = Path(__file__).parents[2]
RECORDINGS: Final = ROOT / "tests" / "data" / "reports"
STREAM: Final = "stream.bin"
MEANING: Final = "meaning.json"
REPORT: Final = "report.json"

NODE: Final = "gpu-7"
STARTED_AT: Final = 1_700_000_000.0
GIB: Final = float(1 << 30)
TRAIN: Final = Tenant(namespace="team-a", pod="train-0", container="main", uid="uid-0")
PYTHON: Final = Process(
    pid=4242,
    name="python",
    memory_bytes=int(20 * GIB),
    utilization_ratio=0.75,
    place=Place.POD,
    uid="uid-0",
    namespace="team-a",
    pod="train-0",
    container="main",
)
STRANGER: Final = Process(
    pid=7,
    name="python3",
    memory_bytes=int(5 * GIB),
    place=Place.HOST,
    container="session-3.scope",
    started_at=STARTED_AT - 3600.0,
)
SIGNALS: Final = {
    "gpu_utilization_ratio": (0.75, 0.0),
    "memory_total_bytes": (80 * GIB, 80 * GIB),
    "memory_used_bytes": (20 * GIB, 1 * GIB),
    "power_watts": (450.5, None),
    "xid": (None, None),
}


def project_version() -> str:
    """Return the version of this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return str(project["project"]["version"])


def _report(sequence: int, devices: Sequence[Device], **changes: Any) -> Report:
    at = STARTED_AT + 10.0 * sequence
    return Report(
        **{
            "node": NODE,
            "agent_version": project_version(),
            "started_at": STARTED_AT,
            "sequence": sequence,
            "at": at,
            "driver_version": "580.95.05",
            "devices": tuple(devices),
            "signals": SIGNALS,
            **changes,
        }
    )


def reports() -> list[Report]:
    """Return reports that together use every field."""
    held = Device(
        uuid="GPU-aaaa",
        index=0,
        model="NVIDIA H100 80GB HBM3",
        pci_bus_id="00000000:1A:00.0",
        numa_node=0,
        nvlink_peers=("switch",),
        activity_source="gpm",
        age_seconds=0.25,
        allocated_to=(TRAIN,),
        used_by=(PYTHON,),
        foreign=Foreign(),
        verdict=Verdict(is_idle=False, reason="75 % busy"),
    )
    free = Device(
        uuid="GPU-bbbb",
        index=1,
        model="NVIDIA H100 80GB HBM3",
        age_seconds=0.5,
        allocated_to=(),
        used_by=(STRANGER,),
        foreign=Foreign(memory_bytes=int(5 * GIB), utilization_ratio=0.5, pids=(7,)),
    )
    broken = Device(
        uuid="GPU-bbbb",
        index=1,
        model="NVIDIA H100 80GB HBM3",
        age_seconds=9.0,
        xid_age_seconds=2.0,
        allocated_to=(),
        verdict=Verdict(action="exclude", cause="xid 79"),
        problem=Problem(code="GpuIsLost", text="cannot read GPU-bbbb: GPU is lost"),
    )
    instances = [
        Device(
            uuid="GPU-aaaa",
            gpu_instance_id=number,
            mig_uuids=(f"MIG-{number}",),
            mig_profile="3g.40gb",
            index=0,
            model="NVIDIA H100 80GB HBM3",
            age_seconds=0.25,
            replicas=3,
        )
        for number in ("1", "2")
    ]
    return [
        _report(1, [held, free]),
        _report(2, [held, free]),
        _report(3, [held, broken], signals={**SIGNALS, "xid": (None, 79.0)}),
        _report(4, instances),
        _report(
            5,
            instances,
            signals={},
            problem=Problem(code="DriverNotLoaded", text="cannot start NVML: Driver Not Loaded"),
        ),
    ]


def stream() -> bytes:
    """Return the bytes in which this checkout's agent sends these reports on one connection."""
    updates = UpdateBuilder()
    key = ("GPU-aaaa", "")
    said = b""
    for number, report in enumerate(reports()):
        digest = Digest(totals={key: (10 + 10 * number, 5.0 + 2 * number, 4.0 + number)})
        sent_at = report.at + 0.125
        said += frame(updates.build(report, digest, is_news=number == 2, sent_at=sent_at))
    return said


def frames(content: bytes) -> Iterator[bytes]:
    """Yield the messages of a stream, without their length prefixes."""
    while content:
        length = int.from_bytes(content[:LENGTH_BYTES], "big")
        yield content[LENGTH_BYTES : LENGTH_BYTES + length]
        content = content[LENGTH_BYTES + length :]


def meaning(messages: Iterator[bytes]) -> list[dict[str, object]]:
    """Return the extender's state after each message, as readings."""
    state = AgentState(NODE)
    states = []
    for message in messages:
        state.is_news = False
        update = decode_update(message)
        state.apply(update, update.sent_at + 100.0)  # the extender has another clock
        readings = readings_of([state], ForeignPolicy(), state.at)
        own = readings.own
        assert own is not None
        states.append(
            {
                "at": state.at,
                "is_news": bool(own.news),
                "devices": [asdict(info) for info in readings.devices],
                "columns": {
                    signal.value: column.tolist() for signal, column in readings.columns.items()
                },
                "measured_at": readings.measured_at.tolist(),
                "holders": asdict(own.holders[NODE])["pods"] if own.holders[NODE] else None,
                "uids": dict(state.uids),
                "mean": own.mean.tolist(),
                "mean_square": own.mean_square.tolist(),
                "is_foreign": own.is_foreign.tolist(),
                "xid_age": own.xid_age.tolist(),
                "replicas": own.replicas.get(NODE),
                "foreign": {
                    key: [asdict(one) for one in processes]
                    for key, processes in state.foreign.items()
                },
            }
        )
    return [plain(one) for one in states]


def plain(value: Any) -> Any:
    """Return a value as JSON types: NaN as null, keys as text."""
    if isinstance(value, dict):
        return {
            "/".join(key) if isinstance(key, tuple) else key: plain(each)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def rest_report() -> bytes:
    """Return the first report in the form of `GET /v1/report` and `--json`."""
    return encode(reports()[0])


def main() -> int:
    """Record the bytes of this checkout's agent and extender."""
    folder = RECORDINGS / project_version()
    folder.mkdir(parents=True, exist_ok=True)
    content = stream()
    (folder / STREAM).write_bytes(content)
    text = json.dumps(meaning(frames(content)), indent=1)
    (folder / MEANING).write_text(f"{text}\n")
    (folder / REPORT).write_bytes(rest_report() + b"\n")
    with tempfile.TemporaryDirectory() as name:
        for file, said in asyncio.run(handshake(Path(name))).items():
            (folder / file).write_bytes(said)
    sys.stdout.write(f"recorded {folder.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
