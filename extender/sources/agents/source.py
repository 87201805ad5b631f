"""Takes what node agents report, and hands it on in batches."""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agent.report import Update
from extender.core.devices.readings import DeviceKey, Readings
from extender.core.policy import Policy
from extender.kube.client import KubeClient
from extender.server.listener import Listener
from extender.settings.agents import Agents
from extender.sources.agents.connection import AgentConnection
from extender.sources.agents.refusal import AgentRefusal, Refusals, RefusedError
from extender.sources.agents.states import SOURCE, AgentState, readings_of
from extender.sources.agents.tokens import Sender, TokenReviews

logger = logging.getLogger(__name__)

PIECE_NODES: Final = 128
"""Nodes whose reports are handed on together: a step of a millisecond or two."""

QUIET_SECONDS: Final = 2.0
"""What is no news is handed on this often: freshness is a matter of minutes."""

SWEEP_SECONDS: Final = 1.0
REQUEST_SECONDS: Final = 10.0
"""A request has to have come in so long; how long the token's review takes is our business."""

Deliver = Callable[[Readings], Awaitable[None]]


class AgentFleet(Protocol):
    """The part of the fleet that agents need."""

    @property
    def policy(self) -> Policy:
        """Settings of the decision."""

    def note_shares(
        self, node: str, shares: Sequence[tuple[DeviceKey, str, int]], at: float
    ) -> None:
        """Apply the memory of shared devices, in bytes, that the pods (UIDs) of a node use."""

    def expire_silent(self) -> None:
        """Fall back to other sources for nodes whose agents are silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """How reports come in, for people and metrics.

    Attributes:
        connections: connections that there are.
        agents: agents whose reports are taken.
        devices: devices that they tell of.
        reports: reports that were taken since the start.
        unknown_nodes: agents on nodes that the cluster does not have (yet).
        refused: what was refused since the start, by reason.
        reviews: tokens that the API server was asked about.
        last_at: when the last report was taken, seconds since the epoch, None before the first.
    """

    connections: int
    agents: int
    devices: int
    reports: int
    unknown_nodes: int
    refused: dict[str, int]
    reviews: int
    last_at: float | None


class AddressError(OSError):
    """The address that agents report to cannot be used."""


class AgentSource:
    """The agents' connections, and what they say; the desk of `AgentConnection`.

    Everything happens on the event loop's thread.

    Args:
        settings: how reports are taken.
        client: the API server, which knows whose tokens are.
        fleet: the state of the fleet.
        knows: tells whether the cluster has a node.
        deliver: takes readings.
        clock: seconds since the epoch.
        monotonic: seconds since any moment.
        tls: None: without.
        spare: so many file descriptors are left to others.

    Attributes:
        port: where connections are accepted.
        refusals: who was refused, and why.
        is_listening: connections are accepted.
    """

    def __init__(
        self,
        settings: Agents,
        client: KubeClient,
        fleet: AgentFleet,
        *,
        knows: Callable[[str], bool],
        deliver: Deliver,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        tls: ssl.SSLContext | None = None,
        spare: int = 0,
    ) -> None:
        self.refusals = Refusals(monotonic)
        self.is_listening = False
        self._settings = settings
        self._reviews = TokenReviews(client, settings, clock=clock, monotonic=monotonic)
        self._knows = knows
        self._deliver = deliver
        self._fleet = fleet
        self._clock = clock
        self._monotonic = monotonic
        self.port = Listener(
            "agents",
            settings.address,
            lambda: AgentConnection(self, self._monotonic),
            most=lambda: self._settings.max_connections,
            tls=tls,
            spare=spare,
            refused=self._note_full,
            monotonic=monotonic,
        )
        self._connections: set[AgentConnection] = set()
        self._of_node: dict[str, AgentConnection] = {}
        self._news: dict[str, AgentState] = {}
        self._quiet: dict[str, AgentState] = {}
        self._unknown: dict[str, AgentState] = {}
        self._paused: list[AgentConnection] = []
        self._devices = 0
        self._reports = 0
        self._last_at: float | None = None

    async def run(self) -> None:
        """Take reports until cancelled.

        Raises:
            AddressError: the address cannot be used.
        """
        host, port = self._settings.address
        try:
            await self.port.open()
        except OSError as error:
            raise AddressError(
                f"cannot take reports on {host}:{port}: {error.strerror or error}: "
                "set agents.listen to a free address of this machine"
            ) from error
        self.is_listening = True
        logger.info(
            "taking reports of agents",
            extra={"host": host, "port": port, "is_tls": self.port.is_tls},
        )
        try:
            await self._hand_on()
        finally:
            self.is_listening = False
            self.port.close()
            ending = RefusedError(AgentRefusal.CLOSING, "the extender ends: connect again")
            for connection in list(self._connections):
                connection.refuse(ending)
            await self.port.end()
            await asyncio.sleep(0)

    def change(self, settings: Agents) -> None:
        """Take reports otherwise from now on; where this listens stays.

        Connections of service accounts that are not accepted any more end within a second.
        """
        self._settings = settings
        self._reviews.change(settings)

    def status(self) -> AgentStatus:
        """Return how reports come in."""
        return AgentStatus(
            connections=len(self._connections),
            agents=len(self._of_node),
            devices=self._devices,
            reports=self._reports,
            unknown_nodes=len(self._unknown),
            refused={reason.value: count for reason, count in self.refusals.counts.items()},
            reviews=self._reviews.asked,
            last_at=self._last_at,
        )

    # --- what connections say ---------------------------------------------------------------------

    def opened(self, connection: AgentConnection) -> None:
        """Take note of a new connection."""
        self._connections.add(connection)

    def _note_full(self, address: str) -> None:
        """Take note of somebody for whom there was no room."""
        limit = self._settings.max_connections
        text = f"there are {limit} connections: agents.max_connections"
        self.refusals.note(RefusedError(AgentRefusal.BUSY, text), "", address)

    @property
    def reporting(self) -> Collection[str]:
        """Nodes whose agents are connected."""
        return self._of_node.keys()

    def closed(self, connection: AgentConnection) -> None:
        """Take note of its end."""
        self._connections.discard(connection)
        sender = connection.sender
        if sender is not None and self._of_node.get(sender.node) is connection:
            del self._of_node[sender.node]
            self._unknown.pop(sender.node, None)

    async def admit(self, connection: AgentConnection, token: str) -> Sender:
        """Return whose a token is.

        Raises:
            RefusedError: it is no agent's.
        """
        return await self._reviews.review(token, connection.address)

    def granted(self, connection: AgentConnection) -> None:
        """Take note that updates follow; of a node the last connection counts."""
        if connection.sender is None:
            return
        before = self._of_node.get(connection.sender.node)
        self._of_node[connection.sender.node] = connection
        if before is not None and before is not connection:
            before.refuse(
                RefusedError(AgentRefusal.REPLACED, "the node has opened another connection")
            )

    def take(self, connection: AgentConnection, update: Update) -> None:
        """Take an update.

        Raises:
            RefusedError: it cannot be.
        """
        state, now = connection.state, self._clock()
        if state is None:
            return
        state.take(update, now)
        if state.shares and self._knows(state.node):
            self._fleet.note_shares(state.node, state.shares, state.at)
        self._reports += 1
        self._last_at = now
        waiting = self._news if state.is_news else self._quiet
        waiting[state.node] = state

    def note_refusal(self, connection: AgentConnection, error: RefusedError) -> None:
        """Count and log a refusal."""
        node = connection.sender.node if connection.sender is not None else ""
        self.refusals.note(error, node, connection.address)

    def paused(self, connection: AgentConnection) -> None:
        """Remember to let it go on with the next batch."""
        self._paused.append(connection)

    # --- what is handed on ------------------------------------------------------------------------

    async def _hand_on(self) -> None:
        """Hand on what came, again and again; look after the connections meanwhile."""
        quiet_at = swept_at = self._monotonic()
        while True:
            await asyncio.sleep(self._settings.batch_seconds)
            now = self._monotonic()
            if now - swept_at >= SWEEP_SECONDS:
                swept_at = now
                await self._sweep(now)
            elif self._paused:
                self._resume(self._paused)
            waiting, self._news = self._news, {}
            if now - quiet_at >= QUIET_SECONDS:
                quiet_at = now
                waiting = {**self._quiet, **self._returned(), **waiting}
                self._quiet = {}
            states = list(waiting.values())
            for start in range(0, len(states), PIECE_NODES):
                await self._hand_on_safely(states[start : start + PIECE_NODES])

    async def _hand_on_safely(self, states: Sequence[AgentState]) -> None:
        """Hand on what some agents said; what cannot be taken over costs its own agent alone."""
        try:
            await self._hand_on_some(states)
        except Exception as error:  # noqa: BLE001 - any of them may be the cause
            if len(states) > 1:
                for state in states:
                    await self._hand_on_safely([state])
            elif (connection := self._of_node.get(states[0].node)) is not None:
                connection.fail(error)

    async def _hand_on_some(self, states: Iterable[AgentState]) -> None:
        """Hand on what some agents said; those on nodes that are not known wait for these."""
        known = []
        for state in states:
            if self._knows(state.node):
                self._unknown.pop(state.node, None)
                known.append(state)
            elif state.node in self._of_node:
                self._unknown[state.node] = state
        if not known:
            return
        readings = readings_of(known, self._fleet.policy.foreign, self._clock(), self._devices)
        for state in known:
            state.is_news = False
        await asyncio.sleep(0)
        await self._deliver(readings)

    def _returned(self) -> dict[str, AgentState]:
        """Return what agents said on nodes that have become known since."""
        return {node: state for node, state in self._unknown.items() if self._knows(node)}

    async def _sweep(self, now: float) -> None:
        """End connections that are silent, or whose token has expired."""
        clock = self._clock()
        self._paused.clear()
        for count, connection in enumerate(list(self._connections)):
            if count % 500 == 0:
                await asyncio.sleep(0)
            connection.resume()
            silent = now - connection.heard_at
            if connection.sender is None:
                # From its beginning: a request that comes byte by byte never ends either.
                is_late = now - connection.opened_at > REQUEST_SECONDS
                if is_late and not connection.is_under_review:
                    connection.refuse(RefusedError(AgentRefusal.SILENT, "no request came"))
            elif connection.sender.expires_at <= clock:
                connection.refuse(
                    RefusedError(AgentRefusal.EXPIRED, "the token has expired: come with a new one")
                )
            elif not self._reviews.accepts(connection.sender):
                text = "the settings have changed: its service account or audience is not accepted"
                connection.refuse(RefusedError(AgentRefusal.WRONG_ACCOUNT, text))
            elif silent > self._settings.silence_seconds:
                connection.refuse(
                    RefusedError(AgentRefusal.SILENT, f"nothing came for {silent:.0f} s")
                )
        await asyncio.sleep(0)
        states = (one.state for one in self._of_node.values())
        self._devices = sum(len(state.infos) for state in states if state is not None)
        await asyncio.sleep(0)
        self._fleet.expire_silent()

    def _resume(self, paused: list[AgentConnection]) -> None:
        connections, self._paused = paused, []
        for connection in connections:
            connection.resume()


__all__ = ["SOURCE", "AddressError", "AgentSource", "AgentStatus"]
