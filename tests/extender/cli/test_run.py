"""Jobs and pods of `idlegpu run`: printed, submitted, and nvidia-smi on a node."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from extender.cli.client import Client, ClientError
from extender.cli.manifests import (
    HOLD,
    IMAGE,
    GpuJob,
    nested_pods,
    only_scheduler,
    owner_of,
    pods_of,
)
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import parse_request
from testkit.cli_serving import Run, runner, serving

Object = dict[str, Any]


class FakeCluster:
    """API server that accepts Jobs and pods, and runs each pod at once.

    Attributes:
        created: submitted objects by path.
        deleted: paths of deleted objects.
        phase: final phase of pods; "" if they do not end.
        reads_nodes: whether the caller may read nodes; all exist except `absent`.
        schedulers: schedulers that call the extender; None if it does not answer.
        log: log of the pods; None if their kubelet does not answer.
    """

    def __init__(self) -> None:
        self.created: list[tuple[str, Object]] = []
        self.deleted: list[str] = []
        self.phase = "Succeeded"
        self.log: str | None = "NVIDIA-SMI 580\n\x1b[31mGPU 0\n"
        self.refuses = False
        self.reads_nodes = True
        self.schedulers: list[str] | None = None

    def build_app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._create)
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_delete("/{path:.*}", self._delete)
        return app

    async def _create(self, request: web.Request) -> web.Response:
        if self.refuses:
            status = {"kind": "Status", "message": "pods is forbidden: User cannot create"}
            return web.json_response(status, status=403)
        item = await request.json()
        self.created.append((request.path, item))
        return web.json_response(item, status=201)

    async def _get(self, request: web.Request) -> web.Response:
        if request.path.endswith("/log"):
            if self.log is None:
                return web.json_response({"kind": "Status", "message": "no route"}, status=500)
            return web.Response(text=self.log)
        if request.path.startswith("/api/v1/nodes/") and not self.reads_nodes:
            return web.json_response({"kind": "Status", "message": "forbidden"}, status=403)
        if request.path == "/api/v1/nodes/absent":
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        if request.path.endswith("/v1/bypassed") and self.refuses:
            return web.json_response({"error": "no token"}, status=401)
        if request.path.endswith("/v1/bypassed") and self.schedulers is not None:
            known = {"unjudged": 0, "bound": [], "likely_causes": [], "schedulers": self.schedulers}
            return web.json_response(known)
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "message": "0/1 nodes are available",
        }
        status: Object = {"phase": self.phase or "Pending"}
        if not self.phase:
            status["conditions"] = [condition]
        if self.phase == "Failed":
            ended = {"terminated": {"reason": "Error", "message": "no devices were found"}}
            status["containerStatuses"] = [{"state": ended}]
        return web.json_response({"status": status})

    async def _delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.path)
        return web.json_response({})


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def kubeconfig(cluster: FakeCluster, tmp_path: Path) -> Iterator[Path]:
    with serving(cluster.build_app()) as url:
        context = {"cluster": "c", "user": "u", "namespace": "team"}
        config = {
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump(config))
        yield file


@pytest.fixture
def submit(kubeconfig: Path) -> Run:
    run = runner("")

    def submit(*arguments: str, **environment: str) -> Any:
        return run(*arguments, **{"IDLEGPU_URL": "", "KUBECONFIG": str(kubeconfig), **environment})

    return submit


def printed(run: Run, *arguments: str) -> Object:
    result = run("run", *arguments)
    assert result.exit_code == 0, result.output
    item: Object = yaml.safe_load(result.stdout)
    return item


def test_dry_run_prints_a_job_with_the_options(run: Run) -> None:
    job = printed(
        run, "--gpus", "2", "--model", "A100,H100", "--memory", "20Gi", "--cpu", "8", "--name",
        "mine", "-n", "team", "--scheduler", "idlegpu-scheduler", "--", "python", "t.py", "--lr=1",
    )  # fmt: skip

    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert (job["kind"], job["metadata"]) == ("Job", {"name": "mine", "namespace": "team"})
    assert container["command"] == ["python", "t.py", "--lr=1"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2", "cpu": "8"}}
    assert pod["spec"]["schedulerName"] == "idlegpu-scheduler"
    assert pod["spec"]["tolerations"][1:] == [
        {
            "key": "idlegpu.io/scheduler", "operator": "Equal", "value": "idlegpu-scheduler",
            "effect": "NoSchedule",
        }
    ]  # fmt: skip
    parsed = parse_request(pod, resources=ResourceNames(), defaults=Policy())
    assert parsed.problems == ()
    assert parsed.request is not None
    assert parsed.request.preferred_models == ("A100", "H100")
    assert parsed.request.memory_bytes == 20 << 30


def test_there_is_one_job_for_each_target(run: Run) -> None:
    made = printed(
        run, "--require-model", "H100", "--target", "gpu-1::0,1", "--target", "gpu-2",
        "--name", "t", "--", "true",
        "--", "true",
    )  # fmt: skip

    jobs = made["items"]
    assert [job["metadata"]["name"] for job in jobs] == ["t-0", "t-1"]
    assert [job["spec"]["template"]["metadata"]["annotations"] for job in jobs] == [
        {"idlegpu.io/require-models": "H100", "idlegpu.io/target": node}
        for node in ("gpu-1::0,1", "gpu-2")
    ]


def test_environment_shared_memory_node_and_time_limit_are_set(run: Run) -> None:
    job = printed(
        run, "--env", "EPOCHS=3", "--env", "A=b=c", "--shm", "16Gi", "--node", "gpu-1",
        "--timeout", "90m", "--", "true",
    )  # fmt: skip

    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["env"] == [
        {"name": "EPOCHS", "value": "3"}, {"name": "A", "value": "b=c"},
    ]  # fmt: skip
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert spec["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    ]
    assert spec["nodeSelector"] == {"kubernetes.io/hostname": "gpu-1"}
    assert spec["activeDeadlineSeconds"] == 5400


@pytest.mark.parametrize(
    "option", [("--env", "EPOCHS"), ("--env", "1=2"), ("--timeout", "90"), ("--timeout", "0m")]
)
def test_a_wish_that_cannot_be_read_is_refused(run: Run, option: tuple[str, str]) -> None:
    result = run("run", *option, "--", "true")

    assert result.exit_code == 2
    assert f"{option[1]!r}: must be" in result.stderr


def test_client_submits_the_job_that_the_command_prints(
    run: Run, cluster: FakeCluster, kubeconfig: Path
) -> None:
    printed_job = printed(
        run, "--gpus", "2", "--image", "i", "--env", "EPOCHS=3", "--model", "H100", "--memory",
        "20Gi", "--cpu", "8", "--ram", "64Gi", "--shm", "16Gi", "--timeout", "90m", "--name",
        "mine", "--scheduler", "idlegpu-scheduler", "--", "python", "t.py",
    )  # fmt: skip
    cluster.schedulers = ["idlegpu-scheduler"]
    job = GpuJob(
        command=["python", "t.py"], gpus=2, image="i", env={"EPOCHS": "3"}, model="H100",
        memory="20Gi", cpu="8", ram="64Gi", shm="16Gi", timeout_seconds=5400, name="mine",
    )  # fmt: skip

    made = Client.in_cluster_of(str(kubeconfig)).submit(job)

    assert made == printed_job
    assert cluster.created == [("/apis/batch/v1/namespaces/team/jobs", printed_job)]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"env": {"1": "2"}}, "'1': must be a variable's name"),
        ({"shm": "9x"}, "shm: '9x' is not a quantity: must be a number"),
        ({"gpus": 0}, "must be at least 1"),
        ({"command": "python a.py"}, "command 'python a.py': must be a list of words"),
        ({"target": "gpu-1::x"}, "target 'gpu-1::x': must be 1 to 32 nodes"),
        ({"memory": "20"}, "memory '20': must be a quantity from 1Mi to 16Ti, such as 20Gi"),
        ({"model": "H100;A100"}, "model 'H100;A100': must be 1 to 16 models"),
        ({"require_model": ""}, "require_model '': must be 1 to 16 models"),
        ({"strategy": "best"}, "strategy 'best': must be auto, spread or pack"),
    ],
)
def test_the_client_refuses_a_wish_that_cannot_be_read(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ClientError, match=message):
        GpuJob(**wish)


def test_an_annotation_that_the_extender_would_not_read_is_refused_at_once(run: Run) -> None:
    result = run("run", "--target", "gpu-1::x", "--", "true")

    assert result.exit_code == 2
    assert result.stderr.startswith(
        "idlegpu: target 'gpu-1::x': must be 1 to 32 nodes separated by semicolons"
    )


def test_without_wishes_nothing_is_annotated(run: Run) -> None:
    job = printed(run, "--", "nvidia-smi")

    assert "metadata" not in job["spec"]["template"]
    assert "schedulerName" not in job["spec"]["template"]["spec"]
    assert job["metadata"]["name"].startswith("nvidia-smi-")


def test_a_pod_to_work_in_is_printed(run: Run) -> None:
    pod = printed(run, "--hold", "--require-idle", "--strategy", "pack")

    assert pod["kind"] == "Pod"
    assert pod["metadata"]["annotations"] == {
        "idlegpu.io/strategy": "pack",
        "idlegpu.io/require-idle": "true",
    }
    assert pod["spec"]["containers"][0]["command"] == ["sleep", "infinity"]


@pytest.mark.parametrize(
    ("schedulers", "options", "chosen", "reported"),
    [
        (
            ["idlegpu-scheduler"],
            [],
            "idlegpu-scheduler",
            "schedulers that call idlegpu: idlegpu-scheduler",
        ),
        (["default-scheduler"], [], None, "schedulers that call idlegpu: default-scheduler"),
        (["a", "b"], [], None, "schedulers that call idlegpu: a, b"),
        ([], [], None, "schedulers that call idlegpu: none known"),
        (None, [], None, "idlegpu does not answer"),
        (["idlegpu-scheduler"], ["--scheduler", "mine"], "mine", None),
    ],
)
def test_the_only_scheduler_that_calls_us_places_it_and_its_name_is_printed(
    submit: Run,
    cluster: FakeCluster,
    schedulers: list[str] | None,
    options: list[str],
    chosen: str | None,
    reported: str | None,
) -> None:
    cluster.schedulers = schedulers

    result = submit("run", *options, "--", "true")

    spec = yaml.safe_load(result.stdout)["spec"]["template"]["spec"]
    assert spec.get("schedulerName") == chosen
    name = chosen or "default-scheduler"
    line = f"{name} will place it (--scheduler NAME for another): {reported}\n"
    assert result.stderr == ("" if reported is None else line)
    assert len(spec["tolerations"]) == (1 if chosen is None else 2)


def test_that_the_extender_wants_a_token_is_printed(submit: Run, cluster: FakeCluster) -> None:
    cluster.refuses = True

    result = submit("run", "--", "true")

    assert result.stderr.startswith("default-scheduler will place it (--scheduler NAME for")
    assert "wants a valid token: no token; give one with --token" in result.stderr


def test_job_goes_to_the_namespace_of_the_kubeconfig(submit: Run, cluster: FakeCluster) -> None:
    result = submit("run", "--apply", "--name", "mine", "--", "true")

    ((path, item),) = cluster.created
    assert path == "/apis/batch/v1/namespaces/team/jobs"
    assert item["metadata"]["name"] == "mine"
    assert result.stdout == "job/mine\n"
    assert "kubectl -n team logs -f job/mine" in result.stderr


def test_interactive_pod_is_submitted_with_its_delete_command(
    submit: Run, cluster: FakeCluster
) -> None:
    result = submit("run", "--apply", "--hold", "--name", "mine", "-n", "other")

    assert cluster.created[0][0] == "/api/v1/namespaces/other/pods"
    assert "kubectl -n other delete pod mine" in result.stderr


def test_api_server_refusal_is_reported(submit: Run, cluster: FakeCluster) -> None:
    cluster.refuses = True

    result = submit("run", "--apply", "--", "true")

    assert "refuses this: pods is forbidden" in result.stderr
    assert result.exit_code == 4


def test_submitting_takes_a_kubeconfig(run: Run, tmp_path: Path) -> None:
    result = run("run", "--apply", "--kubeconfig", str(tmp_path / "none"), "--", "true")

    assert "no such file" in result.stderr
    assert result.exit_code == 2


# --- smoke ----------------------------------------------------------------------------------------


def test_smoke_prints_nvidia_smi_output_and_deletes_the_pod(
    submit: Run, cluster: FakeCluster
) -> None:
    result = submit("smoke", "node-7")

    ((path, item),) = cluster.created
    terms = item["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert terms[0]["matchFields"][0]["values"] == ["node-7"]
    assert item["spec"]["containers"][0]["command"] == ["nvidia-smi"]
    assert result.stdout == "NVIDIA-SMI 580\n?[31mGPU 0\n"
    assert cluster.deleted == [f"{path}/{item['metadata']['name']}"]
    assert result.exit_code == 0


def test_a_smoke_that_fails_says_why_and_still_deletes_the_pod(
    submit: Run, cluster: FakeCluster
) -> None:
    cluster.phase = "Failed"

    result = submit("smoke", "node-7")

    assert "nvidia-smi failed on node-7: no devices were found" in result.stderr
    assert len(cluster.deleted) == 1
    assert result.exit_code == 1


def test_smoke_refuses_a_node_that_does_not_exist(submit: Run, cluster: FakeCluster) -> None:
    result = submit("smoke", "absent")

    assert "node 'absent' does not exist: `kubectl get nodes` lists" in result.stderr
    assert cluster.created == []
    assert result.exit_code == 1


def test_smoke_needs_no_right_to_read_nodes(submit: Run, cluster: FakeCluster) -> None:
    cluster.reads_nodes = False

    assert submit("smoke", "node-7").exit_code == 0


def test_smoke_reports_why_the_pod_waits_after_the_timeout(
    submit: Run, cluster: FakeCluster
) -> None:
    cluster.phase = ""

    result = submit("smoke", "node-7", "--wait", "0s")

    assert "has not ended within 0s (--wait): 0/1 nodes are available" in result.stderr
    assert len(cluster.deleted) == 1
    assert result.exit_code == 1


def test_output_that_cannot_be_read_is_no_failure_of_the_gpu(
    submit: Run, cluster: FakeCluster
) -> None:
    cluster.log = None

    result = submit("smoke", "node-7", "--keep")

    assert "its output cannot be read" in result.stdout
    assert cluster.deleted == []
    assert result.exit_code == 0


@pytest.mark.parametrize(("phase", "status"), [("Succeeded", 0), ("Failed", 1)])
def test_programs_receive_the_outcome_of_a_smoke_test(
    submit: Run, cluster: FakeCluster, phase: str, status: int
) -> None:
    cluster.phase = phase

    result = submit("smoke", "node-7", "-o", "json")

    ((_, item),) = cluster.created
    reported = json.loads(result.stdout)
    assert reported["node"] == "node-7"
    assert reported["pod"] == f"team/{item['metadata']['name']}"
    assert reported["output"].startswith("NVIDIA-SMI 580")
    assert (reported["succeeded"], reported["why"]) in {
        (True, None),
        (False, "no devices were found"),
    }
    assert (reported["succeeded"], result.exit_code) == (phase == "Succeeded", status)
    assert len(cluster.deleted) == 1


@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_a_dry_smoke_prints_its_pod_and_runs_nothing(
    submit: Run, cluster: FakeCluster, output: str
) -> None:
    result = submit("smoke", "n", "--dry-run", "-o", output)

    assert yaml.safe_load(result.stdout)["kind"] == "Pod"
    assert result.exit_code == 0
    assert cluster.created == []


def test_a_dry_smoke_needs_no_cluster(run: Run) -> None:
    result = run("smoke", "node-7", "--dry-run", KUBECONFIG="/nowhere")

    assert yaml.safe_load(result.stdout)["kind"] == "Pod"
    assert result.exit_code == 0


# --- manifests ------------------------------------------------------------------------------------


def test_a_job_runs_once_and_is_deleted_a_day_after_it_has_ended() -> None:
    container = {
        "name": "main",
        "image": IMAGE,
        "command": ["true"],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    spec = {"restartPolicy": "Never", "tolerations": [toleration], "containers": [container]}

    assert GpuJob(command=["true"], name="j").manifest() == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j"},
        "spec": {
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": 24 * 3600,
            "template": {"spec": spec},
        },
    }
    held = GpuJob(is_held=True, name="h", namespace="n", image="i", target="a").manifest()
    assert held == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "h", "namespace": "n", "annotations": {"idlegpu.io/target": "a"}},
        "spec": {**spec, "containers": [{**container, "image": "i", "command": list(HOLD)}]},
    }
    image_alone = GpuJob(name="j").manifest()["spec"]["template"]["spec"]["containers"][0]
    assert "command" not in image_alone


@pytest.mark.parametrize(
    ("job", "prefix"),
    [
        (GpuJob(command=["/opt/Train.py", "--all", "x"]), "train-py-all"),
        (GpuJob(command=["x" * 70]), "x" * 40),
        (GpuJob(), "gpu"),
        (GpuJob(is_held=True), "hold"),
        (GpuJob(is_held=True, command=["a"]), "hold"),
    ],
)
def test_a_name_is_made_of_the_command_and_a_suffix(job: GpuJob, prefix: str) -> None:
    name = job.manifest()["metadata"]["name"]

    assert re.fullmatch(r"[a-z0-9]{5}", name.removeprefix(f"{prefix}-")), name
    assert name != job.manifest()["metadata"]["name"]


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ({"kind": "Pod", "metadata": {"name": "p"}, "spec": {}}, ["default/p"]),
        ({"kind": "Pod", "metadata": {"name": "p", "namespace": "n"}, "spec": {}}, ["n/p"]),
        ({"kind": "Pod", "metadata": {"name": "p"}}, []),
        ({"kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": {"spec": {}}}},
         ["default/d"]),
        ({"kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": 5}}, []),
        ({"kind": "CronJob", "metadata": {"name": "c"}, "spec": {
            "jobTemplate": {"spec": {"template": {"spec": {}}}}}}, ["default/c"]),
        ({"kind": "PodList", "items": [{"kind": "Pod", "spec": {}}, 5]}, ["default/"]),
        ({"kind": "Service", "spec": {}}, []),
        ("text", []),
    ],
)  # fmt: skip
def test_the_pods_of_a_manifest_are_found(document: object, names: list[str]) -> None:
    found = [one["metadata"] for one in pods_of(document)]

    assert [f"{one['namespace']}/{one['name']}" for one in found] == names


@pytest.mark.parametrize(
    "kind", ["Job", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController"]
)
def test_the_pods_of_each_controller_are_found(kind: str) -> None:
    document = {"kind": kind, "spec": {"template": {"metadata": {"labels": {}}, "spec": {}}}}

    (found,) = pods_of(document, "n")
    assert found["metadata"] == {"name": "", "namespace": "n", "labels": {}}
    (template,) = pods_of({"kind": "PodTemplate", "template": {"spec": {}}})
    assert template["kind"] == "Pod"


@pytest.mark.parametrize(
    ("document", "owner"),
    [
        ({"kind": "Deployment", "metadata": {"name": "d"}}, "Deployment/d"),
        ({"kind": "Deployment"}, ""),
        ({"kind": "Pod", "metadata": {"name": "p"}}, ""),
        ({"kind": "PodTemplate", "metadata": {"name": "p"}}, ""),
        ({"metadata": {"name": "p"}}, ""),
        ("text", ""),
    ],
)
def test_a_manifests_object_owns_its_pods_unless_it_is_one(document: object, owner: str) -> None:
    assert owner_of(document) == owner


def test_each_list_of_containers_in_a_manifest_is_a_pod() -> None:
    spec = {"containers": [{"image": "i"}]}
    document = {
        "kind": "RayService",
        "metadata": {"namespace": "n"},
        "spec": [{"template": spec}, {"containers": []}, {"containers": "x"}, {"head": [spec]}],
    }

    found = list(nested_pods(document, "default"))

    assert [one["spec"] for one in found] == [spec, spec]
    assert {one["metadata"]["namespace"] for one in found} == {"n"}


@pytest.mark.parametrize(
    ("schedulers", "name"),
    [(["mine"], "mine"), (["default-scheduler"], ""), (["a", "b"], ""), ([], "")],
)
def test_only_a_single_scheduler_of_its_own_name_is_named(schedulers: list[str], name: str) -> None:
    assert only_scheduler(schedulers) == name
