"""Check that the extender's replicas shut down in time, and know each other."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from extender.cli.doctor.facts import Facts, Object
from extender.cli.doctor.findings import Problem, Severity, check
from extender.cli.doctor.objects import (
    containers,
    environment_of,
    is_running,
    key_of,
    labels_of,
    live_pods,
    number_setting,
    setting,
    some,
)
from extender.core.untyped import mapping_of, text_of

_EXTENDER_WORDS: Final = ("idlegpu-extender",)
_TEMPLATE: Final = "pod-template-hash"
"""Label with a Deployment's revision; during a rollout pods of two revisions run."""

DRAIN_SECONDS: Final = 5.0
SHUTDOWN_SECONDS: Final = 95.0
"""Defaults of the settings drain_seconds and shutdown_seconds."""


@check("IG404", "the extender has time to shut down", needs=("pods", "settings"))
def _short_grace(facts: Facts) -> Iterator[Problem]:
    """Find extender pods that are killed before their shutdown has finished.

    Their `terminationGracePeriodSeconds` is not above `drain_seconds` + `shutdown_seconds`:
    kube-scheduler may still call them.

    Remedy: the line in the Deployment; the Helm chart sets it.
    """
    lines = []
    for pod in _extenders(facts):
        grace = mapping_of(pod.get("spec")).get("terminationGracePeriodSeconds")
        drain = _seconds(facts, pod, "drain_seconds", DRAIN_SECONDS)
        shutdown = _seconds(facts, pod, "shutdown_seconds", SHUTDOWN_SECONDS)
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

    Remedy: `peers.service`.
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
