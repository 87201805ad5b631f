"""Check that kube-scheduler calls the extender for all GPU pods, in time, and uses its scores."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from extender.cli.doctor.facts import (
    Facts,
    Object,
    Scheduler,
    capacity,
    is_gpu,
    name_of,
    number,
    number_setting,
    some,
)
from extender.cli.doctor.findings import Problem, Severity, check
from extender.core.untyped import mapping_of, objects_of, text_of

DOCUMENTATION: Final = "docs/kube-scheduler.md"
_RESTART: Final = (
    "put it into the file that kube-scheduler's --config names, and restart kube-scheduler "
    f"({DOCUMENTATION})"
)

_PLUGIN_WEIGHTS: Final = {
    "TaintToleration": 3,
    "NodeAffinity": 2,
    "PodTopologySpread": 2,
    "InterPodAffinity": 2,
    "NodeResourcesFit": 1,
    "NodeResourcesBalancedAllocation": 1,
    "ImageLocality": 1,
}
"""Default weights of kube-scheduler's score plugins (1.29 to 1.37)."""

_MAX_SCORE: Final = 400
"""Default of the setting wire.max_score."""
_MATERIAL: Final = 0.4
"""Smallest gap between an idle and a busy node, as a share of the maximum score."""
_LEAD: Final = 0.005
"""Lead of the first choice over equal nodes, as a share of the maximum score."""
_WISH: Final = 100
"""Smallest number of points that soft topology spread or preferred affinity adds among equal
nodes."""
_SHORTLIST: Final = 100
"""Default of the setting wire.shortlist."""
_PLUGIN_POINTS: Final = 100
"""Maximum score of one kube-scheduler plugin, before its weight."""

_SLOW_SHARE: Final = 0.001
"""Share of late answers above which the check reports them."""
_DEFAULT_TIMEOUT_SECONDS: Final = 5.0
_MOST_TIMEOUT_SECONDS: Final = 2.0
"""A longer timeout would hold up all pods; the chart refuses it."""

_OTHERS: Final = {"http-timeout": "IG002", "prioritize-verb": "IG005", "managed-resources": "IG006"}
"""Likely causes of /v1/bypassed that other checks report, by code."""
_MILD: Final = frozenset({"other-scheduler"})

_DURATION: Final = re.compile(r"([0-9.]+)(ms|us|µs|ns|s|m|h)")
_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def _seconds_of(duration: object) -> float | None:
    """Parse a Go duration into seconds; None if it is malformed.

    Example:
        >>> _seconds_of("1s"), _seconds_of("1m500ms"), _seconds_of("soon")
        (1.0, 60.5, None)
    """
    text = text_of(duration)
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(count) * _UNITS[unit] for count, unit in parts)


def our_entry(config: Object) -> Object | None:
    """Return the entry of idlegpu among a configuration's extenders, None if there is none.

    This is the entry with "idlegpu" in its address or certificate, else one with GPU resources,
    else the only entry.
    """
    entries = objects_of(config.get("extenders"))
    for entry in entries:
        if _has_our_name(entry):
            return entry
    for entry in entries:
        if any(is_gpu(name) for name in _managed(entry)):
            return entry
    return entries[0] if len(entries) == 1 else None


def _has_our_name(entry: Object) -> bool:
    server = text_of(mapping_of(entry.get("tlsConfig")).get("serverName"))
    return "idlegpu" in text_of(entry.get("urlPrefix")) + server


def _managed(entry: Object) -> list[str]:
    """Return the resource names for which an extender is called; none means every pod."""
    return [text_of(one.get("name")) for one in objects_of(entry.get("managedResources"))]


def _ours(facts: Facts) -> Iterator[tuple[Scheduler, Object]]:
    """Yield the configurations that have an entry for idlegpu, with that entry."""
    for scheduler in facts.schedulers or ():
        entry = our_entry(scheduler.config)
        if entry is not None:
            yield scheduler, entry


def _causes(facts: Facts) -> list[Object]:
    return list(objects_of((facts.bypassed or {}).get("likely_causes")))


def _groups(facts: Facts) -> tuple[str, ...]:
    """Format one line for each group of pods that were bound without the extender's answer."""
    lines = []
    for group in objects_of((facts.bypassed or {}).get("bound")):
        if group.get("verdict") == "called":
            continue
        resources = group.get("resources")
        requested = ", ".join(map(str, resources)) if isinstance(resources, list) else ""
        lines.append(
            f"{group.get('count')} pods of {group.get('scheduler')} that request {requested}: "
            f"{group.get('verdict')}, for example {group.get('example')}"
        )
    return tuple(lines)


def _reported(facts: Facts, code: str) -> Iterator[Problem]:
    """Yield the likely causes that the extender reports and that belong to this check."""
    for cause in _causes(facts):
        kind = text_of(cause.get("kind"))
        if _OTHERS.get(kind, "IG001") != code:
            continue
        yield Problem(
            severity=Severity.WARNING if kind in _MILD else Severity.ERROR,
            what=f"GPU pods are bound without idlegpu's answer: {cause.get('text')}",
            evidence=(*_groups(facts), f"likely cause: {kind}, {cause.get('pods')} pods"),
            remedy=f"{_remedy(kind)}: {_RESTART}",
        )


def _remedy(kind: str) -> str:
    known = {
        "http-timeout": "httpTimeout: 1s, and requests of CPU for the extender",
        "prioritize-verb": "prioritizeVerb: prioritize",
        "managed-resources": "managedResources: [{name: RESOURCE, ignoredByScheduler: false}] "
        "with the resource named above",
        "wrong-path": "urlPrefix: https://ADDRESS:8888 (no path), filterVerb: filter, "
        "prioritizeVerb: prioritize, preemptVerb: preempt",
        "unreadable": "nodeCacheCapable: true",
        "other-scheduler": "bypassed.schedulers: [NAMES] in the extender's settings if that is "
        "intended; else the entry under extenders of scheduler-config/kube-scheduler.yaml",
    }
    return known.get(
        kind,
        "the entry under extenders of scheduler-config/kube-scheduler.yaml, with urlPrefix at an "
        "address that kube-scheduler reaches",
    )


@check("IG001", "kube-scheduler calls the extender", needs=("bypassed|schedulers",))
def _not_called(facts: Facts) -> Iterator[Problem]:
    """Find configurations or bindings that show that kube-scheduler does not call the extender.

    Either no entry under `extenders` is idlegpu's, or pods are bound without its answer;
    `/v1/bypassed` then names the likely cause.

    Remedy: add the entry of `scheduler-config/kube-scheduler.yaml`.
    """
    yield from _reported(facts, "IG001")
    if facts.schedulers and not any(True for _ in _ours(facts)):
        yield Problem(
            severity=Severity.ERROR,
            what="kube-scheduler's configuration has no entry for idlegpu",
            evidence=tuple(
                f"{one.source}: extenders: {_prefixes(one.config)}" for one in facts.schedulers
            ),
            remedy=f"the entry under extenders of scheduler-config/kube-scheduler.yaml: {_RESTART}",
        )


def _prefixes(config: Object) -> str:
    entries = objects_of(config.get("extenders"))
    return some(text_of(entry.get("urlPrefix")) for entry in entries) or "none"


@check("IG002", "the extender answers in time", needs=("bypassed|metrics",))
def _late(facts: Facts) -> Iterator[Problem]:
    """Find answers that arrive after kube-scheduler's timeout.

    kube-scheduler had closed the connection, or more than one answer in a thousand took longer than
    `httpTimeout`.

    Remedy: raise `httpTimeout`, or give the extender more CPU.
    """
    yield from _reported(facts, "IG002")
    callers = [(one.source, entry) for one, entry in _ours(facts)]
    for source, entry in callers or [("as shipped", {"httpTimeout": "1s"})]:
        limit = _seconds_of(entry.get("httpTimeout")) or _DEFAULT_TIMEOUT_SECONDS
        wait = min(max(2 * limit, 1.0), _MOST_TIMEOUT_SECONDS)
        longer = f"httpTimeout: {wait:g}s, or " if wait > limit else ""
        for verb, slow, every in _slow(facts, limit):
            if slow / every > _SLOW_SHARE:
                yield Problem(
                    severity=Severity.WARNING,
                    what=f"answers to {verb} take longer than kube-scheduler waits",
                    evidence=(
                        f"{slow:.0f} of {every:.0f} answers took longer than {limit:g} s",
                        f"{source}: httpTimeout: {entry.get('httpTimeout', 'not set')}",
                    ),
                    remedy=f"{longer}more CPU for the extender (resources.requests.cpu in its "
                    f"Deployment): {_RESTART}",
                )


def _slow(facts: Facts, limit: float) -> Iterator[tuple[str, float, float]]:
    """Yield verb, number of answers slower than a limit, and number of all answers."""
    in_time: defaultdict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for sample in facts.metrics or ():
        if sample.name == "idlegpu_request_duration_seconds_bucket":
            verb, bound = sample.labels.get("verb", ""), float(sample.labels.get("le", "inf"))
            in_time[verb][bound] += sample.value
    for verb, counts in sorted(in_time.items()):
        every = counts.get(float("inf"), 0.0)
        within = [count for bound, count in counts.items() if bound >= limit]
        if every and within:
            yield verb, every - min(within), every


@check("IG003", "kube-scheduler sends node names only", needs=("schedulers",))
def _whole_nodes(facts: Facts) -> Iterator[Problem]:
    """Find configurations that make kube-scheduler send whole Node objects.

    `nodeCacheCapable` is off in them.

    Remedy: set `nodeCacheCapable: true`.
    """
    for scheduler, entry in _ours(facts):
        if entry.get("nodeCacheCapable") is not True:
            shown = str(entry.get("nodeCacheCapable", "not set")).lower()
            yield Problem(
                severity=Severity.ERROR,
                what="kube-scheduler sends whole Node objects with every call: 25 times the bytes, "
                "a tenth of the pods per second",
                evidence=(f"{scheduler.source}: nodeCacheCapable: {shown}",),
                remedy=f"nodeCacheCapable: true: {_RESTART}",
            )


@check("IG004", "the extender's scores and kube-scheduler's own both count", needs=("schedulers",))
def _drowned(facts: Facts) -> Iterator[Problem]:
    """Find weights with which kube-scheduler's plugins outweigh the extender, or have no effect.

    idlegpu adds weight x `wire.max_score` x 10 points at most, and two fifths of that for idle
    against busy; kube-scheduler's plugins add 100 x the sum of their weights (12 by default),
    profile by profile. An error if the plugins exceed all of idlegpu's points, a warning if they
    exceed those two fifths. Info if idlegpu leads by 100 points or more among equal nodes, so that
    soft spread and preferred affinity never count.

    Remedy: set `weight: 1`.
    """
    scale = number_setting(facts, "wire.max_score", _MAX_SCORE)
    for scheduler, entry in _ours(facts):
        weight = number(entry.get("weight"))
        for profile in objects_of(scheduler.config.get("profiles")) or [{}]:
            theirs = sum(_plugin_weights(profile).values())
            # kube-scheduler multiplies an extender's score by 10.
            ours_most, theirs_most = weight * scale * 10, theirs * _PLUGIN_POINTS
            is_weak = ours_most * _MATERIAL < theirs_most
            if not is_weak and (ours_most * _LEAD < _WISH or not theirs):
                continue
            name = text_of(profile.get("schedulerName")) or "default-scheduler"
            weighted = (
                f"{scheduler.source}: weight: {weight}: idlegpu's first choice counts {ours_most:g}"
            )
            ours = f"{weighted} (weight {weight} x score {scale:g} x 10)"
            if is_weak:
                needed = -int(-theirs_most // (scale * 10 * _MATERIAL))
                yield Problem(
                    severity=Severity.ERROR if ours_most < theirs_most else Severity.WARNING,
                    what=f"profile {name}: kube-scheduler's own plugins outvote idlegpu's scores",
                    evidence=(
                        f"{ours}: idle against busy counts {ours_most * _MATERIAL:g} of it",
                        f"its plugins' weights sum to {theirs}: they count up to {theirs_most}",
                    ),
                    remedy=f"weight: {needed}: {_RESTART}",
                )
            else:
                needed = max(-int(-theirs_most // (scale * 10 * _MATERIAL)), 1)
                yield Problem(
                    severity=Severity.INFO,
                    what=f"profile {name}: idlegpu's scores decide alone, even among equal nodes: "
                    "soft topology spread and preferred affinity never count",
                    evidence=(
                        f"{ours}: it leads equal nodes by {ours_most * _LEAD:g}",
                        f"a soft constraint of kube-scheduler is worth {_WISH} to 300",
                    ),
                    remedy=f"weight: {needed}: {_RESTART}",
                )


def _plugin_weights(profile: Object) -> dict[str, int]:
    """Return the weights of a profile's score plugins.

    Example:
        >>> sum(_plugin_weights({}).values())
        12
    """
    weights = dict(_PLUGIN_WEIGHTS)
    plugins = mapping_of(profile.get("plugins"))
    for point in ("multiPoint", "score"):
        changes = mapping_of(plugins.get(point))
        for one in objects_of(changes.get("disabled")):
            if one.get("name") == "*":
                weights.clear()
            weights.pop(text_of(one.get("name")), None)
        for one in objects_of(changes.get("enabled")):
            name, weight = text_of(one.get("name")), number(one.get("weight"))
            # At multiPoint most plugins do not score: count only known score plugins.
            if point == "score" or name in _PLUGIN_WEIGHTS:
                weights[name] = weight or weights.get(name) or _PLUGIN_WEIGHTS.get(name, 1)
    return weights


@check("IG005", "kube-scheduler calls every verb", needs=("bypassed|schedulers",))
def _verbs(facts: Facts) -> Iterator[Problem]:
    """Find verbs that kube-scheduler does not call.

    `filterVerb`, `prioritizeVerb` or `preemptVerb` is missing, or scores are lost.

    Remedy: add the line that the finding shows.
    """
    yield from _reported(facts, "IG005")
    lost = {
        "filterVerb": ("filter", Severity.ERROR, "broken and busy GPUs are not rejected"),
        "prioritizeVerb": ("prioritize", Severity.ERROR, "idlegpu's scores are lost"),
        "preemptVerb": (
            "preempt",
            Severity.WARNING,
            "pods are evicted for a pod that waits for load",
        ),
    }
    for scheduler, entry in _ours(facts):
        for field, (verb, severity, consequence) in lost.items():
            if not text_of(entry.get(field)):
                yield Problem(
                    severity=severity,
                    what=f"kube-scheduler does not call {verb}: {consequence}",
                    evidence=(f"{scheduler.source}: {field}: not set",),
                    remedy=f"{field}: {verb}: {_RESTART}",
                )


@check("IG006", "managedResources lists every GPU resource", needs=("bypassed|schedulers", "nodes"))
def _unmanaged(facts: Facts) -> Iterator[Problem]:
    """Find GPU resources of nodes that are missing from managedResources.

    For example a MIG profile, or `nvidia.com/gpu.shared`.

    Remedy: add the lines that the finding shows.
    """
    yield from _reported(facts, "IG006")
    entries = [(scheduler, _managed(entry)) for scheduler, entry in _ours(facts)]
    if not entries or any(not names for _, names in entries):
        return
    known = {name for _, names in entries for name in names}
    where: defaultdict[str, list[str]] = defaultdict(list)
    for node in facts.nodes or ():
        for name, count in capacity(node).items():
            if count and name not in known:
                where[name].append(name_of(node))
    if where:
        lines = [f"  - {{name: {name}, ignoredByScheduler: false}}" for name in sorted(where)]
        yield Problem(
            severity=Severity.ERROR,
            what="nodes have GPU resources that managedResources does not list: pods that request "
            "these are placed without the extender",
            evidence=tuple(f"{name} on {some(nodes)}" for name, nodes in sorted(where.items())),
            remedy="\n".join(["managedResources:", *lines, _RESTART]),
        )


@check("IG009", "no other extender sees only idlegpu's shortlist", needs=("schedulers",))
def _shortened(facts: Facts) -> Iterator[Problem]:
    """Find extenders that filter after idlegpu and so see only its shortlist.

    If such an extender refuses the whole shortlist (`wire.shortlist` above 0), a pod waits although
    other nodes are suitable. kube-scheduler calls ignorable extenders last, the others in the order
    of the file.

    Remedy: set `wire.shortlist: 0`, or move the other entry above idlegpu's (with
    `ignorable: false` if idlegpu's is not ignorable).
    """
    shortlist = number_setting(facts, "wire.shortlist", _SHORTLIST)
    if not shortlist:
        return
    for scheduler, entry in _ours(facts):
        for other in _called_after(scheduler.config, entry):
            prefix = text_of(other.get("urlPrefix")) or "without urlPrefix"
            is_last = _is_ignorable(other) and not _is_ignorable(entry)
            yield Problem(
                severity=Severity.WARNING,
                what="another extender is called after idlegpu and sees only idlegpu's shortlist: "
                "if it rejects all of it, pods wait although other nodes would suit",
                evidence=(
                    f"{scheduler.source}: extenders: {prefix}: filterVerb: "
                    f"{text_of(other.get('filterVerb'))}, called for "
                    f"{some(_managed(other)) or 'every pod'}",
                    f"the extender's settings: wire.shortlist: {shortlist:g}",
                ),
                remedy="wire.shortlist: 0 in the extender's settings (no restart); or the entry of "
                f"{prefix} above ours{', with ignorable: false' if is_last else ''}: {_RESTART}",
            )


def _called_after(config: Object, entry: Object) -> Iterator[Object]:
    """Yield the extenders that filter after idlegpu; kube-scheduler calls ignorable ones last."""
    in_order = sorted(objects_of(config.get("extenders")), key=_is_ignorable)
    ours = next(at for at, one in enumerate(in_order) if one is entry)
    for other in in_order[ours + 1 :]:
        if text_of(other.get("filterVerb")) and not _has_our_name(other):
            yield other


def _is_ignorable(entry: Object) -> bool:
    return entry.get("ignorable") is True
