"""Waiting pods with requests for a new resource are reported once all pods are listed."""

from extender.core.request.gpu_resources import ResourceNames
from extender.sources.kubernetes.cluster import PodFeed
from extender.sources.kubernetes.objects import Pacer
from testkit.kube_objects import requesting
from tests.extender.sources.watched_cluster import Sink


async def test_a_pod_withheld_on_the_first_page_is_reported_after_the_last() -> None:
    sink, pacer = Sink(), Pacer()
    feed = PodFeed(
        sink,
        ResourceNames(("nvidia.com/gpu", "amd.com/gpu")),
        early_seconds=60.0,
        exporter_words=(),
        held_by=lambda _namespace, _name: None,
        clock=lambda: 0.0,
    )
    feed.listed_resources = ResourceNames(("nvidia.com/gpu",))

    feed.begin_list()
    feed.add_listed(requesting("waits", amd="1"))
    feed.listed_resources = None
    await feed.report_withheld(pacer)
    await feed.end_list(pacer)

    assert set(sink.pods) == {"waits"}
