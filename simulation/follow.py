"""Update the fleet from the pods of a real API server, as kubelets would.

It only reads: kwok or the test sets the phases of pods.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import orjson
from kubernetes_asyncio.client import ApiClient, CoreV1Api

from simulation.fleet import SimulatedFleet
from simulation.kubelet import observe_pod, pod_ref
from simulation.objects import JsonObject

logger = logging.getLogger(__name__)

_WATCH_SECONDS: Final = 300


async def follow_pods(
    api_client: ApiClient, fleet: SimulatedFleet, *, retry_seconds: float = 0.5
) -> None:
    """Place bound pods on the fleet and release ended ones, until cancelled.

    Args:
        api_client: client of the API server; reconnects after a failure.
        fleet: the fleet; pods that were placed by other means do not change.
        retry_seconds: pause before pods are listed again.
    """
    api = CoreV1Api(api_client)
    followed: set[str] = set()
    while True:
        try:
            version = await _list(api, fleet, followed)
            await _watch(api, fleet, followed, version)
        except (OSError, aiohttp.ClientError, ValueError, KeyError) as error:
            logger.debug("lost the API server", extra={"cause": str(error)})
        await asyncio.sleep(retry_seconds)


async def _list(api: CoreV1Api, fleet: SimulatedFleet, followed: set[str]) -> str:
    """Update the fleet from all pods, and return the resource version for a watch."""
    response: Any = await api.list_pod_for_all_namespaces(_preload_content=False)
    listed = orjson.loads(await response.read())
    present = {_observe(fleet, followed, pod) for pod in listed["items"]}
    for uid in followed - present:
        fleet.release(uid)
    followed &= present
    return str(listed["metadata"]["resourceVersion"])


async def _watch(api: CoreV1Api, fleet: SimulatedFleet, followed: set[str], version: str) -> None:
    """Update the fleet from a watch until it ends or fails."""
    response: Any = await api.list_pod_for_all_namespaces(
        watch=True, resource_version=version, timeout_seconds=_WATCH_SECONDS, _preload_content=False
    )
    buffer = b""
    try:
        async for chunk in response.content.iter_any():
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                event: Mapping[str, Any] = orjson.loads(line)
                if event["type"] == "ERROR":
                    return
                _observe(fleet, followed, event["object"], event["type"])
    finally:
        _hang_up(response)


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """Abort a watch: a clean TLS shutdown may outlast the event loop."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


def _observe(
    fleet: SimulatedFleet, followed: set[str], pod: JsonObject, type_: str = "ADDED"
) -> str:
    """Apply a pod's state to its simulated kubelet, and return its UID."""
    uid = pod_ref(pod).uid
    refusal = observe_pod(fleet, pod, is_deleted=type_ == "DELETED")
    if refusal:
        logger.warning("pod not admitted", extra={"pod": pod_ref(pod).key, "cause": refusal})
    if uid in fleet.placements:
        followed.add(uid)
    else:
        followed.discard(uid)
    return uid
