import stat
from pathlib import Path

import pytest

from extender.server.certificates.__main__ import main
from extender.server.certificates.storing import read_folder
from testkit.certificates import issue


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def test_a_folder_gets_the_files_of_each_side_readable_by_the_owner_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"

    assert main(["--folder", str(folder), "--address", "10.96.0.88"]) == 0

    for side in ("extender", "kube-scheduler"):
        names = {path.name for path in (folder / side).iterdir()}
        assert names == {"tls.crt", "tls.key", "ca.crt"}
    assert modes(folder) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    reported = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in reported] == ["ca", "extender", "kube-scheduler"]
    assert all(line.endswith(", new") for line in reported)


def test_a_second_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--folder", str(tmp_path)])
    before = read_folder(tmp_path)
    capsys.readouterr()

    main(["--folder", str(tmp_path)])

    assert read_folder(tmp_path) == before
    assert "new" not in capsys.readouterr().out


def test_a_dropped_ca_is_gone_from_the_folder(tmp_path: Path) -> None:
    for step in ((), ("--next-ca",), ("--switch-ca",)):
        assert main(["--folder", str(tmp_path), *step]) == 0
    assert (tmp_path / "extender" / "ca.crt").read_text().count("BEGIN") == 2
    assert not (tmp_path / "next.crt").exists()

    main(["--folder", str(tmp_path), "--drop-ca"])

    assert not (tmp_path / "previous.crt").exists()
    assert (tmp_path / "extender" / "ca.crt").read_text().count("BEGIN") == 1


def test_a_ca_that_expires_soon_is_reported_and_everything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    issue(tmp_path, days_ago=3400)

    assert main(["--folder", str(tmp_path)]) == 0

    reported = capsys.readouterr()
    assert reported.err.startswith("warning: the CA expires on ")
    assert "extender: good until " in reported.out
    assert main(["--folder", str(tmp_path), "--next-ca"]) == 0


def test_a_fault_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ca.crt").write_text("nonsense")
    (tmp_path / "ca.key").write_text("nonsense")

    assert main(["--folder", str(tmp_path)]) == 1

    assert capsys.readouterr().err.startswith(
        "cannot make certificates: ca.crt is not a certificate"
    )
