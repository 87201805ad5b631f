"""The agent's settings as frozen data, validated and small.

`agent.config` builds them from files and environment variables in another process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from agent.gpu.session import Cadence
from agent.report.verdict import VerdictPolicy
from agent.tenants.foreign import Threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Settings of reports to the extender, as `agent.config` describes them; "" for none.

    Attributes:
        utilization_step: ratio, 0 to 1.
        memory_step: ratio, 0 to 1.
    """

    service: str = ""
    token_file: str = "/var/run/secrets/idlegpu/token"  # noqa: S105 - a path, not a secret
    ca_file: str = ""
    server_name: str = ""
    allow_plain: bool = False
    heartbeat_seconds: float = 10.0
    utilization_step: float = 0.20
    memory_step: float = 0.05
    resolve_seconds: float = 5.0
    timeout_seconds: float = 30.0
    reconnect_seconds: float = 5.0
    max_backoff_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All settings of the agent, as `agent.config` describes them; "" for none.

    Attributes:
        host: host of `listen`.
        port: port of `listen`.
        loads_host: host of `loads_listen`.
        loads_port: port of `loads_listen`.
        cadence: intervals of reads.
        verdict_policy: when a device is idle, and when it is unhealthy.
    """

    host: str = "127.0.0.1"
    port: int = 9402
    loads_host: str = ""
    loads_port: int = 0
    node: str = ""
    period_seconds: float = 1.0
    cadence: Cadence = field(default_factory=Cadence)
    call_seconds: float = 5.0
    liveness_seconds: float = 60.0
    dcgm_names: bool = False
    kubelet_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    proc: str = "/proc"
    pod_logs: str = "/var/log/pods"
    verdict_policy: VerdictPolicy = field(default_factory=VerdictPolicy)
    foreign: Threshold = field(default_factory=Threshold)
    reports: ReportOptions = field(default_factory=ReportOptions)
    log_level: str = "info"
    log_format: str = "json"

    @property
    def stale_seconds(self) -> float:
        """Age in seconds from which a reading is stale and not exported.

        Three passes, one of them delayed by a hung call.
        """
        return 3 * self.period_seconds + self.call_seconds


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"cannot encode a {type(value).__name__} as a setting")


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_plain)
_DECODER: Final = msgspec.json.Decoder(Options)


def encode(options: Options) -> bytes:
    """Encode options for another process of this program."""
    return _ENCODER.encode(options)


def decode(content: bytes) -> Options:
    """Decode the output of `encode`."""
    return _DECODER.decode(content)
