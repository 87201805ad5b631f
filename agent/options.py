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
    """Settings of reports to the extender.

    Attributes:
        service: host:port of the headless Service of all replicas, "" for none.
        token_file: service-account token that authenticates the node; read for each connection.
        ca_file: CAs of the extender's certificate, "" for no TLS; read for each connection.
        server_name: name that the certificate must have, "" for the service's name.
        allow_plain: allow reports without TLS to other machines.
        heartbeat_seconds: interval of reports without news.
        utilization_step: change of activity that is reported at once, 0 to 1.
        memory_step: change of the share of memory in use that is reported at once, 0 to 1.
        resolve_seconds: interval of DNS look-ups of the service.
        timeout_seconds: time limit for opening a connection, and for sending an update.
        reconnect_seconds: longest delay before the first reconnect.
        max_backoff_seconds: longest delay between connection attempts after failures.
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
    """All settings of the agent.

    Attributes:
        host: address of /metrics, /healthz, /readyz and the report.
        port: their port.
        loads_host: address of the report that has only loads; "" to not serve it.
        loads_port: its port.
        node: name of the node.
        period_seconds: interval of passes.
        cadence: intervals of reads.
        call_seconds: time limit of an NVML call.
        liveness_seconds: time of unreadable GPUs after which /healthz fails.
        dcgm_names: also export the metrics of dcgm-exporter.
        kubelet_socket: socket of the pod-resources API, "" for none.
        proc: mount point of the host's /proc, "" for none.
        pod_logs: the kubelet's directory of pod logs, "" for none.
        verdict_policy: when a device is idle, and when it is unhealthy.
        foreign: limits above which unexplained use is foreign.
        reports: settings of reports to the extender.
        log_level: lowest level of log messages.
        log_format: format of log messages.
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
