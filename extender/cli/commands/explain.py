"""`idlegpu explain`: explain a pod's placement, or predict the placement of a manifest's pod."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import click
from rich.console import RenderableType
from rich.text import Text
from typing_extensions import override  # in typing from Python 3.12 on

from extender.answers.decisions import DecisionAnswer, DeviceAnswer, Group, Request, VerdictAnswer
from extender.answers.pods import Explanation, ReasonNodes, Waiting
from extender.cli import formatting
from extender.cli.client import Client
from extender.cli.commands.gpus import process
from extender.cli.formatting import Whole
from extender.cli.manifests import read_pods
from extender.cli.session import FILE, NODES, PODS, Session, connected
from extender.cli.tables import Cell, left_out, line, sheet, stack, word
from extender.cli.transports import ClientError, Failure

# Render an explanation: the outcome, then a table of all nodes, then one node in detail.

_DEVICE_COLUMNS = [">GPU", "=STATE", ">ACTIVITY", "?BY", ">MEMORY", ">FREE GiB", "?>°C", "=LANDS",
                  "?>ASSUMED", "SOURCE, AGE", "HEALTH"]  # fmt: skip
_SIGNALS = {
    "graphics_active_ratio": "graphics",
    "gpu_utilization_ratio": "GPU util",
    "sm_active_ratio": "SM",
    "tensor_active_ratio": "tensor",
    "dram_active_ratio": "DRAM",
    "memory_copy_utilization_ratio": "mem copy",
    "power_watts": "power",
}
"""Short name of each signal that can be the source of a device's activity."""
_PART_COLUMNS = ["PART OF THE SCORE", ">EARNED", ">AT MOST", ">ADDS"]
_MOST_NAMES = 4
_MOST_PLACED = 4
_RECOMPUTED = "recomputed from current readings, not from those of the decision:"
_NOT_KNOWN = "and no decision about it is recorded: none was made, or it is too old"


def _render(
    answer: Explanation,
    client: Client,
    *,
    node: str | None,
    limit: int,
    is_wide: bool,
    has_scores: bool = False,
) -> RenderableType:
    """Render an explanation for people.

    Args:
        client: queried for the processes that use foreign GPUs now.
        node: node to show in detail, or the reason why that is impossible; None for the pod's node,
            or idlegpu's first choice if it has none.
        limit: largest number of nodes to list.
        is_wide: show all recorded nodes in detail, and list the rejected nodes one by one.
        has_scores: show the parts of each detailed node's score.
    """
    parts: list[RenderableType | None] = [*_head(answer)]
    listed = answer.nodes[:limit]
    refused = [*_refused(answer)] if is_wide else []
    if listed or answer.others or refused:
        parts += [Text(""), _nodes(answer, limit, refused), _left(answer, limit)]
    parts += [*_reasons("refused by idlegpu", answer.rejected)]
    parts += [*_reasons("not candidates", answer.closed)]
    for verdict in _detailed(answer, node, is_wide=is_wide):
        parts += [Text(""), *_detail(verdict, client, has_scores=has_scores)]
    if node is not None and (why := _why_no_detail(answer, node)):
        parts += [Text(""), line(why, "yellow")]
        for verdict in answer.requested_node.now if answer.requested_node else ():
            detail = _detail(verdict, client, has_scores=has_scores)
            parts += [Text(""), line(_RECOMPUTED, "yellow"), *detail]
    if answer.not_checked:
        parts += [Text(""), line(f"not checked: {', '.join(answer.not_checked)}", "dim")]
    if answer.kept is not None and answer.kept.in_short:
        parts += [Text(""), line(answer.kept.note, "dim")]
    return stack(parts)


def _head(answer: Explanation) -> Iterable[RenderableType]:
    yield line(f"{answer.pod}: {_outcome(answer)}", "bold")
    for problem in answer.problems:
        yield line(problem.message, "yellow")
    decision = answer.decision
    if decision is not None and decision.request is not None:
        yield line(_requested(decision.request))
    if decision is not None and decision.group is not None:
        yield line(_group(decision.group))
    if decision is not None:
        filtered = answer.filter or decision
        summary = f"{filtered.feasible} of {filtered.candidates} candidates suitable"
        yield line(f"{summary}{_about(decision)}")
        if decision.is_shadow:
            yield line(formatting.SHADOW, "yellow")
    if answer.pending is not None:
        yield from _waiting(answer.pending)


def _outcome(answer: Explanation) -> str:
    decision = answer.decision
    chosen = decision.node if decision else None
    if answer.is_hypothetical:
        return f"would go to {chosen}" if chosen else "no node is suitable"
    if answer.bound_node:
        choice = {True: "idlegpu's first choice", False: f"not idlegpu's first choice, {chosen}"}
        text = choice.get(bool(answer.is_followed), "") if decision else _NOT_KNOWN
        gpus = f" (GPU {', '.join(map(str, answer.gpus))})" if answer.gpus else ""
        return f"is on {answer.bound_node}{gpus}, {text}"
    if answer.state == "gone":
        return f"is gone; idlegpu's choice was {chosen or 'no node'}"
    return f"waits: {answer.state}"


def _requested(request: Request) -> str:
    parts = [formatting.resources(request.resources)]
    if request.gpu_memory_bytes:
        parts.append(f"{formatting.gib(request.gpu_memory_bytes)} GiB on each")
    if request.gpu_memory_share:
        parts.append(f"{request.gpu_memory_share:.0%} of the memory of each")
    if request.gpu_memory_from:
        parts.append(f"by {request.gpu_memory_from}")
    if request.prefer_models:
        parts.append(f"preferably {', '.join(request.prefer_models)}")
    if request.require_models:
        parts.append(f"only {', '.join(request.require_models)}")
    if request.targets:
        only = "" if request.target_policy == "prefer" else " and nowhere else"
        parts.append(f"on {', else '.join(request.targets)}{only}")
    if request.require_idle:
        parts.append("known to be idle")
    if request.max_utilization_ratio is not None and request.max_memory_ratio is not None:
        parts.append(
            f"idle is below {formatting.percent(request.max_utilization_ratio)} activity and "
            f"{formatting.percent(request.max_memory_ratio)} memory"
        )
    if request.strategy:
        parts.append(f"strategy {request.strategy}")
    return f"requests {', '.join(parts)}"


def _group(group: Group) -> str:
    """Describe a pod's group: its size, its placed pods, and domains with room for the rest."""
    shown = list(group.placed.items())[:_MOST_PLACED]
    nodes = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in shown)
    more = len(group.placed) - len(shown)
    where = f": {nodes}{f' and {more} more' if more else ''}" if nodes else ""
    text = f"group {group.name}: {sum(group.placed.values())} of {group.size} pods placed{where}"
    if group.too_few is not None:
        return f"{text}; the cluster has GPUs for {group.too_few} of them, held or not"
    rest = "this pod" if group.rest == 1 else f"{group.rest} with this pod"
    if not group.fitting:
        return f"{text}; no domain has room for {rest}"
    room = ", ".join(f"{one.name} ({one.pods})" for one in group.fitting)
    return f"{text}; room for {rest} by {group.fitting[0].label}: {room}"


def _about(decision: DecisionAnswer) -> str:
    if not decision.number:
        return " now"
    took = f", {decision.duration_seconds * 1000:.1f} ms" if decision.duration_seconds else ""
    return f" (decision {decision.number}, {decision.verb}, {formatting.clock(decision.at)}{took})"


def _waiting(pod: Waiting) -> Iterable[RenderableType]:
    yield line(f"waits for {formatting.span(pod.waiting_seconds)}, scheduler {pod.scheduler}")
    for name, counted in (("kube-scheduler", pod.by_scheduler), ("idlegpu", pod.by_us)):
        for one in counted:
            yield line(f"  {name}: {one.count} {one.reason}")
    if pod.message and not pod.by_scheduler and not pod.by_us:
        yield line(f"  kube-scheduler: {pod.message}")
    for hint in pod.hints:
        yield line(f"  what would help: {hint}", "cyan")


def _refused(answer: Explanation) -> Iterable[tuple[str, str]]:
    """Yield the rejected nodes that are not recorded in full, each with its reason."""
    in_full = {verdict.node for verdict in answer.nodes}
    for one in answer.rejected:
        yield from ((node, one.reason) for node in one.nodes if node not in in_full)


def _nodes(answer: Explanation, limit: int, refused: Iterable[tuple[str, str]]) -> RenderableType:
    columns = [*formatting.RANKED_COLUMNS, "WHY NOT FIRST"]
    blanks = [formatting.NOTHING] * (len(formatting.RANKED_COLUMNS) - 2)
    rows: list[list[Cell]] = []
    for verdict in answer.nodes[:limit]:
        first = f"first choice: {verdict.reason}" if verdict.reason else "first choice"
        why: Cell = verdict.lost_by or ("-" if verdict.rank is None else first)
        if verdict.is_bound:
            why = Text.assemble(word("bound"), f" here, {formatting.clean(str(why))}")
        rows.append([*formatting.ranked_node(verdict.rank, verdict), why])
    rows += (
        [formatting.NOTHING, other.node, *blanks, f"kept in short: {other.score:.6f}"]
        for other in answer.others[: max(limit - len(rows), 0)]
    )
    rows += ([formatting.NOTHING, node, *blanks, f"refused: {why}"] for node, why in refused)
    return sheet(columns, rows)


def _left(answer: Explanation, limit: int) -> Text | None:
    shown = min(len(answer.nodes) + len(answer.others), limit)
    left = len(answer.nodes) + len(answer.others) + answer.others_left - shown
    return left_out(left)


def _reasons(heading: str, counted: list[ReasonNodes]) -> Iterable[RenderableType]:
    for one in counted:
        names = formatting.listed(one.nodes, _MOST_NAMES)
        more = one.count - len(one.nodes)
        if more > 0 and len(one.nodes) <= _MOST_NAMES:
            names += f" and {more} more"
        elif more > 0:
            names = formatting.listed([*one.nodes, *[""] * more], _MOST_NAMES)
        yield line(f"{heading}: {one.count} {one.reason}: {names}")


def _detailed(answer: Explanation, node: str | None, *, is_wide: bool) -> Sequence[VerdictAnswer]:
    """Select the nodes to show in detail."""
    if node is not None:
        return [verdict for verdict in answer.nodes if verdict.node == node]
    if is_wide:
        return answer.nodes
    chosen = answer.decision.node if answer.decision else None
    bound = [verdict for verdict in answer.nodes if verdict.is_bound]
    return bound or [verdict for verdict in answer.nodes if verdict.node == chosen]


def _why_no_detail(answer: Explanation, node: str) -> str:
    """Return the reason why a node cannot be shown in detail, "" if it can."""
    if any(verdict.node == node for verdict in answer.nodes):
        return ""
    one = answer.requested_node
    why = one.why if one is not None and one.why else "no decision about this pod is remembered"
    return f"{node}: {why}"


def _detail(
    verdict: VerdictAnswer, client: Client, *, has_scores: bool
) -> Iterable[RenderableType]:
    """Yield the lines of one node in detail: reason, devices, and the parts of its score."""
    title = (
        f"{verdict.node}, {verdict.resource}: {verdict.idle} idle of {verdict.landing} GPUs that "
        f"the pod could land on, {verdict.needed} needed"
    )
    assumed = sum(device.assumed for device in verdict.devices)
    if assumed:
        title += f", {assumed} assumed on them"
    if verdict.taken:
        title += f", {verdict.taken} taken by pods on unknown GPUs"
    yield line(title, "bold")
    if verdict.reason:
        yield line(verdict.reason)
    if verdict.is_late:
        yield line(
            "as of the pod's binding: the decision's own snapshot was already replaced", "yellow"
        )
    if not verdict.is_agreed:
        yield line(
            "readings and API server disagree on which GPUs are in use: the pod may land on any",
            "yellow",
        )
    yield sheet(_DEVICE_COLUMNS, (_device(device) for device in verdict.devices))
    yield from (line(_room(device)) for device in verdict.devices if device.declared_bytes)
    yield from map(line, _foreign(verdict, client))
    if has_scores:
        yield Text("")
        yield _scores(verdict)


def _scores(verdict: VerdictAnswer) -> RenderableType:
    parts = [
        [part.name, formatting.percent(part.value), f"{part.share:.6f}", f"{part.adds:.6f}"]
        for part in verdict.parts
    ]
    factors = [
        [
            f"of the certainty, {factor.name} leave",
            formatting.percent(factor.value),
            "",
            f"x {factor.keeps:.4f}",
        ]
        for factor in verdict.factors
        if factor.value
    ]
    return sheet(_PART_COLUMNS, [*parts, ["score", "", "", f"{verdict.score:.6f}"], *factors])


def _room(device: DeviceAnswer) -> str:
    """Format the calculation of a device's room for memory, if its pods declared memory.

    Room is total minus declared minus use by others, but at most the measured free memory.
    """
    index = "?" if device.index is None else device.index
    return (
        f"GPU {index}: {formatting.gib(device.free_bytes)} GiB of room: "
        f"{formatting.gib(device.memory_total_bytes)} in all, "
        f"{formatting.gib(device.declared_bytes)} declared by its pods, "
        f"{formatting.gib(device.others_bytes)} in use by others, "
        f"{formatting.gib(device.memory_free_bytes)} measured free"
    )


def _foreign(verdict: VerdictAnswer, client: Client) -> Iterable[str]:
    """Yield the processes that use a node's foreign GPUs now; an explanation does not record them.

    Yield nothing if the extender does not answer for the node, which may have left the cluster.
    """
    foreign = {
        (device.uuid, device.gpu_instance_id)
        for device in verdict.devices
        if device.state == "foreign"
    }
    if not foreign:
        return
    try:
        gpus = client.gpus(verdict.node).gpus
    except ClientError:
        return
    for gpu in gpus:
        if (gpu.uuid, gpu.gpu_instance_id) in foreign and gpu.foreign_processes:
            used = "; ".join(map(process, gpu.foreign_processes))
            yield f"{gpu.name} now: {used}"


def _device(device: DeviceAnswer) -> list[Cell]:
    index = "?" if device.index is None else str(device.index)
    instance = f"/{device.gpu_instance_id}" if device.gpu_instance_id else ""
    celsius, activity = device.temperature_celsius, device.signals.get("utilization")
    throttled = f"throttled: {device.throttling}" if device.throttling else ""
    return [
        index + instance,
        word(device.state),
        formatting.percent(device.utilization_ratio),
        _SIGNALS.get(activity.signal, formatting.NOTHING) if activity else formatting.NOTHING,
        formatting.percent(device.memory_used_ratio),
        # The memory of a GPU in use is freed only when its pod ends, so it is not free for this
        # pod.
        formatting.gib(device.free_bytes) if device.can_land else formatting.NOTHING,
        formatting.UNKNOWN if celsius is None else f"{celsius:.0f}",
        word("yes" if device.can_land else "no"),
        str(device.assumed),
        _source_and_age(device),
        "; ".join(filter(None, (device.health, throttled))) or formatting.NOTHING,
    ]


def _source_and_age(device: DeviceAnswer) -> str:
    texts = {
        name: f"{one.source} {formatting.span(one.age_seconds)}"
        for name, one in device.signals.items()
    }
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name}: {text}" for name, text in texts.items()) or device.source


_FEW: Final = 10
_EVERY: Final = 10_000
"""Largest number of nodes that the extender returns."""

_DECISION: Final = re.compile(r"(\w[\w.]*-)?[1-9][0-9]{0,8}", re.ASCII)


class _DecisionName(click.ParamType[int | str]):
    """Option type for a decision: its number, or its id, which is unique across replicas."""

    name = "decision"

    @override
    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Parse a decision's number or id."""
        text = str(value)
        if not _DECISION.fullmatch(text):
            self.fail(
                f"{text!r}: must be a decision's number, such as 812, or its id, such as 7f3a-812: "
                "`idlegpu decisions -o wide` lists both",
                param,
                ctx,
            )
        return int(text) if text.isdecimal() else text


@click.command("explain")
@connected
@click.argument("pods", nargs=-1, metavar="[POD]...", shell_complete=PODS)
@click.option(
    "-f",
    "--filename",
    metavar="FILE",
    type=FILE,
    help="Predict the placement of this manifest's pods (- for standard input).",
)
@click.option("--number", "decisions", multiple=True, type=_DecisionName(), metavar="N",
              help="Explain decision N instead: its number, or its id if several replicas have "
              "the number; repeatable.")  # fmt: skip
@click.option("--node", metavar="NAME", shell_complete=NODES,
              help="Show this node in detail, as far as it was recorded.")  # fmt: skip
@click.option("--limit", type=Whole(0, _EVERY), help="Largest number of nodes to list; unless set, "
              "10 in the table, and all with -o wide, json or yaml.")  # fmt: skip
@click.option("--scores", is_flag=True, help="Show the parts of a detailed node's score.")
def command(
    session: Session,
    *,
    pods: tuple[str, ...],
    filename: str | None,
    decisions: tuple[int | str, ...],
    node: str | None,
    limit: int | None,
    scores: bool,
) -> None:
    """Explain the placement of each POD (namespace/name, name or UID), or why it waits.

    The explanation shows the record from which the decision was made: readings with source and age,
    and the pods that were assumed. -f creates nothing: it predicts the placement now.
    docs/decision.md explains the terms; --scores adds the arithmetic. Exits with status 1 if
    nothing is known of a pod, a decision or --node, or if with -f no node suits.
    """
    if sum(map(bool, (pods, filename, decisions))) != 1:
        raise click.UsageError("name one of: POD..., --filename FILE, --number N")
    client = session.client
    if limit is None:
        limit = _FEW if session.output == "table" else _EVERY
    requests: list[Callable[[], Explanation]] = [
        *(partial(client.explain, pod, limit=limit, node=node) for pod in pods),
        *(partial(client.explain, number=one, limit=limit, node=node) for one in decisions),
        *(
            partial(client.foresee, pod, limit=limit, node=node)
            for pod in (read_pods(filename) if filename else ())
        ),
    ]
    statuses = [
        _show(session, ask, node=node, limit=limit, is_only=len(requests) == 1, has_scores=scores)
        for ask in requests
    ]
    if any(statuses):
        click.get_current_context().exit(max(statuses))


def _show(
    session: Session,
    ask: Callable[[], Explanation],
    *,
    node: str | None,
    limit: int,
    is_only: bool,
    has_scores: bool,
) -> int:
    """Print one explanation; return the exit status.

    If several pods are given, an unknown or ambiguous pod does not prevent the other explanations.

    Raises:
        ClientError: the only explanation failed, or the failure would also affect the others.
    """
    try:
        answer = ask()
    except ClientError as error:
        if is_only or error.failure not in {Failure.NOT_FOUND, Failure.BAD_REQUEST}:
            raise
        click.echo(f"idlegpu: {error}", err=True)
        status: int = error.failure.value
        return status
    session.show(
        answer,
        lambda: _render(
            answer,
            session.client,
            node=node,
            limit=limit,
            is_wide=session.is_wide,
            has_scores=has_scores,
        ),
    )
    return 1 if answer.state == "unplaceable" or _is_missed(answer, node) else 0


def _is_missed(answer: Explanation, node: str | None) -> bool:
    one = answer.requested_node
    return node is not None and (one is None or one.kept not in {"in-full", "in-short"})
