"""Define the extender's Prometheus metrics, with labels from small fixed sets only."""

from collections.abc import Iterable
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from extender.runtime.supervision import FAULTS

# rate() detects restarts without the `_created` series, which would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call] # has no types

_LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_NODE_BUCKETS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)

_PEER_STATES: Final = ("known", "answering")
_PEER_MESSAGES: Final = (
    ("sent", "taken"),
    ("sent", "failed"),
    ("received", "taken"),
    ("received", "refused"),
)


class Metrics:
    """Counters, gauges and histograms of the extender; their help texts describe them.

    Attributes:
        registry: the registry of these metrics, and of collectors of state.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_BackgroundFaults())
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "idlegpu_requests", "Answered requests of kube-scheduler.", ["verb", "outcome"]
        )
        self.latency = histogram(
            "idlegpu_request_duration_seconds",
            "Time to answer a request of kube-scheduler.",
            ["verb", "outcome"],
            buckets=_LATENCY_BUCKETS,
        )
        self.between_verbs = histogram(
            "idlegpu_between_verbs_seconds",
            "Time from the answer to filter until kube-scheduler sends prioritize.",
            buckets=_LATENCY_BUCKETS,
        )
        self.candidates = histogram(
            "idlegpu_candidates", "Candidate nodes in a request.", ["verb"], buckets=_NODE_BUCKETS
        )
        self.feasible = histogram(
            "idlegpu_feasible", "Nodes that passed filter.", buckets=_NODE_BUCKETS
        )
        self.rejections = counter("idlegpu_rejections", "Nodes refused by filter.", ["reason"])
        self.gpu_hours = counter(
            "idlegpu_gpu_hours",
            "Hours for which pods held GPUs, ended pods included, by idle and used. Shares and MIG "
            "instances count in part. Every replica counts all pods: use the maximum.",
            ["namespace", "owner_kind", "model", "use"],
        )
        held_by = ["namespace", "owner_kind", "model", "device"]
        self.held_gpus = gauge(
            "idlegpu_held_gpus",
            "GPUs (device: gpu) and MIG instances (mig) that pods hold, as of the last minute; a "
            "shared GPU counts for each of its pods.",
            held_by,
        )
        self.held_idle_gpus = gauge(
            "idlegpu_held_idle_gpus",
            "Idle GPUs and MIG instances that pods hold, as `idlegpu costs` counts them.",
            held_by,
        )
        self.held_hour_idle_gpus = gauge(
            "idlegpu_held_hour_idle_gpus",
            "GPUs and MIG instances that pods hold and that have been idle for an hour or longer.",
            held_by,
        )
        self.gpu_cost = counter(
            "idlegpu_gpu_cost",
            "Cost of the hours of `idlegpu_gpu_hours_total`, by the setting `prices`.",
            ["namespace", "owner_kind", "model", "use"],
        )
        self.faults = counter(
            "idlegpu_faults",
            "Internal errors of the extender; filter then passes every candidate.",
            ["verb"],
        )
        self.followed = counter(
            "idlegpu_bound_pods",
            "Bound pods about which idlegpu answered; the replica that answered last counts them.",
            ["choice"],
        )
        self.annotation_problems = counter(
            "idlegpu_annotation_problems", "Invalid annotations of pods.", ["annotation"]
        )
        self.bypassed = counter(
            "idlegpu_pods_bypassed",
            "GPU pods that were bound without idlegpu's answer: no replica got a request for them, "
            "the answer came too late, or kube-scheduler never requests scores.",
            ["scheduler", "reason"],
        )
        self.unjudged = counter(
            "idlegpu_pods_bound_unjudged",
            "Bound GPU pods for which a silent or lost replica may have received a request.",
        )
        self.peer_messages = counter(
            "idlegpu_peer_messages",
            "Messages in which replicas report their requests to each other.",
            ["direction", "outcome"],
        )
        self.peers = gauge(
            "idlegpu_peers",
            "Other replicas: known by their address, and those of them that answer.",
            ["state"],
        )
        # Without other replicas no other code creates these series.
        for state in _PEER_STATES:
            self.peers.labels(state)
        for direction, outcome in _PEER_MESSAGES:
            self.peer_messages.labels(direction, outcome)
        self.api_requests = counter(
            "idlegpu_api_requests",
            "Requests to the API and the page, by authentication outcome.",
            ["outcome"],
        )
        self.admissions = counter(
            "idlegpu_admissions", "Pods reviewed by the admission webhook, by outcome.", ["outcome"]
        )
        self.settings_reloads = counter(
            "idlegpu_settings_reloads",
            "Changes of the settings file that were applied, rejected as invalid, or "
            "changed nothing that is in force.",
            ["outcome"],
        )
        self.settings_loaded_at = gauge(
            "idlegpu_settings_loaded_timestamp_seconds",
            "Time of the last successful load of the settings.",
        )
        self.settings_restart_needed = gauge(
            "idlegpu_settings_restart_needed",
            "Settings that were changed in the file and wait for a restart.",
        )
        self.settings_file_bad = gauge(
            "idlegpu_settings_file_bad",
            "Whether the settings file is invalid; the previous settings then stay in force.",
        )


class _BackgroundFaults(Collector):
    """Exports the failure counts of background tasks."""

    @override
    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(
            "idlegpu_background_faults",
            "Failures of background tasks; each of these tasks was started again.",
            labels=["task"],
        )
        for task, count in FAULTS.items():
            family.add_metric([task], count)
        yield family
