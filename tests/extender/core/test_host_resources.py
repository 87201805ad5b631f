"""CPU, memory and ephemeral storage that pods request of their node."""

import pytest

from extender.core.nodes.host_resources import HostResources, requested

GIB = 1 << 30


def container(cpu: object = None, memory: object = None, **more: object) -> dict[str, object]:
    said = {"cpu": cpu, "memory": memory}
    requests = {name: value for name, value in said.items() if value is not None}
    return {"resources": {"requests": requests}, **more}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({}, (0, 0), id="nothing"),
        pytest.param({"containers": [{}]}, (0, 0), id="no-requests"),
        pytest.param(
            {"containers": [container("500m", "1Gi"), container(2)]}, (2500, GIB), id="together"
        ),
        pytest.param(
            {"containers": [container("1")], "initContainers": [container("4", "2Gi")]},
            (4000, 2 * GIB),
            id="an-init-container-runs-before",
        ),
        pytest.param(
            {
                "containers": [container("1")],
                "initContainers": [container("1", restartPolicy="Always"), container("4")],
            },
            (5000, 0),
            id="beside-a-sidecar",
        ),
        pytest.param(
            {"containers": [container("1")], "overhead": {"cpu": "250m"}}, (1250, 0), id="overhead"
        ),
        pytest.param(
            {"containers": [container("1", "1Gi")], "resources": {"requests": {"cpu": "6"}}},
            (6000, GIB),
            id="what-the-pod-says-itself",
        ),
        pytest.param(
            {
                "containers": [{"resources": {"requests": {"ephemeral-storage": "2Gi"}}}] * 2,
                "resources": {"requests": {"cpu": "6"}},
                "overhead": {"ephemeral-storage": "1Gi"},
            },
            (6000, 0, 5 * GIB),
            id="storage-is-requested-by-containers-alone",
        ),
        pytest.param({"containers": [container("lots", "-1")]}, (0, 0), id="unreadable"),
        pytest.param({"containers": [container("0.1m")]}, (1, 0), id="rounded-up"),
    ],
)
def test_requests_add_up_as_kube_scheduler_adds_them(
    spec: dict[str, object], expected: tuple[int, ...]
) -> None:
    assert requested({"spec": spec}) == HostResources(*expected)
