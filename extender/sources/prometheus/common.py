"""Define what the extender and its Prometheus worker process share.

It is a module of its own because the libraries that query Prometheus take 15 MiB, which the
extender's process saves.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from extender.core.devices.readings import Signal
from extender.runtime.decoding import MalformedError, decode_with
from extender.sources.prometheus.dcgm import Metric, MetricUnit, build_table

if TYPE_CHECKING:
    from extender.settings.sources import Prometheus

_Rows = TypeVar("_Rows")
_T = TypeVar("_T")

PATH_SETTINGS: Final = ("bearer_token_file", "password_file", "ca_file", "cert_file", "key_file")
"""Names of the settings that are paths."""

ROUND_TIMEOUTS: Final = 4
"""Limit for a round, in limits of one query: a round has some ten queries, four of them at the same
time, and most take far less than their limit."""


class PrometheusError(Exception):
    """Prometheus gave no usable answer; the message says what failed, why, and what to do."""


def reduce_rows(reduce: Callable[[_Rows], _T], rows: _Rows) -> _T:
    """Reduce the rows of an answer, which may contain any JSON.

    Raises:
        PrometheusError: the rows are not those of a Prometheus answer.
    """
    try:
        return decode_with(reduce, rows)
    except MalformedError as error:
        raise PrometheusError(
            f"cannot read the answer of Prometheus: {type(error.__cause__).__name__} {error}: is "
            "prometheus.url a Prometheus?"
        ) from error


def table_of(settings: "Prometheus") -> tuple[Metric, ...]:
    """Build the table of metrics, including the user's rows."""
    return build_table(
        (
            name,
            None
            if row is None
            else Metric(name=name, signal=Signal(row.signal), unit=MetricUnit(row.unit)),
        )
        for name, row in settings.metrics.items()
    )
