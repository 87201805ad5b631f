"""Receive the reports of node agents, and deliver them in batches."""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agent.report.contract import Update
from extender.core.devices.readings import DeviceKey, ForeignProcess, Readings
from extender.core.policy import Policy
from extender.kube.client import KubeClient
from extender.server.listener import Listener
from extender.settings.sources import Agents
from extender.sources.agents.connection import AgentConnection
from extender.sources.agents.refusal import AgentRefusal, Refusals, RefusedError
from extender.sources.agents.states import AgentState, readings_of
from extender.sources.agents.tokens import Sender, TokenReviewer

logger = logging.getLogger(__name__)

_BATCH_SECONDS: Final = 0.2
"""Time between two batches in which reports are applied: one batch costs less than many reports."""
_NODES_PER_BATCH: Final = 128
"""Nodes whose reports are delivered together: a step of a millisecond or two."""

_ROUTINE_SECONDS: Final = 2.0
"""Interval for reports without news: readings stay fresh for minutes."""

_SWEEP_SECONDS: Final = 1.0
_REQUEST_TIMEOUT_SECONDS: Final = 10.0
"""Time limit for a request, without the review of its token."""

_Deliver = Callable[[Readings], Awaitable[None]]


class _AgentFleet(Protocol):
    """The part of the fleet that agents need."""

    @property
    def policy(self) -> Policy:
        """Settings of the decision."""

    @property
    def contested(self) -> int:
        """Number of readings that were rejected because another node reports the device."""

    def note_shares(
        self, node: str, shares: Sequence[tuple[DeviceKey, str, int]], at: float
    ) -> None:
        """Apply the memory of shared devices, in bytes, that the pods (UIDs) of a node use."""

    def note_foreign(
        self, node: str, processes: Mapping[DeviceKey, tuple[ForeignProcess, ...]]
    ) -> None:
        """Replace the foreign processes of a node."""

    def expire_silent(self) -> None:
        """Fall back to other sources for nodes whose agents are silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """Status of the agents' reports, for users and metrics.

    Attributes:
        connections: open connections.
        agents: agents whose token was accepted.
        devices: devices in their reports.
        reports: accepted reports since the start.
        unknown_nodes: agents on nodes that the API server does not know (yet).
        refused: refusals since the start, by reason.
        reviews: tokens that the API server reviewed.
        contested: readings that were rejected because another node reports the device.
        last_at: time of the last accepted report, seconds since the epoch; None before the first.
    """

    connections: int
    agents: int
    devices: int
    reports: int
    unknown_nodes: int
    refused: dict[str, int]
    reviews: int
    contested: int
    last_at: float | None


class AddressError(OSError):
    """The address for agents' reports cannot be used."""


class AgentSource:
    """Owns the agents' connections (as `connection._ConnectionOwner`); delivers their reports.

    Use it on the event loop's thread only.

    Args:
        settings: address, limits, and accepted tokens.
        client: client of the API server, which reviews tokens.
        is_known_node: returns whether the cluster has a node.
        deliver: receives readings.
        clock: seconds since the epoch.
        tls: TLS context, or None without TLS.
        spare: number of file descriptors to leave free.

    Attributes:
        port: listener for the connections.
        refusals: counters of refusals.
        is_listening: whether connections are accepted.
    """

    def __init__(
        self,
        settings: Agents,
        client: KubeClient,
        fleet: _AgentFleet,
        *,
        is_known_node: Callable[[str], bool],
        deliver: _Deliver,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        tls: ssl.SSLContext | None = None,
        spare: int = 0,
    ) -> None:
        self.refusals = Refusals(monotonic)
        self.is_listening = False
        self._settings = settings
        self._reviewer = TokenReviewer(client, settings, clock=clock, monotonic=monotonic)
        self._is_known_node = is_known_node
        self._deliver = deliver
        self._fleet = fleet
        self._clock = clock
        self._monotonic = monotonic
        self.port = Listener(
            "agents",
            settings.address,
            lambda _: AgentConnection(self, self._monotonic),
            most=lambda: self._settings.max_connections,
            tls=tls,
            spare=spare,
            refused=self._note_rejected,
            measures_silence=False,  # `_sweep` ends silent connections
            monotonic=monotonic,
        )
        self._connections: set[AgentConnection] = set()
        self._by_node: dict[str, AgentConnection] = {}
        self._urgent: dict[str, AgentState] = {}
        self._routine: dict[str, AgentState] = {}
        self._unknown: dict[str, AgentState] = {}
        self._paused: list[AgentConnection] = []
        self._devices = 0
        self._reports = 0
        self._last_at: float | None = None

    async def run(self) -> None:
        """Receive reports until cancelled.

        Raises:
            AddressError: the address cannot be used.
        """
        host, port = self._settings.address
        try:
            await self.port.open()
        except OSError as error:
            raise AddressError(
                f"cannot receive reports on {host}:{port}: {error.strerror or error}: "
                "set agents.listen to a free address of this machine"
            ) from error
        self.is_listening = True
        logger.info(
            "receiving reports of agents",
            extra={"host": host, "port": port, "is_tls": self.port.is_tls},
        )
        try:
            await self._deliver_batches()
        finally:
            self.is_listening = False
            self.port.close()
            ending = RefusedError(AgentRefusal.CLOSING, "the extender is stopping: connect again")
            for connection in list(self._connections):
                connection.refuse(ending)
            await self.port.end()
            await asyncio.sleep(0)

    def adopt(self, settings: Agents) -> None:
        """Apply new settings, except the address.

        Connections of service accounts that are no longer accepted end within a second.
        """
        self._settings = settings
        self._reviewer.adopt(settings)

    def status(self) -> AgentStatus:
        """Return the status of the agents' reports."""
        return AgentStatus(
            connections=len(self._connections),
            agents=len(self._by_node),
            devices=self._devices,
            reports=self._reports,
            unknown_nodes=len(self._unknown),
            refused={reason.value: count for reason, count in self.refusals.counts.items()},
            reviews=self._reviewer.review_count,
            contested=self._fleet.contested,
            last_at=self._last_at,
        )

    # --- called by connections --------------------------------------------------------------------

    def opened(self, connection: AgentConnection) -> None:
        """Register a new connection."""
        self._connections.add(connection)

    def _note_rejected(self, address: str) -> None:
        """Count a connection that was rejected because of the limit."""
        limit = self._settings.max_connections
        text = f"the limit of {limit} connections is reached: raise agents.max_connections"
        self.refusals.note(RefusedError(AgentRefusal.BUSY, text), "", address)

    @property
    def reporting(self) -> Collection[str]:
        """Names of the nodes whose agents are connected."""
        return self._by_node.keys()

    def closed(self, connection: AgentConnection) -> None:
        """Remove a closed connection."""
        self._connections.discard(connection)
        sender = connection.sender
        if sender is not None and self._by_node.get(sender.node) is connection:
            del self._by_node[sender.node]
            self._unknown.pop(sender.node, None)
            self._fleet.note_foreign(sender.node, {})

    async def authenticate(self, connection: AgentConnection, token: str) -> Sender:
        """Return the identity of a token's owner.

        Raises:
            RefusedError: the token is not an agent's.
        """
        return await self._reviewer.review(token, connection.address)

    def accepted(self, connection: AgentConnection) -> None:
        """Register a connection whose token was accepted; it replaces an older one of its node."""
        if connection.sender is None:
            return
        before = self._by_node.get(connection.sender.node)
        self._by_node[connection.sender.node] = connection
        if before is not None and before is not connection:
            before.refuse(
                RefusedError(AgentRefusal.REPLACED, "the node has opened another connection")
            )

    def receive(self, connection: AgentConnection, update: Update) -> None:
        """Apply an update, and schedule it for delivery.

        Raises:
            RefusedError: the update is invalid.
        """
        state, now = connection.state, self._clock()
        if state is None:
            return
        state.apply(update, now)
        if state.shares and self._is_known_node(state.node):
            self._fleet.note_shares(state.node, state.shares, state.at)
        self._reports += 1
        self._last_at = now
        waiting = self._urgent if state.is_news else self._routine
        waiting[state.node] = state

    def note_refusal(self, connection: AgentConnection, error: RefusedError) -> None:
        """Count and log a refusal."""
        node = connection.sender.node if connection.sender is not None else ""
        self.refusals.note(error, node, connection.address)

    def paused(self, connection: AgentConnection) -> None:
        """Register a paused connection, to be resumed with the next batch."""
        self._paused.append(connection)

    # --- delivery ---------------------------------------------------------------------------------

    async def _deliver_batches(self) -> None:
        """Deliver reports in batches, and check the connections, until cancelled."""
        routine_at = swept_at = self._monotonic()
        while True:
            await asyncio.sleep(_BATCH_SECONDS)
            now = self._monotonic()
            if now - swept_at >= _SWEEP_SECONDS:
                swept_at = now
                await self._sweep(now)
            elif self._paused:
                self._resume(self._paused)
            waiting, self._urgent = self._urgent, {}
            if now - routine_at >= _ROUTINE_SECONDS:
                routine_at = now
                unknown = self._unknown.items()
                newly_known = {node: state for node, state in unknown if self._is_known_node(node)}
                waiting = {**self._routine, **newly_known, **waiting}
                self._routine = {}
            states = list(waiting.values())
            for start in range(0, len(states), _NODES_PER_BATCH):
                await self._deliver_isolated(states[start : start + _NODES_PER_BATCH])

    async def _deliver_isolated(self, states: Sequence[AgentState]) -> None:
        """Deliver some agents' reports; a report that fails ends its own connection only."""
        try:
            await self._deliver_known(states)
        except Exception as error:  # noqa: BLE001 - any report may cause any error
            if len(states) > 1:
                for state in states:
                    await self._deliver_isolated([state])
            elif (connection := self._by_node.get(states[0].node)) is not None:
                connection.fail(error)

    async def _deliver_known(self, states: Iterable[AgentState]) -> None:
        """Deliver some agents' reports; those of unknown nodes wait until the node is known."""
        known = []
        for state in states:
            if self._is_known_node(state.node):
                self._unknown.pop(state.node, None)
                known.append(state)
            elif state.node in self._by_node:
                self._unknown[state.node] = state
        if not known:
            return
        readings = readings_of(known, self._fleet.policy.foreign, self._clock(), self._devices)
        for state in known:
            state.is_news = False
            if state.node in self._by_node:
                self._fleet.note_foreign(state.node, state.foreign)
        await asyncio.sleep(0)
        await self._deliver(readings)

    async def _sweep(self, now: float) -> None:
        """End connections that are silent or not accepted any more; resume the others."""
        clock = self._clock()
        self._paused.clear()
        for count, connection in enumerate(list(self._connections)):
            if count % 500 == 0:
                await asyncio.sleep(0)
            connection.resume()
            silent = now - connection.last_data_at
            if connection.sender is None:
                # Since the start: a request sent byte by byte must not keep the connection open.
                is_late = now - connection.opened_at > _REQUEST_TIMEOUT_SECONDS
                if is_late and not connection.is_under_review:
                    connection.refuse(RefusedError(AgentRefusal.SILENT, "no request in time"))
            elif connection.sender.expires_at <= clock:
                connection.refuse(
                    RefusedError(AgentRefusal.EXPIRED, "the token has expired: send a new one")
                )
            elif not self._reviewer.accepts(connection.sender):
                text = "the settings have changed: its service account or audience is not accepted"
                connection.refuse(RefusedError(AgentRefusal.WRONG_ACCOUNT, text))
            elif silent > self._settings.silence_seconds:
                connection.refuse(RefusedError(AgentRefusal.SILENT, f"no data for {silent:.0f} s"))
        await asyncio.sleep(0)
        states = (one.state for one in self._by_node.values())
        self._devices = sum(len(state.infos) for state in states if state is not None)
        await asyncio.sleep(0)
        self._fleet.expire_silent()

    def _resume(self, paused: list[AgentConnection]) -> None:
        connections, self._paused = paused, []
        for connection in connections:
            connection.resume()
