import pytest

from agent.report.contract import Place
from agent.tenants.processes import _is_private_namespace, parse_cgroup

UID = "0f6b1c2d-1111-4222-8333-00000000000a"
SLICE = UID.replace("-", "_")
OTHER = "9d2e7c51-5555-4666-8777-00000000000b"
STATIC = "3a52ce780950d4d969792a2559cd519d"
ID = "4f" * 32
NESTED = "7e" * 32


def v1(path: str) -> str:
    return f"12:pids:{path}\n4:memory:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:{path}\n"


@pytest.mark.parametrize(
    ("text", "uid", "container"),
    [
        pytest.param(v1(f"/kubepods/burstable/pod{UID}/{ID}"), UID, ID, id="v1-cgroupfs"),
        pytest.param(v1(f"/kubepods/pod{UID}/{ID}"), UID, ID, id="v1-cgroupfs-guaranteed"),
        pytest.param(f"0::/kubepods/besteffort/pod{UID}/{ID}\n", UID, ID, id="v2-cgroupfs"),
        pytest.param(
            "0::/kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope\n",
            UID,
            ID,
            id="v2-systemd-containerd",
        ),
        pytest.param(
            f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope\n",
            UID,
            ID,
            id="v2-systemd-containerd-guaranteed",
        ),
        pytest.param(
            v1(
                "/kubepods.slice/kubepods-besteffort.slice/"
                f"kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{ID}.scope"
            ),
            UID,
            ID,
            id="v1-systemd-containerd",
        ),
        pytest.param(
            "0::/kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{SLICE}.slice/crio-{ID}.scope\n",
            UID,
            ID,
            id="cri-o",
        ),
        pytest.param(
            f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{ID}.scope/container\n",
            UID,
            ID,
            id="cri-o-with-a-sub-cgroup",
        ),
        pytest.param(
            f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/crio-conmon-{ID}.scope\n",
            UID,
            "",
            id="cri-o-conmon-is-of-the-pod-but-no-container",
        ),
        pytest.param(
            f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/docker-{ID}.scope\n",
            UID,
            ID,
            id="docker-systemd",
        ),
        pytest.param(v1(f"/kubepods/besteffort/pod{UID}/{ID}"), UID, ID, id="docker-cgroupfs"),
        pytest.param(
            "0::/system.slice/containerd.service/"
            f"kubepods-burstable-pod{SLICE}.slice:cri-containerd:{ID}\n",
            UID,
            ID,
            id="systemd-path-under-a-cgroupfs-runtime",
        ),
        pytest.param(
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
            f"kubelet-kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope\n",
            UID,
            ID,
            id="kind",
        ),
        pytest.param(
            v1(f"/docker/{NESTED}/kubelet/kubepods/burstable/pod{UID}/{ID}"),
            UID,
            ID,
            id="kind-v1-under-docker",
        ),
        pytest.param(
            f"0::/kubepods/pod{UID}/{ID}/docker/{NESTED}\n", UID, ID, id="docker-in-a-pod"
        ),
        pytest.param(
            f"0::/kubepods/pod{UID}/{ID}/kubelet/kubepods/pod{OTHER}/{NESTED}\n",
            UID,
            ID,
            id="kind-in-a-pod-is-the-outer-pod",
        ),
        pytest.param(
            f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope/init.scope\n",
            UID,
            ID,
            id="systemd-in-a-container",
        ),
        pytest.param(
            "0::/kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope\n",
            STATIC,
            ID,
            id="static-pod",
        ),
        pytest.param(f"0::/kubepods/burstable/pod{STATIC}/{ID}\n", STATIC, ID, id="static-v1"),
        pytest.param(
            f"0::/tenant/kubepods/burstable/pod{UID}/{ID}\n", UID, ID, id="own-cgroup-root"
        ),
        pytest.param(
            f"0::/../../kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{ID}.scope\n",
            UID,
            ID,
            id="relative-to-the-readers-container",
        ),
        pytest.param(
            f"0::/../../../burstable/pod{UID}/{ID}\n", UID, ID, id="relative-cgroupfs-other-class"
        ),
        pytest.param(f"0::/../../pod{UID}/{ID}\n", UID, ID, id="relative-cgroupfs-same-class"),
        pytest.param(
            f"0::/../../kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope (deleted)\n",
            UID,
            ID,
            id="deleted-under-it",
        ),
        pytest.param(
            f"12:pids:/\n4:memory:/kubepods/burstable/pod{UID}/{ID}\n0::/\n",
            UID,
            ID,
            id="hybrid-with-v1-alone-in-use",
        ),
        pytest.param(
            f"1:name=systemd:/\n0::/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{ID}.scope\n",
            UID,
            ID,
            id="hybrid-with-v2-alone-in-use",
        ),
        pytest.param(
            f"0::/KUBEPODS/POD{UID.upper()}/{ID.upper()}\n", UID, ID, id="any-letter-case"
        ),
    ],
)
def test_the_pod_of_a_process_is_found_for_every_runtime(
    text: str, uid: str, container: str
) -> None:
    for private in (False, True):
        location = parse_cgroup(text, has_private_namespace=private)

        assert (location.place, location.pod_uid, location.container_id) == (
            Place.POD,
            uid,
            container,
        )


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        pytest.param(f"0::/system.slice/docker-{ID}.scope\n", f"docker-{ID}.scope", id="docker"),
        pytest.param(v1(f"/docker/{ID}"), ID, id="docker-v1"),
        pytest.param("0::/system.slice/slurmstepd.service\n", "slurmstepd.service", id="service"),
        pytest.param(
            "0::/user.slice/user-1000.slice/session-3.scope\n", "session-3.scope", id="a-login"
        ),
        pytest.param(
            f"0::/machine.slice/libpod-{ID}.scope\n", f"libpod-{ID}.scope", id="podman-is-no-pod"
        ),
        pytest.param(
            f"0::/machine.slice/machine-libpod_pod_{ID}.slice/libpod-{ID}.scope\n",
            f"libpod-{ID}.scope",
            id="a-pod-of-podman-is-none-of-kubernetes",
        ),
        pytest.param(
            f"0::/../../../../system.slice/docker-{ID}.scope\n",
            f"docker-{ID}.scope",
            id="relative-docker",
        ),
        pytest.param(f"0::/user/mypod{UID}\n", f"mypod{UID}", id="a-word-that-ends-in-pod"),
        pytest.param("0::/system.slice/podman-12ab.service\n", "podman-12ab.service", id="podman"),
        pytest.param(
            "0::/user.slice/user-1000.slice/user@1000.service/"
            f"kubepods.slice/kubepods-pod{SLICE}.slice/x.scope\n",
            "x.scope",
            id="a-user-who-names-a-cgroup-like-a-pod",
        ),
        pytest.param(
            f"1:name=systemd:/user.slice/user-1000.slice/user@1000.service/pod{UID}\n0::/\n",
            f"pod{UID}",
            id="a-user-in-the-hierarchy-of-systemd",
        ),
        pytest.param("0::/a:b/podcast\n", "podcast", id="colons-and-words-that-start-with-pod"),
        pytest.param(
            "0::/kubepods.slice/kubelet-helper.service\n", "kubelet-helper.service", id="no-uid"
        ),
    ],
)
def test_a_process_outside_pods_is_on_the_host(text: str, unit: str) -> None:
    for private in (False, True):
        location = parse_cgroup(text, has_private_namespace=private)

        assert (location.place, location.pod_uid, location.unit) == (Place.HOST, "", unit)


@pytest.mark.parametrize("path", ["/", "/..", f"/../cri-containerd-{ID}.scope", "/init.scope"])
def test_path_in_a_private_mount_namespace_is_unknown(path: str) -> None:
    assert parse_cgroup(f"0::{path}\n", has_private_namespace=True).place is Place.UNKNOWN


@pytest.mark.parametrize("path", ["/../..", "/../../..", "/../../system.slice"])
def test_a_path_outside_the_own_pod_that_names_no_pod_is_on_the_host(path: str) -> None:
    assert parse_cgroup(f"0::{path}\n", has_private_namespace=True).place is Place.HOST


@pytest.mark.parametrize("end", ["\x0b", "\x1c", "\x85", "\u2028"], ids=ascii)
def test_a_name_that_ends_a_line_for_python_starts_no_other_path(end: str) -> None:
    path = f"/user.slice/a{end}1:x:/kubepods/besteffort"

    assert parse_cgroup(f"0::{path}/b\n").unit == "b"
    assert parse_cgroup(f"0::/a{end}b\n").unit == "a\ufffdb", "without control characters"


def test_the_root_path_is_on_the_host_in_the_hosts_namespace() -> None:
    assert parse_cgroup("0::/\n").place is Place.HOST


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "0:\n", "\x00\x01\n"])
def test_malformed_cgroup_content_is_unknown(text: str) -> None:
    assert parse_cgroup(text).place is Place.UNKNOWN


@pytest.mark.parametrize(
    ("own", "private"),
    [
        pytest.param("0::/\n", True, id="v2"),
        pytest.param(v1("/"), True, id="v1"),
        pytest.param(f"0::/kubepods/pod{UID}/{ID}\n", False, id="host-namespace"),
        pytest.param(f"0::/\n4:memory:/docker/{ID}\n", False, id="hybrid"),
        pytest.param("", False, id="no-cgroups"),
    ],
)
def test_a_private_namespace_shows_the_readers_container_as_root(own: str, private: bool) -> None:
    assert _is_private_namespace(own) is private
