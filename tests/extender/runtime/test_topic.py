"""Events reach every subscriber, in order."""

import pytest

from extender.runtime.topic import Topic


def test_each_subscriber_gets_each_later_event_in_the_order_of_subscription() -> None:
    topic: Topic[[str, int]] = Topic()
    calls: list[object] = []
    topic.publish("before", 0)
    topic.subscribe(lambda name, count: calls.append(("first", name, count)))
    topic.subscribe(lambda name, count: calls.append(("second", name, count)))

    topic.publish("pod", 2)

    assert calls == [("first", "pod", 2), ("second", "pod", 2)]


def test_a_fault_of_a_subscriber_reaches_the_publisher() -> None:
    topic: Topic[[]] = Topic()

    def fail() -> None:
        raise OSError("full")

    topic.subscribe(fail)

    with pytest.raises(OSError, match="full"):
        topic.publish()
