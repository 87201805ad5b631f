"""Output of `idlegpu defrag`."""

import pytest

from extender.answers.fleet import MovePlan
from extender.cli.commands.defrag import _rows
from testkit.cli_serving import Run


def test_defrag_names_the_pods_to_move(run: Run) -> None:
    result = run("defrag", "--for", "gpus=4")

    assert "team/train" in result.stdout
    assert "Job train" in result.stdout


def test_defrag_names_nodes_with_room(run: Run) -> None:
    result = run("defrag", "--for", "gpus=2")

    assert result.exit_code == 0
    assert "room for 2 nvidia.com/gpu already" in result.stdout


def test_a_node_whose_pods_are_being_deleted_needs_no_move() -> None:
    (row,) = _rows(MovePlan(node="a", free=2, fits=True, moves=[]))

    assert row[:4] == ["a", "2", "0", "pods being deleted hold the rest"]


@pytest.mark.parametrize("text", ["8", "gpus=0", "gpus=x", "gpus=2000", "cpus=8"])
def test_bad_input_reports_allowed_values(run: Run, text: str) -> None:
    result = run("defrag", "--for", text)

    assert result.exit_code == 2
    assert "must be gpus=N with N from 1 to 1024, such as gpus=8" in " ".join(
        result.stderr.split()
    ).replace("│ ", "").replace(" │", "")
