import asyncio
import json
import sys
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from extender.core.request.request import _last_refusal
from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.fixtures import StartPrometheus, StartScheduler
from testkit.controlplane.kubelets import ENDS_AFTER, FAILS
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.plane import EXTENDER, ControlPlane
from testkit.controlplane.process import ProcessError, ServerProcess, free_port
from testkit.controlplane.record import record
from testkit.controlplane.scheduler import extender, scheduler_config
from testkit.controlplane.stub import StubExtender
from testkit.controlplane.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


async def test_the_real_scheduler_binds_a_stock_pod(
    cluster: ApiClient, control_plane: ControlPlane, start_scheduler: StartScheduler
) -> None:
    await start_scheduler(scheduler_config())
    await cluster.create_all([node("full", 0), node("free", 1)])
    stock = pod("stock", 1)
    await cluster.create(stock)

    assert await cluster.wait_bound(stock) == "free"

    async def is_shown() -> bool:
        shown = await control_plane.kubectl("describe", "pod", "stock")
        return "assigned default/stock to free" in shown

    await wait_for(is_shown, "kubectl describe has kube-scheduler's event of the binding")


async def test_kube_scheduler_calls_the_extender_and_takes_its_first_choice(
    cluster: ApiClient, start_scheduler: StartScheduler
) -> None:
    async with StubExtender(best="b") as stub:
        # A node that is created later might be unknown when the pod is placed.
        await cluster.create_all([node(name) for name in "abc"])
        await start_scheduler(scheduler_config([extender(stub.url)]))
        stock = pod("stock", 1)
        await cluster.create(stock)

        assert await cluster.wait_bound(stock) == "b"
        for verb in ("filter", "prioritize"):
            request = json.loads(stub.bodies[verb][-1])
            assert sorted(request["NodeNames"]) == ["a", "b", "c"]
            assert request["Pod"]["metadata"]["name"] == "stock"


async def test_a_pod_that_fits_nowhere_says_why(
    cluster: ApiClient, start_scheduler: StartScheduler
) -> None:
    await cluster.create(node("small", 1))
    await start_scheduler(scheduler_config())
    large = pod("large", 2)
    await cluster.create(large)

    assert "Insufficient nvidia.com/gpu" in await cluster.wait_unschedulable(large)


async def test_request_for_a_retried_pod_has_its_last_refusal(
    cluster: ApiClient, start_scheduler: StartScheduler
) -> None:
    async with StubExtender() as stub:
        await cluster.create(node("small", 1))
        await start_scheduler(scheduler_config([extender(stub.url)]))
        large = pod("large", 2)
        await cluster.create(large)
        message = await cluster.wait_unschedulable(large)
        # The scheduler watches pods and nodes apart: once it has bound a later pod, it knows the
        # status of this one, and only then may a node have it try again.
        later = pod("later", 1)
        await cluster.create(later)
        await cluster.wait_bound(later)
        await cluster.create(node("roomy", 2))

        assert await cluster.wait_bound(large) == "roomy"
        request = json.loads(stub.bodies["filter"][-1])
        assert _last_refusal(request["Pod"]["status"]) == message


async def test_a_killed_scheduler_continues_after_a_restart(
    cluster: ApiClient, start_scheduler: StartScheduler
) -> None:
    scheduler = await start_scheduler(scheduler_config())
    await cluster.create(node("a"))
    scheduler.kill()
    stock = pod("stock", 1)
    await cluster.create(stock)

    await scheduler.start()

    assert await cluster.wait_bound(stock) == "a"


@pytest.mark.parametrize(
    ("form", "node_cache_capable"),
    [pytest.param("names", True, id="names"), pytest.param("objects", False, id="objects")],
)
async def test_golden_requests_have_the_shape_that_the_scheduler_sends(
    control_plane: ControlPlane, cluster: ApiClient, form: str, node_cache_capable: bool
) -> None:
    del cluster  # only the emptiness is compared
    golden = Path(__file__).parents[1] / "contract" / "golden"

    recorded = await record(control_plane, node_cache_capable=node_cache_capable)

    for verb, body in recorded.items():
        kept = json.loads((golden / f"{verb}-{form}.json").read_bytes())
        sent = json.loads(body)
        assert shape(kept) == shape(sent), f"{verb}: python -m testkit.controlplane.record"


def shape(request: Object) -> Object:
    """Reduce a request to what is equal in every run: its fields, and which of them are null."""
    pod_fields = {"Pod.spec": sorted(request["Pod"]["spec"])}
    return pod_fields | {name: type(value).__name__ for name, value in request.items()}


async def test_kubelets_run_pods_and_end_them_by_annotations(
    cluster: ApiClient, start_scheduler: StartScheduler, kubelets: ServerProcess
) -> None:
    del kubelets
    await start_scheduler(scheduler_config())
    await cluster.create(node("a"))
    runs = pod("runs", 1)
    ends = pod("ends", 1, annotations={ENDS_AFTER: "100ms"})
    fails = pod("fails", 1, annotations={ENDS_AFTER: "100ms", FAILS: "true"})
    await cluster.create_all([runs, ends, fails])

    await cluster.wait_pod(ends, lambda pod: pod["status"]["phase"] == "Succeeded", "succeeds")
    await cluster.wait_pod(fails, lambda pod: pod["status"]["phase"] == "Failed", "fails")
    await cluster.wait_pod(runs, lambda pod: pod["status"]["phase"] == "Running", "runs")


async def test_the_extender_may_do_what_it_was_granted_and_no_more(
    cluster: ApiClient, control_plane: ControlPlane
) -> None:
    rules: list[Object] = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]

    async def may_list(client: ApiClient) -> bool:
        try:
            await client.request("GET", "/api/v1/nodes")
        except ApiError:  # until the API server's RBAC cache has the grant
            return False
        return True

    async with (
        cluster.granted(control_plane.users[EXTENDER], rules),
        control_plane.client(EXTENDER) as client,
    ):
        await wait_for(partial(may_list, client), "the extender may list nodes")
        with pytest.raises(ApiError, match="cannot list resource"):
            await client.request("GET", "/api/v1/pods")


@pytest.mark.prometheus
async def test_prometheus_scrapes_one_exporter_as_if_it_were_one_on_each_node(
    start_prometheus: StartPrometheus,
) -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=f'DCGM_FI_DEV_GPU_UTIL{{Hostname="{request.query["node"]}"}} 7\n')

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        prometheus = await start_prometheus(f"http://{host}:{port}/metrics", ["a", "b"])
        found = await wait_for(partial(both_hosts, prometheus.url), "both nodes have samples")
    finally:
        await runner.cleanup()

    assert found == {"a": "a:9400", "b": "b:9400"}


async def both_hosts(url: str) -> dict[str, str] | None:
    """Return the label `instance` by host name, None until both hosts exist."""
    query = {"query": "DCGM_FI_DEV_GPU_UTIL == 7"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/api/v1/query", params=query) as response,
    ):
        series = (await response.json())["data"]["result"]
    hosts = {item["metric"]["Hostname"]: item["metric"]["instance"] for item in series}
    return hosts if len(hosts) == 2 else None


async def test_a_server_that_ends_at_once_shows_its_last_words(tmp_path: Path) -> None:
    server = ServerProcess(
        name="broken",
        command=["/bin/sh", "-c", "echo no such flag; exit 3"],
        folder=tmp_path,
        ready_url=f"http://127.0.0.1:{free_port()}/",
    )

    with pytest.raises(ProcessError, match=r"(?s)exit status 3.*no such flag"):
        await server.start()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prctl")
async def test_servers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    start = (
        "import asyncio, pathlib, time\n"
        "from testkit.controlplane.process import ServerProcess\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "server = ServerProcess(name='sleeper', folder=folder, ready_url='',\n"
        "    command=['/bin/sh', '-c', 'echo $$ > pid.part; mv pid.part pid; exec sleep 600'])\n"
        "server.spawn()\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", start, cwd=root)

    pid = await wait_for(partial(asyncio.to_thread, pid_in, tmp_path / "pid"), "the sleeper runs")
    parent.kill()
    await parent.wait()

    await wait_for(partial(asyncio.to_thread, is_gone, pid), "the sleeper is gone")


def pid_in(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, even if its exit status was not collected."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
