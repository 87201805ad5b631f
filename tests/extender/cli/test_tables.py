"""Exact output of the commands."""

import asyncio
import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
import yaml
from rich.console import Console

from extender.cli.client import Client
from extender.cli.tables import sheet
from testkit.cards import IDLE, Gpu
from testkit.cli_serving import Run, build_fleet, call, runner, serving
from testkit.world import World
from tests.extender.cli.answers import missing

CLOCK = re.compile(r"\d\d:\d\d:\d\d")
DAY = re.compile(rf"\d\d-\d\d (?={CLOCK.pattern})")


def shown(text: str) -> str:
    """Return the output without times and durations, as on the day of the decisions."""
    if DAY.search(text):
        text = DAY.sub("", text).replace(f"{'TIME':17}", f"{'TIME':11}")
    text = re.sub(r"watched since .*", "watched since ##:##", text)
    return re.sub(r"\d+\.\d ms", "# ms", CLOCK.sub("##:##:##", text))


def read_golden() -> dict[str, str]:
    """Return the expected outputs by arguments of the command."""
    text = (Path(__file__).parent / "golden.txt").read_text(encoding="utf-8")
    parts = re.split(r"^\$ idlegpu (.+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


GOLDEN = read_golden()


@pytest.mark.parametrize("arguments", GOLDEN)
def test_a_table_is_shown_so(run: Run, arguments: str) -> None:
    result = run(*arguments.split())

    assert shown(result.stdout) == GOLDEN[arguments]
    assert result.exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    ["nodes", "gpus node-1", "best --gpus 2", "pending", "holders --idle-for 0", "decisions"],
)
def test_a_wide_table_has_all_its_columns_and_more(run: Run, arguments: str) -> None:
    narrow = run(*arguments.split()).stdout.splitlines()[0]
    wide = run(*arguments.split(), "-o", "wide").stdout.splitlines()[0]

    assert wide.startswith(narrow)
    assert len(wide.split()) > len(narrow.split())


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("nodes", "nodes"),
        ("gpus", "gpus"),
        ("top --once", "gpus"),
        ("best", "best"),
        ("defrag --for gpus=4", "plans"),
        ("pending", "pods"),
        ("holders", "holders"),
        ("costs", "costs"),
        ("decisions", "decisions"),
        ("explain fresh", "nodes"),
    ],
)
def test_programs_get_json_and_yaml_of_the_same(run: Run, arguments: str, key: str) -> None:
    as_json = json.loads(run(*arguments.split(), "-o", "json").stdout)
    as_yaml = yaml.safe_load(run(*arguments.split(), "-o", "yaml").stdout)

    assert as_json[key]
    assert as_json == as_yaml


PATHS = {
    "/v1/nodes": lambda client: client.nodes(),
    "/v1/nodes/node-1": lambda client: client.node("node-1"),
    "/v1/gpus?node=node-1": lambda client: client.gpus("node-1"),
    "/v1/best?gpus=2": lambda client: client.best(gpus=2),
    "/v1/defrag?gpus=4&limit=5": lambda client: client.defrag(gpus=4),
    "/v1/decisions?limit=100&brief=false": lambda client: client.decisions(brief=False),
    "/v1/pending": lambda client: client.pending(),
    "/v1/holders?idle_for=0": lambda client: client.holders(idle_for_seconds=0),
    "/v1/explain?pod=fresh": lambda client: client.explain("fresh"),
    "/v1/explain?pod=big": lambda client: client.explain("big"),
}


@pytest.mark.parametrize("path", PATHS)
def test_the_typed_answers_leave_nothing_out(url: str, path: str) -> None:
    client = Client.at(url)

    typed = msgspec.to_builtins(PATHS[path](client))

    assert missing(client.get(path), typed) == []


def test_option_shows_every_recorded_node_in_detail(run: Run) -> None:
    text = run("explain", "fresh", "--scores", "-o", "wide").stdout
    one = run("explain", "fresh", "--scores", "--node", "node-3").stdout
    plain = run("explain", "fresh", "--node", "node-3").stdout

    assert text.count("PART OF THE SCORE") == 4  # also for a refused pod
    assert one.count("PART OF THE SCORE") == 1
    assert plain.count("PART OF THE SCORE") == 0
    assert "\ncertain to get 2 idle GPUs; leaves none of 2 usable\n" in plain
    assert "node-3, nvidia.com/gpu: 2 idle of 2 GPUs" in one


@pytest.mark.parametrize(
    ("arguments", "reported", "status"),
    [
        pytest.param("short --node node-3", "node-3: it passed, in place ", 0, id="passed"),
        pytest.param(
            "none --node node-4",
            "node-4: it was refused: node(s) had too few working GPUs; its GPUs and readings at",
            0,
            id="refused",
        ),
        pytest.param(
            "short --node node-4",
            "node-4: it was not a candidate for this pod",
            1,
            id="no-candidate",
        ),
        pytest.param("short --node n", "n: it was not a candidate, and no node", 1, id="unknown"),
        pytest.param(
            "train --node node-1", "node-1: no decision about this pod is", 1, id="undecided"
        ),
    ],
)
def test_a_node_without_full_record_shows_its_known_data_and_the_reason(
    arguments: str, reported: str, status: int
) -> None:
    world = build_fleet()
    world.placer.detailed = 1
    asyncio.run(call(world, "prioritize", "node-1", "node-2", "node-3", name="short"))
    asyncio.run(call(world, "filter", "node-1", "node-4", name="none"))

    with serving(world.build_app()) as url:
        result = runner(url)("explain", *arguments.split())

    assert reported in result.stdout
    assert result.exit_code == status


def test_node_prediction_is_detailed_or_states_the_exclusion() -> None:
    world = build_fleet()
    world.placer.detailed = 1
    manifest = yaml.safe_dump({"kind": "Pod", "metadata": {"name": "p"}, "spec": _spec(1)})

    with serving(world.build_app()) as url:
        run = runner(url)
        last = run("explain", "-f", "-", "--node", "node-4", standard_input=manifest)
        full = run("explain", "-f", "-", "--node", "node-1", standard_input=manifest)

    assert "node-4, nvidia.com/gpu: 0 idle of 2 GPUs that the pod could land on" in last.stdout
    assert last.stdout.count("SOURCE, AGE") == 1
    assert last.exit_code == 0
    assert "node-1: kube-scheduler itself would reject it: node(s) had too few free" in full.stdout
    assert full.exit_code == 1


def test_every_pod_of_a_manifest_is_predicted(run: Run) -> None:
    manifest = "\n---\n".join(
        yaml.safe_dump(
            {
                "kind": kind,
                "metadata": {"name": f"a-{kind.lower()}"},
                "spec": spec if kind == "Pod" else {"template": {"spec": spec}},
            }
        )
        for kind, spec in (("Pod", _spec(2)), ("Deployment", _spec(4)), ("Service", {}))
    )

    result = run("explain", "-f", "-", standard_input=manifest)

    assert "default/a-pod: would go to node-2" in result.stdout
    assert "default/a-deployment: no node is suitable" in result.stdout
    assert "not candidates: 4 node(s) had too few free GPUs" in result.stdout
    assert result.exit_code == 1


def _spec(gpus: int) -> dict[str, object]:
    return {"containers": [{"name": "m", "resources": {"limits": {"nvidia.com/gpu": gpus}}}]}


def test_a_narrow_terminal_folds_and_cuts_nothing() -> None:
    console = Console(width=12, markup=False, force_terminal=False)
    name = "a-very-long-node-name-of-a-cloud"
    with console.capture() as captured:
        console.print(sheet(["NODE"], [[name]]))

    first, *lines = captured.get().splitlines()
    assert first.strip() == "NODE"
    assert "".join(line.strip() for line in lines) == name


def render(columns: list[str], row: list[str], width: int) -> list[str]:
    console = Console(width=width, markup=False, force_terminal=False)
    with console.capture() as captured:
        console.print(sheet(columns, [row]))
    return [line.rstrip() for line in captured.get().splitlines()]


NARROW = {
    60: """
POD              TIME       FREE GiB
team/train-012   10:01:00         80
""",
    34: """
                        FREE
POD            TIME      GiB
team/train-012 10:01:00   80
""",
    24: """
                    FREE
POD        TIME      GiB
team/      10:01:00   80
train-012
""",
    20: """
                FREE
POD    TIME      GiB
team/  10:01:00   80
train-
012
""",
}
"""A table by the width of the terminal."""


@pytest.mark.parametrize("width", NARROW)
def test_in_a_narrow_terminal_gaps_shrink_and_names_are_folded_first(width: int) -> None:
    lines = render(["POD", "=TIME", ">FREE GiB"], ["team/train-012", "10:01:00", "80"], width)

    assert lines == NARROW[width].strip("\n").splitlines()


def test_even_without_room_no_cell_is_truncated() -> None:
    lines = render(["POD", "=TIME", ">FREE GiB"], ["team", "10:01:00", "1234567"], 12)

    assert Counter("".join(lines).replace(" ", "")) == Counter("PODTIMEFREEGiBteam10:01:001234567")
    assert all(len(line) <= 12 for line in lines)


def test_hostile_text_can_do_nothing_to_a_terminal() -> None:
    console = Console(width=200, markup=False, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(sheet(["A"], [["[red]x[/red]\x1b]0;title\x07\x1b[2J\r"]]))

    text = captured.get()
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_times_are_this_machines(run: Run, fleet: World) -> None:
    local = datetime.fromtimestamp(fleet.now).astimezone().strftime("%H:%M:%S")

    assert local in run("decisions").stdout


def test_decisions_in_shadow_are_marked() -> None:
    world = World()
    world.placer.is_shadow = True
    world.add({"node-1": [IDLE], "node-2": [IDLE]})
    for name in ("same", "other", "waits"):
        asyncio.run(call(world, "prioritize", "node-1", "node-2", name=name))
    world.history.note_bound("uid-same", "node-1")
    world.history.note_bound("uid-other", "node-2")

    with serving(world.build_app()) as url:
        reported = runner(url)("decisions").stdout.splitlines()
        why = runner(url)("explain", "waits").stdout

    assert [re.split(" {3,}", line)[-2:] for line in reported[1:4]] == [
        ["-", "shadow"],
        ["node-2", "shadow: another"],
        ["node-1", "shadow: same"],
    ]
    assert reported[4].startswith("shadow: in shadow mode kube-scheduler does not receive")
    assert "in shadow mode kube-scheduler does not receive" in why


def test_a_gpu_with_only_an_old_reading_is_stale() -> None:
    world = World()
    old = Gpu(busy=0.9, used_gib=8.0, age=200.0, tenants=("team/lost",))
    world.add({"node-1": [old, Gpu(busy=0.9, used_gib=8.0, tenants=("team/train",))]})
    world.add_pod("lost", "node-1")
    world.add_pod("train", "node-1")
    with serving(world.build_app()) as url:
        lines = runner(url)("gpus").stdout.splitlines()

    assert re.search(r"node-1::0 .* stale +team/lost$", lines[1])
    assert re.search(r"node-1::1 .* busy +team/train$", lines[2])
