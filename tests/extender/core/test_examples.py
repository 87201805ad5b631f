"""Examples of docs/decision.md: their results, and the texts of `explain`."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from extender.core.decision.evaluation import EvaluationInputs
from extender.core.decision.scoring import EARLY_FAILURES, ILL_HEALTH, MODEL
from extender.core.decision.verdicts import NodeVerdict, explain, gather
from extender.core.policy import Policy, Strategy
from extender.core.request.request import GpuRequest
from testkit.builders import (
    GIB,
    GPU,
    Gpu,
    Node,
    busy,
    decide_on,
    device_request,
    freed,
    gpu,
    node,
    ranking,
    request,
    shared,
    snapshot_of,
    unknown,
)

PAGE = (Path(__file__).parents[3] / "docs/decision.md").read_text(encoding="utf-8")
MODELS = ("", "nvidia a100", "nvidia v100")


def idle(count: int) -> list[Gpu]:
    return [gpu()] * count


def held(count: int) -> list[Gpu]:
    return [busy(used=1)] * count


FILLED = gpu(used=1, memory_used=0.5, declared_bytes=40 * GIB)


@dataclass(frozen=True, kw_only=True)
class Example:
    """Row of the page's table, with its input."""

    texts: tuple[str, str, str]
    requested: GpuRequest
    a: Node
    b: Node
    first: str


EXAMPLES = {
    "declared-memory": Example(
        texts=("1 share, 40Gi", "tenant of 60Gi that uses 1", "tenant that uses 30, declared none"),
        requested=request(memory_bytes=int(40 * GIB)),
        a=shared(gpu(memory_used=1 / 80, used=1, declared_bytes=60 * GIB)),
        b=shared(gpu(memory_used=30 / 80, used=1, others_bytes=30 * GIB)),
        first="B",
    ),
    "require-idle": Example(
        texts=("1 GPU, `require-idle`", "8 free, 1 busy", "1 free, freed a second ago"),
        requested=request(requires_idle=True),
        a=node(*idle(7), busy()),
        b=node(freed()),
        first="neither",
    ),
    "foreign-use": Example(
        texts=("1 GPU", "8 free, docker uses 2", "8 GPUs, 3 free, all idle"),
        requested=request(),
        a=node(*idle(6), *[gpu(is_foreign=True)] * 2),
        b=node(*idle(3), *held(5)),
        first="B",
    ),
    "joined": Example(
        texts=("2 GPUs", "2 free, joined to held GPUs alone", "2 free, joined by NVLink"),
        requested=request(2),
        a=node(*held(2), *idle(2), joined=(0b0101, 0b1010, 0, 0)),
        b=node(*held(2), *idle(2), joined=(0b0011, 0b1100, 0, 0)),
        first="B",
    ),
    "broken": Example(
        texts=("2 GPUs", "8 free, 1 broken", "2 free, idle"),
        requested=request(2),
        a=node(*idle(7), gpu(is_excluded=True)),
        b=node(*idle(2)),
        first="B",
    ),
    "band": Example(
        texts=("1 GPU", "8 free, 7 broken", "8 free, silent"),
        requested=request(),
        a=node(*idle(1), *[gpu(is_excluded=True)] * 7),
        b=node(*[unknown()] * 8),
        first="B",
    ),
    "may": Example(
        texts=("1 GPU", "2 free, 1 busy", "2 free, both busy"),
        requested=request(),
        a=node(gpu(), busy()),
        b=node(busy(), busy()),
        first="A",
    ),
    "presumed": Example(
        texts=("1 GPU", "1 free, freed a second ago", "1 free, idle"),
        requested=request(),
        a=node(freed()),
        b=node(gpu()),
        first="B",
    ),
    "freed-without-labels": Example(
        texts=(
            "1 GPU",
            "8 busy GPUs, 7 held, which ones is unknown; a pod ended a second ago",
            "8 free, silent",
        ),
        requested=request(),
        a=node(
            *[busy(is_in_use=True)] * 8,
            allocatable=8,
            held=7,
            just_freed=1,
            is_agreed=False,
            is_presumed=True,
        ),
        b=node(*[unknown()] * 8),
        first="A",
    ),
    "model": Example(
        texts=("1 GPU, `A100,V100`", "A100, freed a second ago", "V100, idle for hours"),
        requested=request(preferred_models=("A100", "V100")),
        a=node(freed(), model_id=1),
        b=node(gpu(), model_id=2),
        first="A",
    ),
    "early-failures": Example(
        texts=("1 GPU", "8 idle", "3 idle; pods of two owners failed here early"),
        requested=request(),
        a=node(*idle(8)),
        b=node(*idle(3), suspicion=0.5),
        first="A",
    ),
    "fit": Example(
        texts=("1 GPU", "8 idle", "8 GPUs, 3 idle, 5 held"),
        requested=request(),
        a=node(*idle(8)),
        b=node(*idle(3), *held(5)),
        first="B",
    ),
    "spread": Example(
        texts=("1 GPU, `spread`", "8 idle", "8 GPUs, 3 idle, 5 held"),
        requested=request(strategy=Strategy.SPREAD),
        a=node(*idle(8)),
        b=node(*idle(3), *held(5)),
        first="A",
    ),
    "host": Example(
        texts=("1 GPU, 8 CPUs", "8 GPUs, 6 idle, 8 CPUs left", "8 GPUs, 3 idle, 64 CPUs left"),
        requested=request(millicores=8000),
        a=node(*idle(6), *held(2), free_millicores=8000),
        b=node(*idle(3), *held(5), free_millicores=64_000),
        first="A",
    ),
    "load": Example(
        texts=("1 share", "its card is 25 % busy", "its card is 10 % busy"),
        requested=request(),
        a=shared(gpu(utilization=0.25, used=1)),
        b=shared(gpu(utilization=0.1, used=1)),
        first="B",
    ),
    "forecast": Example(
        texts=(
            "1 share",
            "10 % active for an hour, 80 % for the three before",
            "14 % active for an hour, 0 % for the three before",
        ),
        requested=request(),
        a=shared(gpu(utilization=0.1, next_hour=0.186, used=1)),
        b=shared(gpu(utilization=0.14, next_hour=0.118, used=1)),
        first="B",
    ),
    "power": Example(
        texts=("1 GPU", "1 free, not active, draws 300 of 400 W", "1 free, at rest"),
        requested=request(),
        a=node(gpu(utilization=0.65, peak=0.0)),
        b=node(gpu()),
        first="B",
    ),
    "young": Example(
        texts=("1 share", "8 tenants, started 5 minutes ago, 0 % active", "1 tenant, 12 % active"),
        requested=request(),
        a=shared(gpu(used=8, loading=8)),
        b=shared(gpu(used=1, utilization=0.12)),
        first="B",
    ),
    "pause": Example(
        texts=(
            "1 share, `require-idle`",
            "90 % active for an hour, 0 % for a minute",
            "90 % active for an hour, 0 % for 10 minutes",
        ),
        requested=request(requires_idle=True),
        a=shared(gpu(used=1, utilization=0.88, latest=0.0, peak=0.79)),
        b=shared(gpu(used=1, utilization=0.75, latest=0.0, peak=0.0)),
        first="B",
    ),
    "nominated": Example(
        texts=("1 share, 60Gi, nominated to A", "tenant of 40Gi, being deleted", "tenant of 40Gi"),
        requested=request(memory_bytes=int(60 * GIB), nominated_node="A"),
        a=shared(FILLED, leaving=(0,)),
        b=shared(FILLED),
        first="A",
    ),
    "nominated-for-nothing": Example(
        texts=("1 share, 60Gi, nominated to B", "tenant of 40Gi, being deleted", "tenant of 40Gi"),
        requested=request(memory_bytes=int(60 * GIB), nominated_node="B"),
        a=shared(FILLED, leaving=(0,)),
        b=shared(FILLED),
        first="neither",
    ),
    "foreign-load": Example(
        texts=(
            "1 share",
            "its card is 60 % busy with docker",
            "its card is 90 % busy with tenants",
        ),
        requested=request(),
        a=shared(busy(utilization=0.6, memory_used=0.1, is_foreign=True)),
        b=shared(busy(utilization=0.9, memory_used=0.1, used=1)),
        first="A",
    ),
}


def verdicts(example: Example) -> dict[str, NodeVerdict]:
    """Return the verdict on both nodes."""
    snapshot, requested = (
        snapshot_of({"A": example.a, "B": example.b}, models=MODELS),
        example.requested,
    )
    inputs = EvaluationInputs(
        request=requested,
        devices=device_request(requested.count, float(requested.memory_bytes or 0)),
        policy=Policy(),
        overlay={},
    )
    found = explain(gather(snapshot, snapshot.pools[GPU], inputs, ["A", "B"]))
    return {verdict.node: verdict for verdict in found}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_the_documentation_are_right(name: str) -> None:
    example = EXAMPLES[name]
    decision = decide_on({"A": example.a, "B": example.b}, example.requested, models=MODELS)
    found = verdicts(example)

    best = ranking(decision)[0] if len(decision.order) else "neither"
    verdict = found.get(best, found["A"])
    row = f"| {' | '.join(example.texts)} | {best}: {verdict.reason or verdict.rejection} |"

    assert best == example.first
    assert row in PAGE, row


@pytest.mark.parametrize("clause", [f"{EARLY_FAILURES} cost", f"{ILL_HEALTH} costs", MODEL])
def test_documented_example_names_other_criteria(clause: str) -> None:
    assert f"*{clause} " in PAGE


def test_the_page_has_no_other_examples() -> None:
    section = PAGE.partition("## Examples\n")[2].partition("\n## ")[0]

    assert sum(line.startswith("| ") for line in section.splitlines()) == len(EXAMPLES) + 1
