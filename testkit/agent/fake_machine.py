"""Fake `/proc` and log directory of processes that start, end and change."""

from pathlib import Path

HOST_CGROUP = "0::/system.slice/docker-" + "d0" * 32 + ".scope"
CONTAINER_ID = "4f" * 32


def pod_cgroup(uid: str) -> str:
    uid = uid.replace("-", "_")
    return (
        "0::/kubepods.slice/kubepods-burstable.slice/"
        f"kubepods-burstable-pod{uid}.slice/cri-containerd-{CONTAINER_ID}.scope"
    )


class FakeMachine:
    """Fake host; `proc` shows all its processes (hostPID) until `hide_machine` is called."""

    def __init__(self, directory: Path) -> None:
        self.proc = directory / "proc"
        self.logs = directory / "pods"
        self.logs.mkdir(parents=True)
        (self.proc / "2").mkdir(parents=True)
        (self.proc / "self").mkdir()
        (self.proc / "2" / "status").write_text("Name:\tkthreadd\nPid:\t2\nPPid:\t0\n")
        (self.proc / "self" / "cgroup").write_text("0::/kubepods.slice/agent.scope\n")

    def hide_machine(self) -> None:
        """Make `/proc` look like that of a container without hostPID."""
        (self.proc / "2" / "status").write_text("Name:\tsh\nPid:\t2\nPPid:\t1\n")

    def run(
        self,
        pid: int,
        cgroup: str = HOST_CGROUP,
        *,
        name: str = "python",
        started: int = 1_000,
        uid: int = 0,
    ) -> None:
        directory = self.proc / str(pid)
        directory.mkdir(exist_ok=True)
        fields = " ".join(["S", "1", *["0"] * 17, str(started), *["0"] * 30])
        (directory / "stat").write_text(f"{pid} ({name}) {fields}\n")
        (directory / "cgroup").write_text(cgroup + "\n")
        uids = "\t".join([str(uid)] * 4)
        (directory / "status").write_text(f"Name:\t{name}\nUid:\t{uids}\nGid:\t0\t0\t0\t0\n")

    def become_zombie(self, pid: int) -> None:
        stat = self.proc / str(pid) / "stat"
        stat.write_text(stat.read_text().replace(") S ", ") Z "))

    def end(self, pid: int) -> None:
        for path in (self.proc / str(pid)).iterdir():
            path.unlink()
        (self.proc / str(pid)).rmdir()

    def log(self, namespace: str, pod: str, uid: str) -> None:
        (self.logs / f"{namespace}_{pod}_{uid}").mkdir()

    def forget_log(self, namespace: str, pod: str, uid: str) -> None:
        (self.logs / f"{namespace}_{pod}_{uid}").rmdir()
