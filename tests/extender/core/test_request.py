from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.pod_groups import PodGroup, similarity_of
from extender.core.policy import GroupPolicy, Policy, Strategy, Thresholds
from extender.core.request.annotations import Annotation, Target, TargetPolicy, read_memory
from extender.core.request.gpu_resources import (
    _MAX_COUNT,
    ResourceNames,
    count_devices,
    count_lasting,
    has_claims,
    has_gpu_claims,
)
from extender.core.request.request import (
    GpuRequest,
    ParsedRequest,
    parse_pod_ref,
    parse_request,
    required_models,
)

GPU = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"
MIG = "nvidia.com/mig-1g.10gb"

Json = dict[str, Any]


def container(limits: Mapping[str, object] | int = 1, *, is_sidecar: bool = False) -> Json:
    resources = {GPU: str(limits)} if isinstance(limits, int) else dict(limits)
    extra = {"restartPolicy": "Always"} if is_sidecar else {}
    return {"name": "c", "resources": {"limits": resources}, **extra}


def pod(
    *containers: Json,
    init: tuple[Json, ...] = (),
    annotations: Json | None = None,
    **status: object,
) -> Json:
    return {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": annotations},
        "spec": {
            "containers": list(containers) if containers else [container()],
            "initContainers": list(init),
        },
        "status": status,
    }


def parse(raw: object, defaults: Policy | None = None) -> ParsedRequest:
    return parse_request(raw, resources=ResourceNames(), defaults=defaults or Policy())


def annotated(**annotations: object) -> ParsedRequest:
    names = {f"idlegpu.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return parse(pod(annotations=names))


def wanted(parsed: ParsedRequest) -> GpuRequest:
    assert parsed.request is not None
    return parsed.request


def test_plain_gpu_pod_requests_one_gpu_with_defaults() -> None:
    defaults = Policy(thresholds=Thresholds(utilization=0.2, memory=0.4), strategy=Strategy.PACK)

    parsed = parse(pod(), defaults)

    assert parsed.problems == ()
    assert parsed.request == GpuRequest(
        resource=GPU, count=1, thresholds=defaults.thresholds, strategy=Strategy.PACK
    )


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        pytest.param(pod(container(1), container(2)), 3, id="containers are summed"),
        pytest.param(pod(container(1), init=(container(4),)), 4, id="a larger init container"),
        pytest.param(pod(container(4), init=(container(1),)), 4, id="a smaller init container"),
        pytest.param(
            pod(container(1), init=(container(2), container(3))), 3, id="init containers take turns"
        ),
        pytest.param(
            pod(container(1), init=(container(2, is_sidecar=True),)), 3, id="a sidecar stays"
        ),
        pytest.param(
            pod(container(1), init=(container(1, is_sidecar=True), container(4))),
            5,
            id="an init container beside an earlier sidecar",
        ),
        pytest.param(
            pod(container(1), init=(container(4), container(1, is_sidecar=True))),
            4,
            id="an init container before the sidecar",
        ),
        pytest.param(
            pod(
                container(1),
                init=(container(1, is_sidecar=True), container(1), container(2, is_sidecar=True)),
            ),
            4,
            id="sidecars accumulate",
        ),
        pytest.param(pod({"resources": {"requests": {GPU: "2"}}}), 2, id="requests alone"),
        pytest.param(
            pod({"resources": {"requests": {GPU: "2"}, "limits": {GPU: "2"}}}),
            2,
            id="both count once",
        ),
        pytest.param(pod(container({GPU: 3})), 3, id="a bare JSON number"),
        pytest.param(pod(container({GPU: "1500m"})), 2, id="rounded up as Kubernetes does"),
        pytest.param(pod(container({GPU: "1e18"})), _MAX_COUNT, id="an absurd count is held"),
    ],
)
def test_effective_count_matches_kubernetes(raw: Json, count: int) -> None:
    assert wanted(parse(raw)).count == count


def test_pod_level_resources_and_overhead_hold_no_devices() -> None:
    raw = pod(container(1))
    raw["spec"]["resources"] = {"limits": {GPU: "8"}, "requests": {GPU: "8"}}
    raw["spec"]["overhead"] = {GPU: "8"}

    assert wanted(parse(raw)).count == 1


@pytest.mark.parametrize("quantity", ["0", "", "many", "-1", None, [], "1e999999999"])
def test_pod_without_devices_has_no_request(quantity: object) -> None:
    assert parse(pod(container({GPU: quantity, "cpu": "4"}))).request is None


def test_several_resources_come_in_the_order_of_the_setting() -> None:
    names = ResourceNames((SHARED, "nvidia.com/mig-*", GPU))
    raw = pod(container({GPU: "1", MIG: "2", SHARED: "3", "nvidia.com/mig-7g.80gb": "4"}))

    request = wanted(parse_request(raw, resources=names, defaults=Policy()))

    assert (request.resource, request.count) == (SHARED, 3)
    assert request.resources == ((SHARED, 3), (MIG, 2), ("nvidia.com/mig-7g.80gb", 4), (GPU, 1))


@pytest.mark.parametrize(
    ("name", "is_gpu"),
    [
        (GPU, True),
        (SHARED, True),
        (MIG, True),
        (f"{MIG}.shared", True),
        ("nvidia.com/mig-1g.10gb.me.all", True),
        ("nvidia.com/gpumem", False),
        ("cpu", False),
        ("amd.com/gpu", False),
    ],
)
def test_default_names_match_the_device_plugin(name: str, is_gpu: bool) -> None:
    assert ResourceNames().matches(name) is is_gpu


@pytest.mark.parametrize(
    "name", ["", "*", "gpu", "nvidia.com/", "/gpu", "nvidia.com/*-x", "a/**", "a/b c"]
)
def test_a_name_that_can_be_no_resource_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be like nvidia\.com/gpu"):
        ResourceNames((name,))


def test_at_least_one_resource_must_be_named() -> None:
    with pytest.raises(ValueError, match="name at least one"):
        ResourceNames(())


def test_a_pod_can_opt_out() -> None:
    parsed = annotated(enabled=" False ")

    assert parsed.request is None
    assert parsed.is_disabled
    assert parsed.problems == ()


def test_every_annotation_is_read() -> None:
    parsed = annotated(
        enabled="true",
        gpu_memory=" 20Gi ",
        require_idle="True",
        max_utilization="20",
        max_memory="12.5 %",
        strategy="Pack",
        prefer_models="H100, A100-SXM4 ,V100,H100",
        require_models="H100,A100",
        target=" gpu-1::2, 0 ;gpu-2;gpu-1::0,2",
        target_policy="Prefer",
    )

    assert parsed.problems == ()
    assert parsed.request == GpuRequest(
        resource=GPU,
        count=1,
        memory_bytes=20 << 30,
        requires_idle=True,
        thresholds=Thresholds(utilization=0.2, memory=0.125),
        strategy=Strategy.PACK,
        preferred_models=("H100", "A100-SXM4", "V100"),
        required_models=("H100", "A100"),
        targets=(Target("gpu-1", (0, 2)), Target("gpu-2")),
        target_policy=TargetPolicy.PREFER,
    )
    assert parsed.request.own == {"thresholds.utilization", "thresholds.memory", "strategy"}
    assert wanted(annotated(strategy="pack")).own == {"strategy"}


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Annotation.ENABLED, "no"),
        (Annotation.ENABLED, ""),
        (Annotation.GPU_MEMORY, "20"),
        (Annotation.GPU_MEMORY, "20GB"),
        (Annotation.GPU_MEMORY, "20m"),
        (Annotation.GPU_MEMORY, "-1Gi"),
        (Annotation.GPU_MEMORY, "0"),
        (Annotation.GPU_MEMORY, "1Ei"),
        (Annotation.REQUIRE_IDLE, "1"),
        (Annotation.MAX_UTILIZATION, "0"),
        (Annotation.MAX_UTILIZATION, "0.2"),
        (Annotation.MAX_UTILIZATION, "101"),
        (Annotation.MAX_UTILIZATION, "nan"),
        (Annotation.MAX_UTILIZATION, "20 percent"),
        (Annotation.MAX_MEMORY, "-5"),
        (Annotation.MAX_MEMORY, "1e1"),
        (Annotation.STRATEGY, "binpack"),
        (Annotation.PREFER_MODELS, ","),
        (Annotation.PREFER_MODELS, "H100;DROP"),
        (Annotation.PREFER_MODELS, "A100,H100;DROP"),
        (Annotation.PREFER_MODELS, ",".join(f"m{n}" for n in range(17))),
        (Annotation.REQUIRE_MODELS, ""),
        (Annotation.TARGET, ";"),
        (Annotation.TARGET, "gpu-1::"),
        (Annotation.TARGET, "gpu-1::0-3"),
        (Annotation.TARGET, "gpu-1::256"),
        (Annotation.TARGET, "GPU 1"),
        (Annotation.TARGET, "gpu-1:0"),
        (Annotation.TARGET, ";".join("abcdefghijklmnopqrstuvwxyz0123456")),
        (Annotation.TARGET, "a" + ";" * 64),
        (Annotation.TARGET_POLICY, "maybe"),
    ],
)
def test_an_invalid_value_is_reported_and_the_default_applies(
    annotation: Annotation, value: str
) -> None:
    parsed = parse(pod(annotations={annotation: value}))

    (problem,) = parsed.problems
    assert parsed.request == wanted(parse(pod()))
    assert parsed.request.own == frozenset()
    assert (problem.annotation, problem.value) == (annotation, value)
    assert annotation in problem.message
    assert f'"{value}"' in problem.message
    assert problem.allowed in problem.message
    assert problem.default_used in problem.message


@pytest.mark.parametrize(
    ("annotation", "value", "attribute", "expected"),
    [
        (Annotation.GPU_MEMORY, "1Mi", "memory_bytes", 1 << 20),
        (Annotation.GPU_MEMORY, "16Ti", "memory_bytes", 16 << 40),
        (Annotation.MAX_UTILIZATION, "1", "thresholds", Thresholds(utilization=0.01)),
        (Annotation.MAX_UTILIZATION, "100", "thresholds", Thresholds(utilization=1.0)),
        (
            Annotation.PREFER_MODELS,
            ",".join(f"m{at}" for at in range(16)),
            "preferred_models",
            tuple(f"m{at}" for at in range(16)),
        ),
        (Annotation.REQUIRE_MODELS, "H100", "required_models", ("H100",)),
        (Annotation.TARGET, "a::255", "targets", (Target("a", (255,)),)),
        (Annotation.TARGET, "a" + ";" * 63, "targets", (Target("a"),)),
        (
            Annotation.TARGET,
            ";".join(f"n{at}" for at in range(32)),
            "targets",
            tuple(Target(f"n{at}") for at in range(32)),
        ),
        (
            Annotation.TARGET,
            "a::" + ",".join(map(str, range(64))),
            "targets",
            (Target("a", tuple(range(64))),),
        ),
    ],
)
def test_values_at_their_bounds_are_valid(
    annotation: Annotation, value: str, attribute: str, expected: object
) -> None:
    parsed = parse(pod(annotations={annotation: value}))

    assert parsed.problems == ()
    assert getattr(parsed.request, attribute) == expected


@pytest.mark.parametrize(
    ("record", "models"),
    [
        ({"wanted_model": "h100"}, ("h100",)),
        ({"wanted_model": "other"}, ()),
        ({}, ()),
        ({"wanted_model": "h100", "wishes": ((Annotation.PREFER_MODELS, "A100"),)}, ()),
        ({"wanted_model": "h100", "wishes": ((Annotation.REQUIRE_MODELS, "A100"),)}, ("a100",)),
        ({"wanted_model": "h100", "wishes": ((Annotation.REQUIRE_MODELS, ","),)}, ()),
    ],
)
def test_models_of_a_pod_come_from_its_annotation_or_its_node_selection(
    record: dict[str, Any], models: tuple[str, ...]
) -> None:
    assert required_models(PodRecord(uid="u", namespace="ns", name="p", **record)) == models


def test_only_a_pod_with_gpus_has_similar_pods() -> None:
    raw = pod() | {"metadata": {"namespace": "ns", "name": "p"}}

    assert "owner" in map(similarity_of, parse(raw).kin)
    assert parse(pod(container({"cpu": "1"}))).kin == ()


@pytest.mark.parametrize(("count", "held"), [("2", 2), ("1e18", _MAX_COUNT)])
def test_devices_of_init_containers_last_only_in_sidecars(count: str, held: int) -> None:
    sidecar = container({GPU: count}) | {"restartPolicy": "Always"}

    assert count_lasting(pod(container(0), init=(container(8), sidecar)), ResourceNames()) == {
        GPU: held
    }


@pytest.mark.parametrize(("name", "instead"), [("max_utilization", "30%"), ("max_memory", "50%")])
def test_a_problem_reads_like_a_sentence(name: str, instead: str) -> None:
    (problem,) = annotated(**{name: "high"}).problems

    assert problem.message == (
        f'annotation idlegpu.io/{name.replace("_", "-")}: "high" is not allowed: must be a '
        f"percentage from 1 to 100, such as 20 or 20%; used instead: {instead}"
    )


def test_a_misspelt_annotation_is_reported_with_the_known_names() -> None:
    parsed = parse(pod(annotations={"idlegpu.io/gpu-memroy": "20Gi", "other.io/x": "1"}))

    (problem,) = parsed.problems
    assert problem.annotation == "idlegpu.io/gpu-memroy"
    assert Annotation.GPU_MEMORY in problem.allowed
    assert problem.message.endswith("it is ignored (did you mean idlegpu.io/gpu-memory?)")
    assert parsed.request == wanted(parse(pod()))


def test_our_own_annotations_are_not_reported_as_unknown() -> None:
    own = {"state": "idle", "decision": "node-1", "reason": "idle", "proposal": "measured"}

    assert annotated(**own).problems == ()


def test_long_values_and_many_typos_are_cut() -> None:
    typos = {f"idlegpu.io/typo-{number}": "x" * 10_000 for number in range(100)}

    problems = parse(
        pod(annotations={**typos, Annotation.STRATEGY: "\n".join("ab" * 500)})
    ).problems

    assert len(problems) == 9
    assert all(len(problem.message) < 600 for problem in problems)
    assert not any("\n" in problem.message for problem in problems)


@pytest.mark.parametrize(("length", "shown"), [(100, "x" * 100), (101, "x" * 100 + "...")])
def test_a_value_is_shown_up_to_a_length(length: int, shown: str) -> None:
    (problem,) = annotated(strategy="x" * length).problems

    assert problem.value == shown


def test_an_annotation_that_is_not_a_string_is_reported() -> None:
    (problem,) = annotated(require_idle=True).problems

    assert problem.value == "bool"


def test_a_nominated_node_is_known() -> None:
    assert wanted(parse(pod(nominatedNodeName="node-1"))).nominated_node == "node-1"


def test_last_refusal_is_parsed_without_changing_the_request() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    tried = wanted(parse(pod(conditions=[condition | {"message": "too few GPUs"}])))

    assert tried.last_refusal == "too few GPUs"
    assert tried == wanted(parse(pod()))
    assert wanted(parse(pod(conditions=[{"type": "Ready"}]))).last_refusal is None


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"resourceClaims": [{"name": "gpu"}]}},
        {"status": {"extendedResourceClaimStatus": {"resourceClaimName": "p-gpu"}}},
    ],
    ids=["claims of its own", "a claim made for its resources"],
)
def test_claims_are_seen(change: Json) -> None:
    assert has_claims(change)
    assert not has_claims(pod())


@pytest.mark.parametrize(
    ("name", "is_gpu"), [("gpu", True), ("mig", True), ("vfio.gpu", True), ("imex", False)]
)
def test_claims_for_classes_of_gpus_are_known(name: str, is_gpu: bool) -> None:
    made = {"resourceName": f"deviceclass.resource.kubernetes.io/{name}.nvidia.com"}

    status = {"extendedResourceClaimStatus": {"requestMappings": [made]}}
    assert has_gpu_claims({"status": status}) is is_gpu


def test_the_memory_annotation_is_read_alone_as_well() -> None:
    assert read_memory(pod(annotations={Annotation.GPU_MEMORY: "2Gi"})) == 2 << 30
    assert read_memory(pod(annotations={Annotation.GPU_MEMORY: "2"})) is None


def test_a_pod_is_named_by_its_key() -> None:
    assert parse_pod_ref(pod()).key == "ns/p"
    assert parse_pod_ref({"metadata": {"name": 7}}).name == ""


@pytest.mark.parametrize(
    "change",
    [
        {"memory_source": "MEMORY"},
        {"avoided": {"a": 0.5}},
        {"has_preferences": True},
        {"last_refusal": "0/9 nodes are available"},
        {"group": PodGroup("JobSet", "ns", "train", 3)},
        {"group_policy": GroupPolicy.IGNORE},
        {"own": frozenset({"strategy"})},
    ],
    ids=lambda change: next(iter(change)),
)
def test_requests_that_get_the_same_evaluation_share_cached_results(change: dict[str, Any]) -> None:
    one = GpuRequest(resource=GPU, count=1)

    assert replace(one, **change) == one
    assert hash(replace(one, **change)) == hash(one)


def test_pods_that_differ_in_their_version_alone_are_equal() -> None:
    record = PodRecord(uid="u", namespace="ns", name="p", version="1")

    assert replace(record, version="2") == record


@pytest.mark.parametrize("resources", [((GPU, 0),), (), ((SHARED, 1), (GPU, 1))])
def test_a_request_that_cannot_be_is_refused(resources: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        GpuRequest(resource=GPU, count=0, resources=resources)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=10,
)
resource_lists = json_values | st.dictionaries(
    st.sampled_from([GPU, SHARED, MIG, "cpu"]),
    json_values | st.sampled_from(["1", "2", "-1", "1k"]),
)
containers = json_values | st.lists(
    json_values
    | st.fixed_dictionaries(
        {},
        optional={
            "resources": json_values
            | st.fixed_dictionaries(
                {}, optional={"limits": resource_lists, "requests": resource_lists}
            ),
            "restartPolicy": json_values | st.just("Always"),
        },
    ),
    max_size=4,
)
pods = json_values | st.fixed_dictionaries(
    {},
    optional={
        "metadata": json_values
        | st.fixed_dictionaries(
            {
                "annotations": json_values
                | st.dictionaries(
                    st.sampled_from([*Annotation, "idlegpu.io/typo"]),
                    json_values | st.sampled_from(["20Gi", "20", "true", "H100", "pack"]),
                )
            }
        ),
        "spec": json_values
        | st.fixed_dictionaries(
            {},
            optional={
                "containers": containers,
                "initContainers": containers,
                "resourceClaims": json_values,
            },
        ),
        "status": json_values,
    },
)


@given(pods)
def test_no_pod_of_any_shape_raises(raw: object) -> None:
    parsed = parse(raw)

    assert parsed.request is None or parsed.request.count >= 1
    assert not (parsed.is_disabled and parsed.request)


@given(
    st.lists(st.integers(0, 8), max_size=4),
    st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=4),
)
def test_the_count_is_the_maximum_over_all_moments(
    main: list[int], init: list[tuple[int, bool]]
) -> None:
    raw = pod(
        *([container(count) for count in main] or [{}]),
        init=tuple(container(count, is_sidecar=is_sidecar) for count, is_sidecar in init),
    )
    moments = [
        count + sum(other for other, is_sidecar in init[:index] if is_sidecar)
        for index, (count, _) in enumerate(init)
    ]
    running = sum(main) + sum(count for count, is_sidecar in init if is_sidecar)

    assert count_devices(raw, ResourceNames()).get(GPU, 0) == max([running, *moments])


# --- group ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotations", "size"),
    [({}, 4), ({"idlegpu.io/group-size": "3"}, 3), ({"idlegpu.io/group-policy": "ignore"}, None)],
)
def test_annotations_of_a_pod_decide_about_its_group(annotations: Json, size: int | None) -> None:
    raw = pod(annotations={"kueue.x-k8s.io/pod-group-total-count": "4", **annotations})
    raw["metadata"]["labels"] = {"kueue.x-k8s.io/pod-group-name": "train"}

    group = wanted(parse(raw)).group

    assert (group.size if group else None) == size
