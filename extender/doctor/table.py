"""Every check, by its code; no code is ever given to another check."""

from typing import Final

from extender.doctor.checks import (
    clocks,
    coverage,
    fields,
    hosts,
    layouts,
    neighbours,
    nodes,
    pods,
    replicas,
    schedulers,
    service,
    telemetry,
)
from extender.doctor.findings import Check

CHECKS: Final[tuple[Check, ...]] = (
    Check(
        code="IG001",
        title="kube-scheduler asks us",
        needs=("unasked|schedulers",),
        find=schedulers.not_asked,
    ),
    Check(
        code="IG002",
        title="our answers come in time",
        needs=("unasked|metrics",),
        find=schedulers.late,
    ),
    Check(
        code="IG003",
        title="kube-scheduler sends names of nodes alone",
        needs=("schedulers",),
        find=schedulers.whole_nodes,
    ),
    Check(
        code="IG004",
        title="our order and kube-scheduler's own wishes both count",
        needs=("schedulers",),
        find=schedulers.drowned,
    ),
    Check(
        code="IG005",
        title="kube-scheduler asks every verb",
        needs=("unasked|schedulers",),
        find=schedulers.verbs,
    ),
    Check(
        code="IG006",
        title="managedResources lists every GPU resource",
        needs=("unasked|schedulers", "nodes"),
        find=schedulers.unmanaged,
    ),
    Check(
        code="IG007",
        title="one scheduler places GPU pods on a node",
        needs=("pods",),
        find=neighbours.two_schedulers,
    ),
    Check(
        code="IG008",
        title="the autoscaler adds nodes for what waits",
        needs=("pods",),
        find=neighbours.no_new_nodes,
    ),
    Check(
        code="IG009",
        title="no extender is left with our shortlist alone",
        needs=("schedulers",),
        find=schedulers.shortened,
    ),
    Check(
        code="IG101",
        title="dcgm-exporter exports what decides",
        needs=("exporter|devices",),
        find=fields.not_exported,
    ),
    Check(
        code="IG102",
        title="series name nodes of the cluster",
        needs=("sources|metrics|exporter",),
        find=telemetry.unmatched,
    ),
    Check(
        code="IG103",
        title="readings are fresh when they arrive",
        needs=("metrics|pods",),
        find=telemetry.stale,
    ),
    Check(
        code="IG104",
        title="clocks agree",
        needs=("nodes",),
        find=clocks.skewed,
        unseen=clocks.untold,
    ),
    Check(
        code="IG105",
        title="every GPU node is measured",
        needs=("nodes", "pods"),
        find=coverage.unmeasured,
    ),
    Check(
        code="IG106",
        title="the extender reads its sources and settings",
        needs=("degraded",),
        find=coverage.degraded,
    ),
    Check(
        code="IG107",
        title="telemetry shows every GPU of a node",
        needs=("nodes", "devices|exporter"),
        find=coverage.unlike_telemetry,
    ),
    Check(
        code="IG201",
        title="nodes with GPUs offer them",
        needs=("nodes",),
        find=nodes.no_plugin,
    ),
    Check(
        code="IG202",
        title="GPUs are shared as labels say",
        needs=("nodes",),
        find=nodes.unlike_sharing,
    ),
    Check(
        code="IG203",
        title="nodes offer every GPU that they have",
        needs=("nodes",),
        find=nodes.not_offered,
    ),
    Check(
        code="IG204",
        title="the MPS control daemon runs",
        needs=("nodes", "pods"),
        find=nodes.dead_mps,
    ),
    Check(
        code="IG205",
        title="MIG layouts are those that are offered",
        needs=("nodes",),
        find=layouts.unlike_layout,
    ),
    Check(
        code="IG206",
        title="pods on time-sliced GPUs say how much memory they need",
        needs=("nodes", "pods"),
        find=nodes.no_memory_limits,
    ),
    Check(
        code="IG207",
        title="free GPUs have CPU and memory beside them",
        needs=("nodes", "pods"),
        find=hosts.filled,
    ),
    Check(
        code="IG301",
        title="drivers are new enough for the CUDA of pods",
        needs=("nodes", "pods"),
        find=pods.old_driver,
    ),
    Check(
        code="IG302",
        title="pods leave CUDA_VISIBLE_DEVICES alone",
        needs=("pods",),
        find=pods.set_by_hand,
    ),
    Check(
        code="IG303",
        title="models are spread over the GPUs that pods ask for",
        needs=("pods",),
        find=pods.unlike_parallel,
    ),
    Check(
        code="IG401",
        title="agents' reports are taken",
        needs=("metrics",),
        find=service.refused_agents,
    ),
    Check(
        code="IG402",
        title="certificates are good for a while",
        needs=("certificates",),
        find=service.ending,
    ),
    Check(
        code="IG403",
        title="the extender's account has its rights",
        needs=("rights",),
        find=service.lacking_rights,
    ),
    Check(
        code="IG404",
        title="the extender has time to take leave",
        needs=("pods", "settings"),
        find=replicas.short_grace,
    ),
    Check(
        code="IG405",
        title="replicas know of each other",
        needs=("pods", "settings"),
        find=replicas.strangers,
    ),
)
