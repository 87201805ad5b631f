"""Several real extenders: each returns the decisions of the others, over HTTP and over TLS."""

from pathlib import Path
from typing import Any

import aiohttp

from simulation.objects import pod_object
from testkit.certificates import issue
from testkit.replicas import Replica, described, running


async def read(replica: Replica, path: str, status: int = 200) -> Any:
    """Send a GET to the API, at the address that was opened last."""
    url = replica.extender.addresses[-1]
    async with aiohttp.ClientSession() as session, session.get(f"{url}{path}") as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def test_any_replica_shows_the_decisions_of_the_others() -> None:
    async with running(3) as (cluster, (first, second, third)):
        for name, replica in (("a", first), ("b", second)):
            await replica.choose(cluster.control.create_pod(pod_object(name)))

        shown = await read(third, "/v1/decisions?brief=true")
        (found,) = (await read(third, "/v1/decisions?pod=default/a"))["decisions"]
        one = await read(second, f"/v1/decisions/{found['id']}")

    assert [each["pod"] for each in shown["decisions"]] == ["default/b", "default/a"]
    assert shown["unreachable"] == []
    assert one == found
    assert one["explained"]


async def test_a_replica_that_is_gone_is_named_and_the_others_are_shown() -> None:
    async with described(2) as replicas, replicas.start(0) as stays:
        async with replicas.start(1) as goes:
            await stays.receive_all()
            await goes.choose(replicas.cluster.control.create_pod(pod_object("theirs")))
            await stays.choose(replicas.cluster.control.create_pod(pod_object("ours")))
            both = await read(stays, "/v1/decisions?brief=true")

        one = await read(stays, "/v1/decisions?brief=true")

    assert [each["pod"] for each in both["decisions"]] == ["default/ours", "default/theirs"]
    assert [each["pod"] for each in one["decisions"]] == ["default/ours"]
    assert one["unreachable"] == [replicas.addresses[1]]


async def test_over_tls_only_replicas_may_read(tmp_path: Path) -> None:
    issue(tmp_path)
    async with running(2, tls=tmp_path) as (cluster, (one, other)):
        await one.choose(cluster.control.create_pod(pod_object("a")))

        shown = await read(other, "/v1/decisions")
        # kube-scheduler's certificate is valid for the webhooks, but not for the replicas' routes.
        async with one.session.get(f"{one.url}/v1/peers/decisions") as answer:
            refused = answer.status

    assert [each["pod"] for each in shown["decisions"]] == ["default/a"]
    assert shown["unreachable"] == []
    assert refused == 403


async def test_any_replica_explains_decisions_of_another() -> None:
    async with running(2) as (cluster, (first, second)):
        await first.choose(cluster.control.create_pod(pod_object("a")))
        (decided,) = (await read(second, "/v1/decisions?brief=true"))["decisions"]
        explained = await read(second, f"/v1/explain?id={decided['id']}")
        by_number = await read(second, "/v1/explain?number=1")
        regret = await read(second, "/v1/regret")
        (waiting,) = (await read(second, "/v1/pending"))["pods"]

    assert waiting["decision"]["id"] == decided["id"]
    assert explained["pod"] == "default/a"
    assert explained["nodes"]
    assert by_number["decision"] == explained["decision"]
    assert regret["unreachable"] == []
