"""Rows of Grafana's dashboard, the most urgent ones first.

Only the last row has panels with a series for each GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from tests.dashboard.panels import (
    BAD,
    GREEN,
    HELD,
    HERE,
    IS_UP,
    LONG,
    MODEL,
    NODE,
    NONE_LEFT,
    PLAIN,
    RATE,
    SLOW,
    WARN,
    Panel,
    graph,
    heat,
    hours,
    mean,
    once,
    quantile,
    rate,
    stat,
    table,
    timeline,
)

WAITS: Final = "resource, model, size, refused_by"
POOL: Final = "pool, resource, model"
WAITING: Final = once("idlegpu_unplaced_pods", "", HELD, labels=f"namespace, {WAITS}")
ACTIVE: Final = "idlegpu_agent_graphics_active_ratio"
USED: Final = "idlegpu_agent_gpu_utilization_ratio"


def held(kind: str, by: str) -> str:
    """Return a query for the GPUs and MIG instances that pods hold, by namespace or in total."""
    labels = f"{'' if by else 'namespace, '}owner_kind, model, device"
    return once(f"idlegpu_held_{kind}gpus", by, HELD, labels=labels)


ROWS: Final[Mapping[str, Sequence[Panel]]] = {
    "Now": (
        stat("Idle GPUs", "GPUs that a pod could get now, MIG instances included.",
             once("idlegpu_pool_idle_gpus", "", MODEL, labels=POOL), NONE_LEFT),
        stat("Held idle", "Idle GPUs that pods hold, MIG instances included.",
             held("idle_", "") + " or vector(0)", WARN),
        stat("GPU-hours wasted in a day", "Hours of idle GPUs that pods held, ended pods included.",
             hours("idle", "", "1d") + " or vector(0)", ((None, GREEN), (24, "orange"))),
        stat("Waiting pods", "Pods for which kube-scheduler found no node.",
             f"{WAITING} or vector(0)", WARN),
        stat("Longest wait", "Age of the oldest of these pods.",
             f"max(idlegpu_unplaced_longest_seconds{{{HELD}}}) or vector(0)", LONG, "s"),
        stat("Unhealthy GPUs", "GPUs that no pod gets because they cannot work.",
             once("idlegpu_devices", "", f'{HERE}, state="unhealthy"', labels="state"), BAD),
        table("Idle now, by pool and model", "GPUs that a pod could get now, idle GPUs whose nodes "
              "lack CPU, memory or storage for them, and all GPUs.",
              {
                  "Idle": once("idlegpu_pool_idle_gpus", POOL, MODEL),
                  "Stranded": once("idlegpu_pool_stranded_gpus", POOL, MODEL),
                  "All": once("idlegpu_pool_gpus", POOL, MODEL),
              },
              first="Idle", colors={"Idle": ("none", NONE_LEFT)}),
        graph("GPUs by state", "As the replica that knows most of each sees them.",
              {"{{state}}": once("idlegpu_devices", "state")}, stacked=True, width=12),
    ),
    "Held idle and wasted": (
        table("By namespace", "GPUs and MIG instances held now, and GPU-hours in the dashboard's "
              "time range.",
              {
                  "Held": held("", "namespace"),
                  "Idle": held("idle_", "namespace"),
                  "Idle for 1 h": held("hour_idle_", "namespace"),
                  "GPU-hours used": hours("used", "namespace"),
                  "GPU-hours wasted": hours("idle", "namespace"),
              },
              first="GPU-hours wasted",
              colors={
                  "Idle": ("none", WARN),
                  "Idle for 1 h": ("none", BAD),
                  "GPU-hours used": ("none", PLAIN),
                  "GPU-hours wasted": ("none", ((None, GREEN), (24, "orange"))),
              }),
        graph("Held idle, by namespace", "The ten namespaces that hold most idle GPUs.",
              {"{{namespace}}": f"topk(10, {held('idle_', 'namespace')})"}, stacked=True, width=12),
    ),
    "Who waits for what, and how long": (
        table("Waiting pods",
              "size: GPUs of each pod. refused_by idlegpu: it refused nodes that have room.",
              {
                  "Pods": once("idlegpu_unplaced_pods", f"namespace, {WAITS}", HELD),
                  "Longest wait": f"max by (namespace, {WAITS}) "
                                  f"(idlegpu_unplaced_longest_seconds{{{HELD}}})",
              },
              first="Longest wait", colors={"Longest wait": ("s", LONG)}),
        graph("Longest wait, by namespace", "The ten namespaces with the longest wait.",
              {"{{namespace}}": "topk(10, max by (namespace) "
                                f"(idlegpu_unplaced_longest_seconds{{{HELD}}}))"},
              unit="s", steps=LONG, width=12),
    ),
    "Unhealthy GPUs": (
        table("By reason", "GPUs that no pod gets because they cannot work.",
              {"GPUs": once("idlegpu_unhealthy_gpus", "reason")},
              first="GPUs", colors={"GPUs": ("none", BAD)}, width=8),
        graph("By reason, over time", "A reason that returns calls for another card.",
              {"{{reason}}": once("idlegpu_unhealthy_gpus", "reason")}, stacked=True),
        timeline("Which GPUs",
                 "GPUs with ill health, by their agents, at most 20; those with a penalty work, "
                 "and count less.",
                 {"{{node}} GPU {{gpu}}: {{action}}":
                      "topk(20, max by (node, gpu, action) "
                      f"(idlegpu_agent_device_unhealthy{{{NODE}}}))"},
                 ((None, "red"),)),
    ),
    "Placement quality": (
        heat("Activity of the GPUs that pods got",
             "How busy the GPUs were in the hour after the binding (regret.after_seconds): "
             "dark near 0 is good.",
             "idlegpu_placement_activity", f'{HERE}, gpus="got"', "percentunit"),
        graph("Mean activity", "Of the GPUs that pods got, of the first choice, of the best node.",
              {"{{gpus}}": mean("idlegpu_placement_activity", "gpus", HERE)}, unit="percentunit"),
        heat("Regret", "By how much the GPUs that pods got were busier than the best ones.",
             "idlegpu_placement_regret", f'{HERE}, against="best"', "percentunit"),
        graph("Pods bound", "By whether kube-scheduler took the first choice, and bypassed pods.",
              {
                  "{{choice}}": rate("idlegpu_bound_pods_total", "choice", over="increase"),
                  "bypassed: {{reason}}":
                      rate("idlegpu_pods_bypassed_total", "reason", over="increase"),
                  "not known": f"sum(increase(idlegpu_pods_bound_unjudged_total{{{HERE}}}{RATE}))",
              }),
        graph("Nodes refused", "By reason.",
              {"{{reason}}": rate("idlegpu_rejections_total", "reason")}),
        graph("Candidate nodes, and feasible nodes", "Median of each request.",
              {
                  "{{verb}}: candidates": quantile(0.5, "idlegpu_candidates", "verb"),
                  "feasible": quantile(0.5, "idlegpu_feasible", ""),
              }),
    ),
    "The extender's health": (
        graph("Time to answer", "kube-scheduler gives up after its httpTimeout (1 s).",
              {
                  "{{verb}} median": quantile(0.5, "idlegpu_request_duration_seconds", "verb"),
                  "{{verb}} p99": quantile(0.99, "idlegpu_request_duration_seconds", "verb"),
              }, unit="s", steps=SLOW),
        graph("Requests per second", "By verb and outcome; look into any outcome but ok.",
              {"{{verb}} {{outcome}}": rate("idlegpu_requests_total", "verb, outcome")},
              unit="reqps"),
        timeline("Sources", "Green while the source's last answer was valid.",
                 {"{{source}}": f"min by (source) (idlegpu_source_up{{{HERE}}})"}, IS_UP),
        graph("Age of telemetry", "Time since the GPUs were measured.",
              {"{{source}} {{stat}}":
                   f"max by (source, stat) (idlegpu_telemetry_age_seconds{{{HERE}}})"},
              unit="s", steps=((None, GREEN), (300, "red"))),
        graph("Trouble with sources", "Failed attempts and queries, incomplete answers, restarts.",
              {
                  "{{source}} failures":
                      rate("idlegpu_source_failures_total", "source", over="increase"),
                  "{{source}} failed queries":
                      f"max by (source) (idlegpu_source_failed_queries{{{HERE}}})",
                  "{{source}} partial answers":
                      rate("idlegpu_source_partial_answers_total", "source", over="increase"),
                  "{{source}} worker restarts":
                      rate("idlegpu_source_worker_restarts_total", "source", over="increase"),
                  "{{source}} age, s": f"max by (source) (idlegpu_source_age_seconds{{{HERE}}})",
                  "{{source}} unmatched series":
                      f"max by (source) (idlegpu_unmatched_series{{{HERE}}})",
                  "{{source}} disagreeing GPUs":
                      f"max by (source) (idlegpu_signal_disagreements{{{HERE}}})",
              }),
        graph("Faults and problems",
              "Faults of the extender, unusable annotations, events that were not written.",
              {
                  "fault in {{verb}}": rate("idlegpu_faults_total", "verb", over="increase"),
                  "{{annotation}}":
                      rate("idlegpu_annotation_problems_total", "annotation", over="increase"),
                  "events dropped": f"sum(increase(idlegpu_events_dropped_total{{{HERE}}}{RATE}))",
              }),
        graph("Nodes and pods", "Assumed pods count although their binding is not seen yet.",
              {
                  "nodes": once("idlegpu_nodes", ""),
                  "GPU pods": once("idlegpu_gpu_pods", ""),
                  "assumed pods": once("idlegpu_assumed_pods", ""),
              }),
        graph("Replicas", "Known and answering, as each replica sees it; messages.",
              {
                  "{{instance}} {{state}}": f"idlegpu_peers{{{HERE}}}",
                  "{{direction}} {{outcome}} a second":
                      rate("idlegpu_peer_messages_total", "direction, outcome"),
              }),
        graph("Settings", "Changes of the file, settings that wait for a restart, bad files.",
              {
                  "{{outcome}}": rate("idlegpu_settings_reloads_total", "outcome", over="increase"),
                  "wait for a restart": f"max(idlegpu_settings_restart_needed{{{HERE}}})",
                  "replicas with a bad file": f"sum(idlegpu_settings_file_bad{{{HERE}}})",
                  "age, s": f"time() - min(idlegpu_settings_loaded_timestamp_seconds{{{HERE}}})",
              }),
    ),
    "GPUs of the chosen nodes, by their agents": (
        graph("Utilization", "The 20 busiest GPUs.",
              {"{{node}} {{uuid}}": f"topk(20, max by (node, uuid) ({ACTIVE}{{{NODE}}} or "
                                    f"{USED}{{{NODE}}}))"}, unit="percentunit"),
        graph("Memory in use", "The 20 GPUs with most memory in use.",
              {"{{node}} {{uuid}}": "topk(20, max by (node, uuid) "
                                    f"(idlegpu_agent_memory_used_bytes{{{NODE}}}))"}, unit="bytes"),
        graph("Memory that no pod accounts for", "Processes outside Kubernetes, leaks.",
              {"{{node}} {{uuid}}": "topk(20, max by (node, uuid) "
                                    f"(idlegpu_agent_foreign_memory_bytes{{{NODE}}}))"},
              unit="bytes"),
        graph("Idle GPUs", "The 20 nodes with most.",
              {"{{node}}": f"topk(20, sum by (node) (idlegpu_agent_device_idle{{{NODE}}}))"}),
        graph("XID errors", "Since the agent started, the 20 most frequent.",
              {"{{node}} XID {{xid}}":
                   f"topk(20, sum by (node, xid) (idlegpu_agent_xid_errors_total{{{NODE}}}))"}),
        graph("Agents", "Slowest passes over the GPUs, agents that cannot read theirs, hung calls.",
              {
                  "{{node}} pass, s":
                      f"topk(20, {rate('idlegpu_agent_pass_seconds_total', 'node', where=NODE)}"
                      f" / {rate('idlegpu_agent_passes_total', 'node', where=NODE)})",
                  "cannot read: {{problem}}":
                      f"sum by (problem) (idlegpu_agent_reads_gpus{{{NODE}}} == bool 0)",
                  "{{node}} hung {{call}}": "topk(20, " + rate(
                      "idlegpu_agent_hung_calls_total", "node, call", over="increase", where=NODE
                  ) + ")",
              }),
    ),
}  # fmt: skip
"""Panels by title of their row, in order; the last row is collapsed."""
