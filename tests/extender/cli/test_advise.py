"""Output of `idlegpu advise` for people and for programs."""

import json
from collections.abc import Iterator

import msgspec
import pytest
import yaml

from extender.cli.client import Client
from testkit.cli_serving import Run, runner, serving
from testkit.world import World
from tests.extender.cli.advised import build
from tests.extender.cli.answers import missing

TABLE = """\
CARD   MODEL            REPLICAS   IN USE   ACTIVITY   MEMORY GiB   ADVICE         BETTER   HOW
s::0   H100 80GB HBM3          4        2       100%        20/80   do-not-share        1   -
w::0   H100 80GB HBM3          1        1         5%       8.0/80   share               9   MIG 7x 1g.10gb
s::1   H100 80GB HBM3          4        0         0%         0/80   not-measured        -   -

POD        NODE   GPUS   ACTIVITY   MEMORY GiB   ADVICE              REQUESTED GiB   BETTER GiB
team/big   w         1         5%       8.0/80   requests-too-much              40           10
team/big   w         1         5%       8.0/80   uses-a-tenth                   40            -
based on up to 60 samples of each of 3 GPUs, over 59m (memory); at least 15 are needed

3 free GPUs are stranded:
NODE   STRANDED   FREE   LACKS   LEFT     NEED EACH          HELD BY
z             3      4   cpu     8 CPUs   8 CPUs (assumed)   team/build (75%), team/web (12%)
z: keep pods without GPUs off the node (kubectl taint node z nvidia.com/gpu=present:NoSchedule), and restart the pods listed here elsewhere
"""  # noqa: E501 - as people see it


@pytest.fixture(scope="module")
def advising() -> Iterator[str]:
    with serving(build().build_app()) as address:
        yield address


@pytest.fixture
def advise(advising: str) -> Run:
    return runner(advising)


def test_table_shows_cards_pods_and_the_measured_period(advise: Run) -> None:
    result = advise("advise")

    assert result.stdout == TABLE
    assert result.exit_code == 0


def test_a_wide_table_says_why(advise: Run) -> None:
    text = advise("advise", "-o", "wide").stdout

    assert "2 of 4 replicas in use, which together use 100% busy" in text
    assert "requests 40.0 GiB of each GPU and never used more than" in text
    assert "Deployment big" in text
    assert "until there are, the default is 2 replicas of 39.5 GiB" in text


def test_programs_get_json_and_yaml_of_the_same_with_every_field(
    advise: Run, advising: str
) -> None:
    as_json = json.loads(advise("advise", "-o", "json").stdout)
    as_yaml = yaml.safe_load(advise("advise", "-o", "yaml").stdout)
    client = Client.at(advising)
    plain = client.get("/v1/advice")

    assert as_json == as_yaml
    assert missing(plain, msgspec.to_builtins(client.advice())) == []
    assert len(as_json["cards"]) == 3
    assert len(as_json["pods"]) == 2


def test_single_node_output_counts_omitted_findings(advise: Run) -> None:
    alone = advise("advise", "--node", "w").stdout
    few = advise("advise", "--limit", "1").stdout

    assert "w::0" in alone
    assert "s::0" not in alone
    assert "and 2 more (--limit)" in few
    assert "and 1 more (--limit)" in few


def test_stranded_gpus_are_no_room_for_a_pod(advise: Run) -> None:
    one = advise("best").stdout
    two = advise("best", "--gpus", "2", "--model", "H100")

    assert "IDLE   CHANCE   ACTIVITY   FREE GiB   STRANDED   WHY" in one
    assert "1 node(s) had stranded GPUs: too little CPU, memory or ephemeral storage" in two.stdout
    assert two.exit_code == 1


def test_a_fleet_without_advice_says_so() -> None:
    world = World()
    world.register_node("w", gpus=1)
    with serving(world.build_app()) as address:
        result = runner(address)("advise")

    assert result.stdout.splitlines() == [
        "no GPU should be shared differently",
        "",
        "no pod is known to request far more, or less, than it uses",
        "no samples yet of GPUs that pods hold",
    ]
    assert result.exit_code == 0


def test_time_before_all_records_is_refused(advise: Run) -> None:
    result = advise("advise", "--over", "1d")

    assert result.exit_code == 2
    assert "over='86400' must be at most 3600" in result.stderr
