"""Parse the Prometheus metrics of exporters and of the extender."""

from prometheus_client.parser import text_string_to_metric_families

from extender.cli.doctor.facts import Sample


def parse_exposition(text: str) -> tuple[Sample, ...]:
    r"""Parse a text in Prometheus exposition format into samples.

    Raises:
        ValueError: the text is malformed.

    Example:
        >>> parse_exposition('up{job="a"} 1\n')
        (Sample(name='up', labels={'job': 'a'}, value=1.0),)
    """
    return tuple(
        Sample(name=sample.name, labels=dict(sample.labels), value=float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )
