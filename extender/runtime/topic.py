"""Publish events to the parts of the extender that subscribed to them."""

from collections.abc import Callable
from typing import Generic, ParamSpec

_Event = ParamSpec("_Event")


class Topic(Generic[_Event]):
    """One kind of event: its publisher owns the topic, and any other part may subscribe.

    Callbacks run during `publish`, in the order of subscription. An exception reaches the
    publisher, and the callbacks after it do not run.

    Example:
        >>> bound: Topic[[str, str]] = Topic()
        >>> bound.subscribe(lambda pod, node: print(pod, "on", node))
        >>> bound.publish("team/a", "gpu-1")
        team/a on gpu-1
    """

    def __init__(self) -> None:
        self._callbacks: tuple[Callable[_Event, None], ...] = ()

    def subscribe(self, callback: Callable[_Event, None]) -> None:
        """Call `callback` with the arguments of each later event."""
        self._callbacks = (*self._callbacks, callback)

    def publish(self, *args: _Event.args, **kwargs: _Event.kwargs) -> None:
        """Call every subscriber with these arguments."""
        for callback in self._callbacks:
            callback(*args, **kwargs)
