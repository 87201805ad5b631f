"""Check that kube-scheduler's address for the extender, and its version, fit the cluster."""

import ipaddress
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from extender.cli.doctor.checks.schedulers import our_entry
from extender.cli.doctor.facts import (
    Facts,
    Object,
    Scheduler,
    command_of,
    containers,
    is_called,
    is_over,
    key_of,
    name_of,
    some,
)
from extender.cli.doctor.findings import Problem, Severity, check
from extender.core.untyped import mapping_of, objects_of, text_of

_PLACEHOLDER: Final = "FIXED_ADDRESS"
"""Placeholder for the extender's address in scheduler-config/kube-scheduler.yaml."""
_EXAMPLES: Final = (ipaddress.ip_network("192.0.2.0/24"), ipaddress.ip_network("2001:db8::/32"))
"""Networks that are reserved for documentation."""
_SERVICE: Final = "idlegpu-extender"
_SCHEDULER_WORDS: Final = ("kube-scheduler", "idlegpu-scheduler")
_OLDEST: Final = 1
"""Minor versions that kube-scheduler may be behind the API server (version skew policy)."""

_DEFAULT_SCHEDULER: Final = "default-scheduler"
_BATCHING_SINCE: Final = (1, 35)
"""First version of kube-scheduler with opportunistic batching on by default."""
_BATCHING_OFF: Final = "OpportunisticBatching=false"

_IMAGE: Final = re.compile(r"/kube-scheduler:v?(\d+)\.(\d+)")
_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)")
_ONE_RELEASE: Final = re.compile(r"v?(\d+)\.(\d+)\.\d+\+(k3s|rke2r)\d")
"""Distributions that release API server and kube-scheduler together."""


def _unknown_address(facts: Facts) -> str:
    """Return the facts that are missing for a comparison with the Service's address, "" if none."""
    if facts.services is None and any(_is_address(host) for _, host in _hosts(facts)):
        return facts.why_missing("services")
    return ""


@check(
    "IG010",
    "kube-scheduler calls the extender's address",
    needs=("schedulers",),
    unseen=_unknown_address,
)
def _wrong_address(facts: Facts) -> Iterator[Problem]:
    """Find entries whose `urlPrefix` is not the extender's address.

    It is a placeholder (`FIXED_ADDRESS`, an address for documentation), or an IP address other than
    the Service's.

    Remedy: run `scheduler-config/control-plane.sh`.
    """
    address = _service_address(facts)
    for scheduler, host in _hosts(facts):
        wrong = ""
        if host == _PLACEHOLDER.lower() or _is_example(host):
            wrong = "a placeholder instead of the extender's address"
        elif address and _is_address(host) and host != address:
            wrong = "another address than the Service's"
        if wrong:
            yield Problem(
                severity=Severity.ERROR,
                what=f"kube-scheduler calls {wrong}: pods are placed without the extender",
                evidence=(
                    f"{scheduler.source}: extenders: urlPrefix: {_prefix(scheduler.config)}",
                    f"Service {_SERVICE}: clusterIP: {address or 'unknown'}",
                ),
                remedy="scheduler-config/control-plane.sh writes the configuration with the "
                "Service's address (move the old file away first); then restart kube-scheduler",
            )


def _hosts(facts: Facts) -> Iterator[tuple[Scheduler, str]]:
    """Yield configurations with the host, in lower case, at which they call the extender."""
    for scheduler in facts.schedulers or ():
        try:
            host = urlsplit(_prefix(scheduler.config)).hostname
        except ValueError:  # brackets without an IPv6 address
            continue
        if host:
            yield scheduler, host


def _prefix(config: Object) -> str:
    return text_of((our_entry(config) or {}).get("urlPrefix"))


def _service_address(facts: Facts) -> str:
    for service in facts.services or ():
        if name_of(service) == _SERVICE:
            return text_of(mapping_of(service.get("spec")).get("clusterIP"))
    return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_example(host: str) -> bool:
    return _is_address(host) and any(ipaddress.ip_address(host) in each for each in _EXAMPLES)


@check("IG011", "kube-scheduler is not newer than the API server", needs=("pods", "version"))
def _wrong_version(facts: Facts) -> Iterator[Problem]:
    """Find kube-schedulers of a newer minor version than the API server, or of a too old one.

    A newer minor version is an error. A version more than one minor version older is a warning.

    Remedy: render `manifests/render.sh REGISTRY second-scheduler` again; with Helm set
    `images.scheduler.tag: ""`.
    """
    server = _VERSION.match(facts.version or "")
    if not server:
        return
    allowed = int(server[2])
    for pod, image, (major, minor) in _schedulers(facts):
        is_newer = minor > allowed
        if str(major) == server[1] and (is_newer or minor < allowed - _OLDEST):
            yield _skewed(key_of(pod), image, server.string, is_newer=is_newer)


def _schedulers(facts: Facts) -> Iterator[tuple[Object, str, tuple[int, int]]]:
    """Yield the pods of kube-schedulers, with image and version."""
    for pod in facts.pods or ():
        if is_over(pod) or not is_called(pod, _SCHEDULER_WORDS):
            continue
        for container in containers(pod):
            image = text_of(container.get("image"))
            if found := _IMAGE.search(image):
                yield pod, image, (int(found[1]), int(found[2]))


def _skewed(pod: str, image: str, server: str, *, is_newer: bool) -> Problem:
    relation = "newer than the API server" if is_newer else "more than one minor version older"
    return Problem(
        severity=Severity.ERROR if is_newer else Severity.WARNING,
        what=f"kube-scheduler is {relation}: Kubernetes supports the same minor version and one "
        "below",
        evidence=(f"pod {pod}: {image}", f"API server: {server}"),
        remedy="for the second scheduler: manifests/render.sh REGISTRY second-scheduler | kubectl "
        'apply -f -, or with Helm images.scheduler.tag: ""; both follow the API server',
    )


@check("IG012", "kube-scheduler batches equal pods", needs=("schedulers", "pods"))
def _unbatched(facts: Facts) -> Iterator[Problem]:
    """Find schedulers of all pods whose opportunistic batching the extender turns off.

    From kube-scheduler 1.35 on an extender turns batching off in every profile of that process,
    also for pods without GPUs. The version is that of its pod's image; with k3s and RKE2, whose
    pods show none, it is the API server's. Info only.

    Remedy: run a second scheduler for GPU pods.
    """
    batching = _batching(facts)
    for scheduler in facts.schedulers or ():
        profiles = objects_of(scheduler.config.get("profiles")) or [{}]
        names = {text_of(one.get("schedulerName")) or _DEFAULT_SCHEDULER for one in profiles}
        if batching and our_entry(scheduler.config) and _DEFAULT_SCHEDULER in names:
            yield Problem(
                severity=Severity.INFO,
                what="an extender turns opportunistic batching off in every profile of its "
                "kube-scheduler: many equal pods, also without GPUs, are placed one by one",
                evidence=(
                    f"{scheduler.source}: extenders: urlPrefix: {_prefix(scheduler.config)}",
                    f"{scheduler.source}: profiles: {some(names)}",
                    *batching,
                ),
                remedy="none if no large numbers of equal pods are created at once; otherwise a "
                "second scheduler for GPU pods (docs/kube-scheduler.md#a-second-scheduler)",
            )


def _batching(facts: Facts) -> list[str]:
    """Return evidence of each kube-scheduler whose version batches and whose command allows it."""
    found = [each for each in _schedulers(facts) if is_called(each[0], _SCHEDULER_WORDS[:1])]
    if found:
        return [
            f"{key_of(pod)}: {image}"
            for pod, image, version in found
            if version >= _BATCHING_SINCE and _BATCHING_OFF not in _command(pod)
        ]
    version = _ONE_RELEASE.match(facts.version or "")
    pods = [pod for pod in facts.pods or () if is_called(pod, _SCHEDULER_WORDS[:1])]
    if (
        not version
        or (int(version[1]), int(version[2])) < _BATCHING_SINCE
        or any(_BATCHING_OFF in _command(pod) for pod in pods)
    ):
        return []
    return [f"API server: {facts.version}: kube-scheduler is of the same release"]


def _command(pod: Object) -> str:
    return " ".join(word for container in containers(pod) for word in command_of(container))
