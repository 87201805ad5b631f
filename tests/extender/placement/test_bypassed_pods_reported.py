"""Pods bound without a call: waiting for other replicas' messages, and log lines."""

import logging
from typing import Any

import pytest

from extender.placement.bypassed_pods import _LOG_SECONDS, _WATCH_SECONDS
from testkit.builders import GPU
from testkit.judging import DEFAULT, BindingWorld, ReceivedPeriod

MESSAGE = "pods bound without idlegpu's answer"


@pytest.fixture
def part() -> BindingWorld:
    return BindingWorld()


def test_replica_must_report_before_our_watch_shows_the_pod() -> None:
    part = BindingWorld(received=(received := ReceivedPeriod()))
    received.since = part.world.now - _WATCH_SECONDS / 2
    part.create(part.pod())
    part.bind(part.pod())
    part.judge()

    assert part.counted() == 0


def test_pod_whose_request_may_be_forgotten_is_not_reported(part: BindingWorld) -> None:
    part.create(part.pod("bypassed"))
    part.create(part.pod("asked"))
    part.world.request_log.forgotten_until = part.world.now
    part.call("asked")
    part.bind(part.pod("bypassed"))
    part.bind(part.pod("asked"))
    part.judge()

    assert (part.counted(), part.unjudged) == (0, 1)
    assert sum(group.count for group in part.bypassed_pods.report().pods) == 1


def lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.message == MESSAGE]


def test_log_names_an_example_and_the_likely_cause(
    part: BindingWorld, caplog: pytest.LogCaptureFixture
) -> None:
    part.create(part.pod())
    part.bind(part.pod())
    part.judge()

    (line,) = lines(caplog)
    assert line.levelno == logging.WARNING
    assert (line.pods, line.example, line.scheduler) == (1, "team/p", DEFAULT)
    assert line.resources == [GPU]
    (cause,) = line.likely_causes
    assert cause.startswith("extenders: kube-scheduler has never sent a request")


def test_log_has_one_line_a_minute_at_most_and_leaves_out_no_pod(
    part: BindingWorld, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        part.create(part.pod(str(number)))
        part.bind(part.pod(str(number)))
        part.judge()
    early = [line.pods for line in lines(caplog)]
    part.world.now += _LOG_SECONDS
    part.bypassed_pods.sweep()
    part.world.now += _LOG_SECONDS
    part.bypassed_pods.sweep()

    assert early == [1]
    assert [line.pods for line in lines(caplog)] == [1, 3]


def test_log_is_silent_where_all_is_well(
    part: BindingWorld, caplog: pytest.LogCaptureFixture
) -> None:
    part.create(part.pod())
    part.call()
    part.bind(part.pod())
    part.judge()

    assert lines(caplog) == []
