import json
from pathlib import Path

from extender.kube.kubeconfig import load_kubeconfig, own_namespace
from testkit.fake_kube import FakeKube


def test_the_namespace_is_the_pods_own(tmp_path: Path) -> None:
    assert own_namespace(None, tmp_path) == "idlegpu"
    (tmp_path / "namespace").write_text("gpus\n")

    assert own_namespace(None, tmp_path) == "gpus"
    assert own_namespace(Path("kubeconfig"), tmp_path) == "idlegpu"
    (tmp_path / "namespace").write_text("\n")
    assert own_namespace(None, tmp_path) == "idlegpu"


async def test_a_new_token_is_not_written_to_the_kubeconfig(tmp_path: Path) -> None:
    answer = {"credential": {"access_token": "new", "token_expiry": "2040-01-01T00:00:00Z"}}
    command = {"cmd-path": "echo", "cmd-args": f"'{json.dumps(answer)}'"}
    user = {"auth-provider": {"name": "gcp", "config": command}}
    path = FakeKube().write_kubeconfig(tmp_path / "config", user)
    before = path.read_bytes()

    configuration = await load_kubeconfig(path)

    assert configuration.api_key["BearerToken"] == "Bearer new"
    assert path.read_bytes() == before
