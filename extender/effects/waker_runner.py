"""Run the waker while it is enabled, and replace it when its settings change."""

from typing import Final

from extender.effects.waker import Waker, build_waker
from extender.kube.client import KubeClient
from extender.placement.placer import Placer
from extender.runtime.supervision import Tasks
from extender.settings.config import Settings

_TASK: Final = "waker"


class WakerRunner:
    """Runs a waker as a background task as long as the settings enable it.

    Args:
        client: client of the API server.
        placer: evaluates nodes for a pod.
        tasks: runs the waker.
        settings: all settings.

    Attributes:
        waker: the current waker; None while waking is disabled.
    """

    def __init__(
        self, client: KubeClient, placer: Placer, tasks: Tasks, settings: Settings
    ) -> None:
        self._client = client
        self._placer = placer
        self._tasks = tasks
        self._settings = settings
        self.waker = self._build(None)

    def start(self) -> None:
        """Start the background task, if waking is enabled."""
        if self.waker is not None:
            self._tasks.start(_TASK, self.waker.run)

    async def adopt(self, settings: Settings) -> None:
        """Replace the waker if its settings have changed; counts and history stay."""
        before, self._settings = self._settings, settings
        if settings.wake != before.wake:
            await self._tasks.stop(_TASK)
            self.waker = self._build(self.waker)
            self.start()

    def _build(self, before: Waker | None) -> Waker | None:
        settings = self._settings
        if not settings.wake.enabled:
            return None
        return build_waker(
            self._client,
            self._placer,
            settings.wake,
            kubeconfig=settings.kubeconfig,
            before=before,
        )
