"""Reports to every extender replica: looks up where they are, and has a link to each."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from agent.options import Options
from agent.push_handshake import Address
from agent.push_link import ReportLink
from agent.push_news import Digests
from agent.sampler import Latest

logger = logging.getLogger(__name__)

MOST_REPLICAS: Final = 32


class Pusher(Collector):
    """The links to the replicas of the extender, and what is counted of them.

    Args:
        options: every setting.
        latest: the agent's reports.
        clock: seconds since the epoch.
    """

    def __init__(
        self, options: Options, latest: Latest, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._options = options.reports
        self._latest = latest
        self._clock = clock
        self._digests = Digests(options.reports, options.judgement.thresholds, options.foreign)
        self._links: dict[Address, ReportLink] = {}
        self._tasks: dict[Address, asyncio.Task[None]] = {}
        self._gone = {"sent": 0, "failed": 0, "refused": 0}
        self._trouble = ""

    @property
    def links(self) -> Mapping[Address, ReportLink]:
        """The links by address."""
        return self._links

    async def run(self) -> None:
        """Tell every replica until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._resolve(group)
                await asyncio.sleep(self._options.resolve_seconds)

    async def _resolve(self, group: asyncio.TaskGroup) -> None:
        """Look up the addresses; have a link for each of them, and none for others."""
        try:
            async with asyncio.timeout(self._options.timeout_seconds):
                addresses = await self._addresses()
        except OSError as error:  # those that are known may still be right
            cause = str(error) or "timed out"
            if cause != self._trouble:
                logger.warning(
                    "cannot look up the extender",
                    extra={"service": self._options.service, "cause": cause},
                )
            self._trouble = cause
            return
        self._trouble = ""
        for address in self._links.keys() - addresses:
            self._tasks.pop(address).cancel()
            self._forget(self._links.pop(address))
        for address in sorted(addresses - self._links.keys()):
            if len(self._links) >= MOST_REPLICAS:
                logger.warning("too many replicas", extra={"most": MOST_REPLICAS})
                break
            link = self._links[address] = ReportLink(
                address,
                self._latest,
                self._digests,
                self._options,
                clock=self._clock,
            )
            self._tasks[address] = group.create_task(link.run(), name=f"report to {address[0]}")

    async def _addresses(self) -> set[Address]:
        """Return the addresses of the service.

        Raises:
            OSError: they cannot be looked up.
        """
        host, _, port = self._options.service.rpartition(":")
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
        return {(str(info[4][0]), int(port)) for info in infos}

    def _forget(self, link: ReportLink) -> None:
        for name, count in _counts(link).items():
            self._gone[name] += count

    @override
    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Tell how telling goes."""
        links = list(self._links.values())
        replicas = GaugeMetricFamily(
            "idlegpu_agent_extender_replicas",
            "Replicas of the extender: known by their address, and those that take reports.",
            labels=["state"],
        )
        replicas.add_metric(["known"], len(links))
        replicas.add_metric(["taking"], sum(link.is_connected for link in links))
        yield replicas
        outcomes = CounterMetricFamily(
            "idlegpu_agent_reports",
            "Reports that were sent, and connections that failed or that the extender refused.",
            labels=["outcome"],
        )
        for name, before in self._gone.items():
            outcomes.add_metric([name], before + sum(_counts(link)[name] for link in links))
        yield outcomes


def _counts(link: ReportLink) -> Mapping[str, int]:
    return {
        "sent": link.sent,
        "failed": link.failures - link.refusals,
        "refused": link.refusals,
    }
