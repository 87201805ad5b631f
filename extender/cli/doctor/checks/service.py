"""Check the extender's own agents, certificates and RBAC rights."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from extender.cli.doctor.facts import Facts, Right
from extender.cli.doctor.findings import Problem, Severity, check
from extender.cli.doctor.objects import AGENT_WORDS, is_called, is_running, total

EVERYDAY: Final = frozenset({"replaced", "closing", "busy"})
"""Reasons of refusals that also occur in a healthy system."""

DAY: Final = 86_400.0
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

    Remedy: depends on the reason.
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
        for reason in sorted(reasons - EVERYDAY)
    }
    return {reason: count for reason, count in counts.items() if count}


@check("IG402", "certificates do not expire soon", needs=("certificates",))
def _ending(facts: Facts) -> Iterator[Problem]:
    """Find certificates that expire in less than 30 days.

    Less than 7 days is an error. Sources are Secrets, files, and
    `idlegpu_certificate_end_timestamp_seconds`, which the alert `IdlegpuCertificateEnds` uses too.

    Remedy: run the Job.
    """
    by_severity: defaultdict[Severity, list[str]] = defaultdict(list)
    for one in sorted(facts.certificates or (), key=lambda one: one.ends_at):
        days = (one.ends_at - facts.at) / DAY
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

    Remedy: `kubectl apply -k`.
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
