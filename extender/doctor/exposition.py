"""Reads what exporters and the extender export for Prometheus."""

from prometheus_client.parser import text_string_to_metric_families

from extender.doctor.facts import Sample


def parse_exposition(text: str) -> tuple[Sample, ...]:
    r"""Return the samples of an exposition.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_exposition('up{job="a"} 1\n')
        (Sample(name='up', labels={'job': 'a'}, value=1.0),)
    """
    return tuple(
        Sample(name=sample.name, labels=dict(sample.labels), value=float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )
