"""`idlegpu doctor` as a command."""

import json
from pathlib import Path

import pytest
import yaml

from extender.cli.commands.doctor import CHECKS
from testkit.cli_serving import Run
from tests.extender.cli.doctor.things import GPU, entry, node, pod


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Return files of a cluster whose scheduler has one fault."""
    heavy = {"plugins": {"score": {"enabled": [{"name": "NodeResourcesFit", "weight": 100}]}}}
    kind = "KubeSchedulerConfiguration"
    scheduler = {"kind": kind, "profiles": [heavy], "extenders": [entry()]}
    (tmp_path / "scheduler.yaml").write_text(yaml.safe_dump(scheduler))
    nodes = [node(f"node-{at}", allocatable={GPU: "7"}) for at in range(7)]
    (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": nodes}))
    return [str(tmp_path / name) for name in ("scheduler.yaml", "nodes.json")]


def test_a_finding_is_reported_with_evidence_and_remedy(run: Run, files: list[str]) -> None:
    result = run("doctor", "--offline", *files)

    lines = result.stdout.splitlines()
    assert lines[0].startswith("IG004 error  profile default-scheduler: kube-scheduler's own")
    assert lines[1].strip().startswith(f"{files[0]}: weight: 1: idlegpu's first choice counts 4000")
    assert lines[3].strip().startswith("-> weight: 7: put it into the file")
    assert "      ... and 2 more (-o wide)" in lines
    assert any(line.endswith(" checks could not run: pods: not given") for line in lines)
    assert lines[-1].startswith("findings: 1 error, 1 warning, 0 info; checks passed: ")
    assert result.exit_code == 1


def test_wide_reports_all_evidence(run: Run, files: list[str]) -> None:
    result = run("doctor", "--offline", *files, "-o", "wide")

    assert "node-6: nvidia.com/gpu: capacity 8, allocatable 7" in result.stdout
    assert "more (-o wide)" not in result.stdout
    assert "IG105 could not run  every GPU node is measured: pods: not given" in result.stdout


def test_checks_that_lack_the_same_facts_are_counted_in_one_line(
    run: Run, files: list[str]
) -> None:
    shown = run("doctor", "--offline", *files).stdout.splitlines()

    whys = [line.partition(": ")[2] for line in shown if "could not run" in line][:-1]
    assert whys
    assert len(whys) == len(set(whys))


def test_json_is_whole_and_a_warning_is_no_failure(run: Run, files: list[str]) -> None:
    result = run("doctor", "--offline", files[1], "-o", "json")

    report = json.loads(result.stdout)
    assert [one["code"] for one in report["findings"]] == ["IG203"]
    assert report["findings"][0]["severity"] == "warning"
    assert len(report["findings"][0]["evidence"]) == 7
    reported = {one["code"] for one in report["findings"] + report["not_run"]} | {*report["passed"]}
    assert reported == {check.code for check in CHECKS}
    assert result.exit_code == 0


def test_hostile_names_do_nothing_to_a_terminal(run: Run, tmp_path: Path) -> None:
    bad = pod("x\x1b[31m", 1, env={"CUDA_VISIBLE_DEVICES": "[red]7[/red]"})
    (tmp_path / "pods.json").write_text(json.dumps({"kind": "List", "items": [bad]}))

    result = run("doctor", "--offline", str(tmp_path / "pods.json"))

    assert "\x1b" not in result.stdout
    assert "[red]7[/red]" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--offline"], "--offline checks files only: name some"),
        (["--offline", "/nowhere"], "cannot read /nowhere: No such file"),
        (["--account", "idlegpu"], "account 'idlegpu': must be namespace/name"),
    ],
)
def test_wrong_usage_is_reported(run: Run, arguments: list[str], words: str) -> None:
    result = run("doctor", *arguments)

    assert words in result.stderr
    assert result.exit_code == 2


def test_extender_is_queried_without_a_cluster(run: Run) -> None:
    result = run("doctor", "-o", "json", KUBECONFIG="/nowhere")

    report = json.loads(result.stdout)
    why = {one["code"]: one["why"] for one in report["not_run"]}
    assert "kubeconfig /nowhere: no such file" in why["IG203"]
    # This server has no /v1/bypassed.
    assert "IG101" not in why


def test_common_cause_of_skipped_checks_is_reported_once(run: Run) -> None:
    result = run("doctor", KUBECONFIG="/nowhere")

    lines = result.stdout.splitlines()
    why = "kubeconfig /nowhere: no such file: set another one with --kubeconfig (KUBECONFIG)"
    summary = next(line for line in lines if line.endswith(f" checks could not run: {why}"))
    assert int(summary.split()[0]) > 10
    # A check that also lacks something else has its own line.
    assert [line for line in lines if why in line] == [f"(1) {why}", summary]
    assert "IG203 could not run" not in result.stdout
    assert "IG203 could not run" in run("doctor", "-o", "wide", KUBECONFIG="/nowhere").stdout


def test_doctor_prints_one_line_without_cluster_and_extender(run: Run) -> None:
    result = run("doctor", IDLEGPU_URL="", KUBECONFIG="/nowhere")

    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "idlegpu: nothing could be checked: kubeconfig /nowhere: no such file: set another one "
        "with --kubeconfig (KUBECONFIG); or connect to an extender directly, --url (IDLEGPU_URL)"
    ]
    assert result.exit_code == 3
