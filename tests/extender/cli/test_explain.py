"""`idlegpu explain` for several pods, decisions and replicas."""

import asyncio
import json
import re
from collections.abc import Iterator

import pytest
import yaml
from typing_extensions import override

from extender.cli.client import Client, ClientError
from extender.insight.replicas import ALONE
from testkit.cards import IDLE, Gpu
from testkit.cli_serving import Run, build_fleet, call, runner, serving
from testkit.others import FAR, OtherReplicas, replica_world
from testkit.world import World

PODS = ("a", "b", "c")


class Elsewhere(OtherReplicas):
    """Another replica, whose answers a client fetches because it runs on another event loop."""

    def __init__(self, url: str) -> None:
        super().__init__({FAR: None})
        self._client = Client.at(url)

    @override
    async def query_one(self, address: str, path: str) -> bytes | None:
        assert address == FAR
        try:
            return (await asyncio.to_thread(self._client.text, path)).encode()
        except ClientError:
            return None


def decided(name: str, *pods: str, far: OtherReplicas | None = None) -> World:
    """Return a replica that has decided about these pods."""
    world = replica_world(name=name, far=far or OtherReplicas())
    for pod in pods:
        asyncio.run(call(world, "prioritize", "a", "b", name=pod))
        world.now += 1
    return world


@pytest.fixture
def run() -> Iterator[Run]:
    """Yield a command line for a replica that has decided about three pods."""
    with serving(decided("near", *PODS).build_app()) as url:
        yield runner(url)


def heads(text: str) -> list[str]:
    """Return the first lines of the explanations."""
    return [line.partition(":")[0] for line in text.splitlines() if line.startswith("team/")]


def test_several_pods_are_explained_one_after_the_other(run: Run) -> None:
    shown = run("explain", "team/c", "a")

    assert heads(shown.stdout) == ["team/c", "team/a"]
    assert "\n\nteam/a: " in shown.stdout
    assert shown.exit_code == 0


def test_several_decisions_are_explained_by_number_or_id(run: Run) -> None:
    shown = run("explain", "--number", "2", "--number", "near-1", "--number", "3")

    assert heads(shown.stdout) == ["team/b", "team/a", "team/c"]
    assert shown.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        pytest.param(["a", "absent", "c"], "no decision about 'absent' is remembered", id="pods"),
        pytest.param(
            ["--number", "1", "--number", "77", "--number", "near-3"],
            "decision '77' is not remembered",
            id="decisions",
        ),
    ],
)
def test_an_unknown_pod_does_not_hide_the_other_explanations(
    run: Run, arguments: list[str], reported: str
) -> None:
    shown = run("explain", *arguments)

    assert heads(shown.stdout) == ["team/a", "team/c"]
    (line,) = shown.stderr.splitlines()
    assert reported in line
    assert shown.exit_code == 1


def test_programs_can_take_several_apart(run: Run) -> None:
    as_yaml = run("explain", *PODS, "-o", "yaml").stdout
    as_json = run("explain", *PODS, "-o", "json").stdout

    reported = list(yaml.safe_load_all(as_yaml))
    assert [one["pod"] for one in reported] == [f"team/{name}" for name in PODS]
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(as_json):
        one, at = decoder.raw_decode(as_json, at)
        found.append(one)
        at += len(as_json[at:]) - len(as_json[at:].lstrip())
    assert found == reported


def test_where_several_replicas_have_a_number_the_list_shows_the_ids() -> None:
    with serving(decided("far", "theirs").build_app()) as far:
        near = decided("near", "ours", far=Elsewhere(far))
        with serving(near.build_app()) as url:
            several = runner(url)("explain", "--number", "1")
            theirs = runner(url)("explain", "--number", "far-1")
            both = runner(url)("explain", "--number", "1", "--number", "far-1")

    assert several.exit_code == 2
    assert "request it by its id, one of far-1, near-1" in several.stderr
    assert heads(theirs.stdout) == heads(both.stdout) == ["team/theirs"]
    assert (theirs.exit_code, both.exit_code) == (0, 2)
    assert "request it by its id" in both.stderr


def test_the_wide_list_of_decisions_has_their_ids() -> None:
    with serving(decided(ALONE, *PODS).build_app()) as url:
        run = runner(url)
        header, *rows = run("decisions", "-o", "wide").stdout.splitlines()
        ids = [row.split()[-1] for row in rows]
        shown = run("explain", "--number", ids[0], "--number", ids[2])

    assert header.split()[-1] == "ID"
    assert heads(shown.stdout) == ["team/c", "team/a"]


def test_the_wide_list_adds_up_the_time_of_both_calls() -> None:
    with serving(build_fleet().build_app()) as url:
        run = runner(url)
        header, row = run("decisions", "-o", "wide").stdout.splitlines()
        calls = json.loads(run("decisions", "-o", "json").stdout)["decisions"]

    took = sum(one["duration_seconds"] for one in calls)
    assert [one["verb"] for one in calls] == ["prioritize", "filter"]
    assert row[: header.index("MS") + 2].split()[-1] == f"{took * 1000:.1f}"


def many_nodes() -> World:
    """Return a fleet with a decision over more nodes of each kind than the table has."""
    world = World()
    world.add({f"idle-{number:02}": [IDLE] for number in range(15)})
    world.add({f"dead-{number:02}": [Gpu(xid=79.0)] for number in range(25)})
    world.placer.detailed = 2
    asyncio.run(call(world, "filter", *sorted(world.fleet.nodes), name="p"))
    return world


def test_programs_receive_every_candidate_with_its_verdict() -> None:
    with serving(many_nodes().build_app()) as url:
        reported = json.loads(runner(url)("explain", "p", "-o", "json").stdout)
        few = json.loads(runner(url)("explain", "p", "-o", "json", "--limit", "3").stdout)

    scored = {one["node"]: one["score"] for one in (*reported["nodes"], *reported["others"])}
    (refused,) = reported["rejected"]
    assert sorted(scored) == [f"idle-{number:02}" for number in range(15)]
    assert all(scored.values())
    assert sorted(refused["nodes"]) == [f"dead-{number:02}" for number in range(25)]
    assert (len(few["others"]), len(few["rejected"][0]["nodes"])) == (3, 20)


def test_the_wide_table_lists_every_candidate() -> None:
    with serving(many_nodes().build_app()) as url:
        wide, narrow = (runner(url)("explain", "p", "-o", o).stdout for o in ("wide", "table"))

    rows = re.findall(r"^ *[-0-9]+ +((?:idle|dead)-\d\d) ", wide, re.MULTILINE)
    assert sorted(rows) == sorted(many_nodes().fleet.nodes)
    assert wide.count("refused: node(s) had too few working GPUs") == 25
    assert "and 5 more (--limit)" in narrow
    assert "refused: " not in narrow


def test_a_node_that_is_not_kept_in_full_is_recomputed_and_called_so() -> None:
    with serving(many_nodes().build_app()) as url:
        short = runner(url)("explain", "p", "--node", "dead-07").stdout
        full = runner(url)("explain", "p", "--node", "idle-00").stdout

    head, _, detail = short.partition("recomputed from current readings")
    assert "dead-07: it was refused: node(s) had too few working GPUs" in head
    assert "dead-07, nvidia.com/gpu: 0 idle of " in detail
    assert "XID 79" in detail
    assert "recomputed" not in full
