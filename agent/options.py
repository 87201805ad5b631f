"""What the settings say, as the running agent takes it: frozen, checked, and small.

`agent.config` makes it of files and variables, in a process of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from agent.foreign import Threshold
from agent.session import Cadence
from agent.verdict import Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """How the extender is told.

    Attributes:
        service: host:port of all its replicas, "" for none.
        token_file: what proves who we are; read anew for each connection.
        ca_file: CAs that the extender's certificate may be of, "" for no TLS; read anew for each
            connection.
        server_name: that the certificate must have, "" for the service's.
        allow_plain: send without TLS to other machines, too.
        heartbeat_seconds: where nothing changes, that is told so often.
        utilization_step: a change of activity by so much is told at once, 0 to 1.
        memory_step: so is a change of memory in use by this share of it.
        resolve_seconds: the service's addresses are looked up so often.
        timeout_seconds: limit for a connection to be granted, and for an update to leave.
        reconnect_seconds: the first new try comes within so long.
        max_backoff_seconds: longest wait before the next one after failures.
    """

    service: str = ""
    token_file: str = "/var/run/secrets/idlegpu/token"  # noqa: S105 - where it is, not what it is
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
    """Every setting.

    Attributes:
        host: address that /metrics, /healthz and the report are served on.
        port: likewise.
        loads_host: address that the loads alone are served on, "" for nowhere.
        loads_port: likewise.
        node: name of the node.
        period_seconds: between two passes.
        cadence: how often what is read in a pass.
        call_seconds: a call of NVML that takes longer is given up.
        hung_calls: so many may be given up at once.
        liveness_seconds: /healthz fails once nothing could be read for so long.
        dcgm_names: export the metrics of dcgm-exporter, too.
        kubelet_socket: of the pod-resources API, "" for none.
        proc: where the machine's processes are seen, "" for nowhere.
        pod_logs: directory that names the machine's pods, "" for none.
        judgement: when a device is idle, and when it is ill.
        foreign: from where on use that no pod accounts for is foreign.
        reports: how the extender is told.
        log_level: least level written.
        log_format: for whom lines are.
    """

    host: str = "127.0.0.1"
    port: int = 9402
    loads_host: str = ""
    loads_port: int = 0
    node: str = ""
    period_seconds: float = 1.0
    cadence: Cadence = field(default_factory=Cadence)
    call_seconds: float = 5.0
    hung_calls: int = 3
    liveness_seconds: float = 60.0
    dcgm_names: bool = False
    kubelet_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    proc: str = "/proc"
    pod_logs: str = "/var/log/pods"
    judgement: Judgement = field(default_factory=Judgement)
    foreign: Threshold = field(default_factory=Threshold)
    reports: ReportOptions = field(default_factory=ReportOptions)
    log_level: str = "info"
    log_format: str = "json"

    @property
    def stale_seconds(self) -> float:
        """So long after it was made a reading is not exported any more.

        That is some passes, one of them held up by a call that hangs.
        """
        return 3 * self.period_seconds + self.call_seconds


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} is no setting")


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_plain)
_DECODER: Final = msgspec.json.Decoder(Options)


def encode(options: Options) -> bytes:
    """Write options for another process of this program."""
    return _ENCODER.encode(options)


def decode(content: bytes) -> Options:
    """Read what `encode` wrote."""
    return _DECODER.decode(content)
