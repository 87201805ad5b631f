"""`idlegpu advise`: how to share GPUs, which pods request too much, which GPUs are stranded."""

import click
from rich.console import RenderableType

from extender.answers.advice import Advice, CardAdvice, HostAmounts, PodAdvice, StrandedGpus
from extender.answers.routes import ADVICE
from extender.cli import formatting
from extender.cli.session import NODES, Session, connected, namespace_option
from extender.cli.tables import Cell, left_out, line, sheet, stack, word

_CARDS = ["CARD", "?MODEL", ">REPLICAS", ">IN USE", ">ACTIVITY", ">MEMORY GiB", "ADVICE", ">BETTER",
         "HOW"]  # fmt: skip
_WIDE_CARDS = [">LOOKED", ">SAMPLES", "RESOURCE", "WHY"]
_PODS = ["POD", "NODE", ">GPUS", ">ACTIVITY", ">MEMORY GiB", "ADVICE", ">REQUESTED GiB",
         ">BETTER GiB"]  # fmt: skip
_WIDE_PODS = [">LOOKED", ">SAMPLES", "OWNER", "WHY"]
_STRANDED = ["NODE", ">STRANDED", ">FREE", "LACKS", "LEFT", "NEED EACH", "HELD BY"]
_SHOWN_HOLDERS = 3


@click.command("advise")
@connected
@click.option("--node", metavar="NAME", shell_complete=NODES,
              help="Only GPUs and pods of this node.")  # fmt: skip
@namespace_option
@click.option("--over", default="1h", show_default=True, metavar="TIME",
              type=formatting.span_of(ADVICE, "over"),
              help="Period to evaluate (1d, 7d); beyond 1h Prometheus is queried.")  # fmt: skip
@click.option("--all", "is_all", is_flag=True, help="Include GPUs that need no change.")
@formatting.number_option(ADVICE, "limit", "Largest number of GPUs, and of pods, to show.")
def command(
    session: Session, *, node: str | None, namespace: str | None, over: int, is_all: bool,
    limit: int,
) -> None:  # fmt: skip
    """Recommend replicas for shared GPUs; list oversized requests and stranded GPUs.

    REPLICAS: those that a card offers, IN USE: those that pods hold, BETTER: how many would fit.
    Based on measured use: ACTIVITY and MEMORY are the 95th percentile of the samples since the
    GPU's tenants last changed. -o wide shows the reason, and the length of that period.

    Stranded GPUs are free, but their node lacks the CPU, memory or ephemeral storage that pods
    with such GPUs request; HELD BY names the pods that hold most of it.
    """
    answer = session.client.advice(
        node=node, namespace=namespace, over_seconds=over, all_cards=is_all, limit=limit
    )
    session.show(answer, lambda: _render(answer, is_wide=session.is_wide))


def _render(answer: Advice, *, is_wide: bool) -> RenderableType:
    parts: list[RenderableType | None] = []
    if answer.cards:
        cards = (_card(one, is_wide=is_wide) for one in answer.cards)
        parts.append(sheet(_CARDS, cards, _WIDE_CARDS if is_wide else ()))
        parts.append(left_out(answer.cards_total - len(answer.cards)))
    else:
        parts.append(line("no GPU should be shared differently"))
    parts.append(line(""))
    if answer.pods:
        pods = (_pod(one, is_wide=is_wide) for one in answer.pods)
        parts.append(sheet(_PODS, pods, _WIDE_PODS if is_wide else ()))
        parts.append(left_out(answer.pods_total - len(answer.pods)))
    else:
        parts.append(line("no pod is known to request far more, or less, than it uses"))
    if answer.pods_unjudged:
        parts.append(
            line(f"pods not judged, because too few samples exist: {answer.pods_unjudged}", "dim")
        )
    parts.append(line(_basis(answer), "dim"))
    if answer.stranded:
        parts += _stranded(answer)
    if answer.note:
        parts.append(line(answer.note, "yellow"))
    return stack(parts)


def _stranded(answer: Advice) -> list[RenderableType | None]:
    count, found = answer.stranded_gpus, answer.stranded
    instances = {"/mig-" in one.resource for one in found}
    kind = "device" if len(instances) > 1 else "MIG instance" if True in instances else "GPU"
    return [
        line(""),
        line(f"{count} free {kind}{'s are' if count > 1 else ' is'} stranded:", "bold"),
        sheet(_STRANDED, (_stranded_row(one) for one in found)),
        left_out(answer.stranded_total - len(found)),
        *(line(f"{one.node}: {one.remedy}", "dim") for one in found),
    ]


def _stranded_row(found: StrandedGpus) -> list[Cell]:
    pods = [f"{one.pod} ({one.part:.0%})" for one in found.holders[:_SHOWN_HOLDERS]]
    further = found.holders_total - len(pods)
    assumed = " (assumed)" if found.is_need_assumed else ""
    return [
        found.node,
        str(found.stranded_gpus),
        str(found.free_gpus),
        ", ".join(found.lacks),
        _amounts(found.left, found.lacks),
        _amounts(found.need, found.lacks) + assumed,
        ", ".join(pods) + (f" and {further} more" if further > 0 else "") or formatting.NOTHING,
    ]


def _amounts(amounts: HostAmounts, names: list[str]) -> str:
    """Describe the amounts of some resources."""
    words = {
        "cpu": f"{amounts.cpus:g} CPUs",
        "memory": f"{formatting.gib(amounts.memory_bytes)} GiB",
        "ephemeral-storage": f"{formatting.gib(amounts.storage_bytes)} GiB of storage",
    }
    return ", ".join(words[name] for name in names if name in words)


def _basis(answer: Advice) -> str:
    if not answer.samples:
        return "no samples yet of GPUs that pods hold"
    return (
        f"based on up to {answer.samples} samples of each of {answer.devices} GPUs, over "
        f"{formatting.span(answer.looked_seconds)} ({' and '.join(answer.sources)}); at least "
        f"{answer.rules.least_samples} are needed"
    )


def _memory(used: float | None, total: float | None) -> str:
    return f"{formatting.gib(used)}/{formatting.gib(total)}"


def _card(card: CardAdvice, *, is_wide: bool) -> list[Cell]:
    how = {"mig": f"MIG {card.mig_layout}", "mps": "MPS"}.get(card.way or "", card.way)
    better = str(card.recommended_replicas)
    if card.verdict == "not-measured":  # only the default, which WHY states
        how = better = formatting.NOTHING
    row: list[Cell] = [
        card.name,
        card.model or formatting.UNKNOWN,
        str(card.replicas),
        str(card.replicas_used),
        formatting.percent(card.activity_ratio),
        _memory(card.memory_bytes, card.memory_total_bytes),
        word(card.verdict),
        better,
        how or formatting.NOTHING,
    ]
    if is_wide:
        row += [formatting.span(card.looked_seconds), str(card.samples), card.resource, card.why]
    return row


def _pod(pod: PodAdvice, *, is_wide: bool) -> list[Cell]:
    row: list[Cell] = [
        pod.pod,
        pod.node,
        str(pod.gpus),
        formatting.percent(pod.activity_ratio),
        _memory(pod.memory_most_bytes, pod.memory_total_bytes),
        word(pod.kind),
        _or_nothing(pod.requested_memory_bytes),
        _or_nothing(pod.suggested_memory_bytes),
    ]
    if is_wide:
        row += [
            formatting.span(pod.looked_seconds),
            str(pod.samples),
            pod.owner or formatting.NOTHING,
            pod.why,
        ]
    return row


def _or_nothing(count: float | None) -> str:
    return formatting.NOTHING if count is None else formatting.gib(count)
