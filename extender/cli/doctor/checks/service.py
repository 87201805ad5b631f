"""Check the extender itself: agents, certificates, rights, replicas, and clocks."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from extender.cli.doctor.facts import (
    AGENT_WORDS,
    Facts,
    Object,
    Right,
    condition_of,
    containers,
    environment_of,
    is_called,
    is_running,
    key_of,
    labels_of,
    live_pods,
    name_of,
    number_setting,
    parse_time,
    setting,
    some,
    total,
)
from extender.cli.doctor.findings import Problem, Severity, check
from extender.core.untyped import mapping_of, objects_of, text_of

_EVERYDAY: Final = frozenset({"replaced", "closing", "busy"})
"""Reasons of refusals that also occur in a healthy system."""

_DAY: Final = 86_400.0
_WARN_DAYS: Final = 30.0
"""A weekly Job renews certificates 60 days before they expire; at 30 days it has failed four
times."""
_ERROR_DAYS: Final = 7.0

_REMEDIES: Final = {
    "wrong-audience": "agents.audience in the extender's settings and the audience of the agents' "
    "token (volumes of the DaemonSet idlegpu-agent) must be the same",
    "wrong-account": "agents: {service_accounts: [idlegpu-agent/idlegpu-agent]} in the extender's "
    "settings",
    "not-reviewed": "kubectl apply -k manifests/rbac: the right to create tokenreviews",
    "wrong-node": "kubectl -n idlegpu-agent rollout restart daemonset idlegpu-agent",
    "bad-report": "agents and extender of one version: images in your overlay",
}


@check("IG401", "the extender accepts the agents' reports", needs=("metrics",))
def _refused_agents(facts: Facts) -> Iterator[Problem]:
    """Find agents whose reports the extender refuses.

    Info only if all running agents report by now, because counts start with the extender.

    Remedy: the finding shows the remedy for each reason.
    """
    counts = _refusals(facts)
    unknown = total(facts.metrics, "idlegpu_agent_unknown_nodes")
    if not counts and not unknown:
        return
    reporting = total(facts.metrics, "idlegpu_agents")
    agents = sum(is_called(pod, AGENT_WORDS) and is_running(pod) for pod in facts.pods or ())
    # The counters start with the extender: if all agents report now, the problem is solved.
    is_over = bool(agents) and reporting >= agents and not unknown
    evidence = [
        f"{reason}: {count:g} since the extender's start" for reason, count in counts.items()
    ]
    if unknown:
        evidence.append(f"{unknown:g} agents are on nodes that the API server does not know")
    evidence.append(f"{reporting:g} agents report" + (f", {agents} run" if agents else ""))
    remedies = [_REMEDIES[reason] for reason in counts if reason in _REMEDIES]
    yield Problem(
        severity=Severity.INFO if is_over else Severity.ERROR,
        what="agents were refused; all report now" if is_over else "agents are refused",
        evidence=tuple(evidence),
        remedy="; ".join(remedies)
        or "kubectl -n idlegpu logs deploy/idlegpu-extender | grep 'agent refused' shows why",
    )


def _refusals(facts: Facts) -> dict[str, float]:
    """Return the number of refused agent connections by reason, without normal reasons."""
    reasons = {
        sample.labels.get("reason", "")
        for sample in facts.metrics or ()
        if sample.name == "idlegpu_agent_refusals_total"
    }
    counts = {
        reason: total(facts.metrics, "idlegpu_agent_refusals_total", reason=reason)
        for reason in sorted(reasons - _EVERYDAY)
    }
    return {reason: count for reason, count in counts.items() if count}


@check("IG402", "certificates do not expire soon", needs=("certificates",))
def _ending(facts: Facts) -> Iterator[Problem]:
    """Find certificates that expire in less than 30 days.

    Less than 7 days is an error. Sources are Secrets, files, and
    `idlegpu_certificate_end_timestamp_seconds`, which the alert `IdlegpuCertificateEnds` uses too.

    Remedy: run the Job that renews certificates.
    """
    by_severity: defaultdict[Severity, list[str]] = defaultdict(list)
    for one in sorted(facts.certificates or (), key=lambda one: one.ends_at):
        days = (one.ends_at - facts.at) / _DAY
        if days >= _WARN_DAYS:
            continue
        severity = Severity.ERROR if days < _ERROR_DAYS else Severity.WARNING
        end = datetime.fromtimestamp(one.ends_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        when = f"ends in {days:.0f} days" if days > 0 else "has ended"
        subject = f" ({one.subject})" if one.subject else ""
        by_severity[severity].append(f"{one.source}{subject}: {when}, {end}")
    for severity, lines in by_severity.items():
        yield Problem(
            severity=severity,
            what="certificates expire soon: kube-scheduler will no longer connect to the extender",
            evidence=tuple(lines),
            remedy="kubectl -n idlegpu create job --from=cronjob/idlegpu-certs certs-now, and "
            "run scheduler-config/control-plane.sh on the control plane's nodes",
        )


@check("IG403", "the extender's account has its rights", needs=("rights",))
def _lacking_rights(facts: Facts) -> Iterator[Problem]:
    """Find RBAC rights that the extender's account lacks.

    It needs the rights of `manifests/rbac`, and by its settings those of `wake-nodes`, `wake-pods`
    and `group-sizes`. The API server states the account's rights; offline, the RBAC objects do.

    Remedy: apply the folder that the finding names with `kubectl apply -k`.
    """
    by_manifest: defaultdict[str, list[Right]] = defaultdict(list)
    for right in facts.rights or ():
        if not right.is_allowed:
            by_manifest[right.manifest].append(right)
    for manifest, rights in sorted(by_manifest.items()):
        yield Problem(
            severity=Severity.ERROR,
            what="the extender's account lacks rights",
            evidence=tuple(f"{right.account} may not {_describe(right)}" for right in rights),
            remedy=f"kubectl apply -k {manifest}",
        )


def _describe(right: Right) -> str:
    resource = f"{right.resource}.{right.group}" if right.group else right.resource
    name = f" {right.name}" if right.name else ""
    where = f"in {right.namespace}" if right.namespace else "in the whole cluster"
    return f"{right.verb} {resource}{name} {where}"


_SKEW_SECONDS: Final = 10.0
"""Largest accepted difference. NTP keeps clocks far closer; API timestamps are whole seconds."""


def _unknown(facts: Facts) -> str:
    """Return the nodes whose clocks cannot be checked, "" if there are none.

    kubectl omits the required managedFields unless `--show-managed-fields` is given.
    """
    beating = [node for node in facts.nodes or () if _beat(node) is not None]
    silent = [name_of(node) for node in beating if _noted(node) is None]
    if not silent:
        return ""
    return (
        f"nodes: {len(silent)} of {len(beating)} lack the time at which the API server recorded "
        f"their heartbeat ({some(silent)}): kubectl get nodes -o json --show-managed-fields"
    )


@check("IG104", "clocks agree", needs=("nodes",), unseen=_unknown)
def _skewed(facts: Facts) -> Iterator[Problem]:
    """Find clocks that differ by more than 10 s.

    The time in a kubelet's heartbeat is compared with the time at which the API server recorded it,
    and the extender's clock with this machine's. Without `managedFields`, which kubectl omits by
    default, the check cannot run.

    Remedy: synchronize the clocks with NTP.
    """
    evidence = []
    for node in facts.nodes or ():
        skew = _skew(node, facts.at)
        if skew is not None and abs(skew) > _SKEW_SECONDS:
            evidence.append(
                f"{name_of(node)}: {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
            )
    if evidence:
        yield Problem(
            severity=Severity.ERROR,
            what="clocks of nodes differ from the API server's: ages of readings are wrong there",
            evidence=tuple(evidence),
            remedy="on the node: timedatectl set-ntp true && chronyc makestep",
        )
    skew = (facts.extender_at or facts.at) - facts.at
    if abs(skew) > _SKEW_SECONDS:
        yield Problem(
            severity=Severity.WARNING,
            what="the extender's clock differs from this machine's: one of them is wrong",
            evidence=(
                f"the extender is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} here",
            ),
            remedy="on the one that is wrong: timedatectl set-ntp true && chronyc makestep",
        )


def _skew(node: Object, at: float) -> float | None:
    """Return the seconds by which a node's clock is ahead of the API server's, None if unknown.

    The kubelet writes its heartbeat with its own clock, and the API server records the time of that
    write. Without that record, only a heartbeat in the future shows a difference.
    """
    beat, written = _beat(node), _noted(node)
    if beat is None:
        return None
    if written is not None:
        return beat - written
    return beat - at if beat > at else None


def _beat(node: Object) -> float | None:
    """Return the time of a kubelet's last heartbeat, by the kubelet's clock."""
    return parse_time(condition_of(node, "Ready").get("lastHeartbeatTime"))


def _noted(node: Object) -> float | None:
    """Return the time at which the API server recorded the heartbeat, by the API server's clock."""
    noted = [
        parse_time(entry.get("time"))
        for entry in objects_of(mapping_of(node.get("metadata")).get("managedFields"))
        if entry.get("subresource") == "status" and entry.get("manager") == "kubelet"
    ]
    return max((time for time in noted if time is not None), default=None)


_EXTENDER_WORDS: Final = ("idlegpu-extender",)
_TEMPLATE: Final = "pod-template-hash"
"""Label with a Deployment's revision; during a rollout pods of two revisions run."""

_DRAIN_SECONDS: Final = 5.0
_SHUTDOWN_SECONDS: Final = 95.0
"""Defaults of the settings drain_seconds and shutdown_seconds."""


@check("IG404", "the extender has time to shut down", needs=("pods", "settings"))
def _short_grace(facts: Facts) -> Iterator[Problem]:
    """Find extender pods that are killed before their shutdown has finished.

    Their `terminationGracePeriodSeconds` is not above `drain_seconds` + `shutdown_seconds`:
    kube-scheduler may still call them.

    Remedy: add the line to the Deployment; the Helm chart sets it.
    """
    lines = []
    for pod in _extenders(facts):
        grace = mapping_of(pod.get("spec")).get("terminationGracePeriodSeconds")
        drain = _seconds(facts, pod, "drain_seconds", _DRAIN_SECONDS)
        shutdown = _seconds(facts, pod, "shutdown_seconds", _SHUTDOWN_SECONDS)
        if isinstance(grace, int) and grace <= drain + shutdown:
            lines.append(
                f"{key_of(pod)}: terminationGracePeriodSeconds {grace}, "
                f"drain_seconds {drain:g} + shutdown_seconds {shutdown:g}"
            )
    if lines:
        yield Problem(
            severity=Severity.WARNING,
            what="the extender may be killed before its shutdown has finished: kube-scheduler "
            "then loses calls when a pod ends",
            evidence=tuple(lines),
            remedy="terminationGracePeriodSeconds of the Deployment idlegpu-extender above the sum "
            "of both (the Helm chart sets it), or smaller values in the extender's settings",
        )


@check("IG405", "replicas know each other", needs=("pods", "settings"))
def _strangers(facts: Facts) -> Iterator[Problem]:
    """Find replicas that do not exchange their requests, because `peers` is not set.

    Replicas then place bursts on the same nodes, and pods count as bound without an answer, or
    count twice.

    Remedy: set `peers.service`.
    """
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for pod in _extenders(facts):
        is_leaving = "deletionTimestamp" in mapping_of(pod.get("metadata"))
        if is_running(pod) and not is_leaving and not _knows_others(facts, pod):
            namespace = text_of(mapping_of(pod.get("metadata")).get("namespace"))
            alike[namespace, labels_of(pod).get(_TEMPLATE, "")].append(key_of(pod))
    for (namespace, _), names in alike.items():
        if len(names) > 1:
            yield Problem(
                severity=Severity.WARNING,
                what="replicas do not share their requests: a burst that several answer goes to "
                "the same nodes, a pod that another replica placed counts as bound without an "
                "answer, and a pod that two replicas placed counts twice",
                evidence=(
                    f"{len(names)} replicas: {some(sorted(names))}",
                    "neither peers.service nor peers.addresses is set",
                ),
                remedy=f"peers: {{service: idlegpu-peers.{namespace}.svc:8888}} in the extender's "
                "settings, and that headless Service (manifests/extender); or one replica",
            )


def _extenders(facts: Facts) -> Iterator[Object]:
    return live_pods(facts, _EXTENDER_WORDS)


def _variables(pod: Object) -> dict[str, str]:
    """Return the literal environment variables of all containers, which override the settings."""
    return {
        name: value
        for container in containers(pod)
        for name, value in environment_of(container).items()
    }


def _seconds(facts: Facts, pod: Object, name: str, default: float) -> float:
    """Return a duration setting as it applies to a pod."""
    try:
        return float(_variables(pod)[f"IDLEGPU_{name.upper()}"])
    except (KeyError, ValueError):
        return number_setting(facts, name, default)


def _knows_others(facts: Facts, pod: Object) -> bool:
    variables = _variables(pod)
    return any(
        variables.get(f"IDLEGPU_PEERS_{name.upper()}") or setting(facts, f"peers.{name}")
        for name in ("service", "addresses")
    )
