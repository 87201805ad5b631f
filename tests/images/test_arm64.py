"""Messages on a machine that cannot run arm64 programs."""

from pathlib import Path

import pytest

from tests.images import arm64, platforms


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provide an empty cache, and no programs on PATH."""
    monkeypatch.setenv("IDLEGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def test_without_apt_the_message_names_the_missing_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert arm64.main() == 1
    assert "apt-get: not on this machine" in capsys.readouterr().out


def test_missing_apt_package_is_named_with_apts_message(tmp_path: Path) -> None:
    for name in ("apt-get", "dpkg-deb"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho E: no lists >&2\nexit 100\n")
        program.chmod(0o755)

    with pytest.raises(arm64.FetchError, match=r"python3\.11.* for arm64: .*Debian 12.*no lists"):
        arm64.fetch()


def test_tests_request_missing_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(platforms.VARIABLE, "arm64")

    with pytest.raises(arm64.FetchError, match="`make arm64` fetches"):
        platforms.chosen(tmp_path)


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(platforms.VARIABLE, "riscv64")

    with pytest.raises(ValueError, match="must be arm64"):
        platforms.chosen(tmp_path)


def test_the_fetched_python_is_the_dockerfiles_minor() -> None:
    (python,) = (name for name in arm64.IMAGE_PACKAGES if name.startswith("python"))
    dockerfile = (Path(__file__).parents[2] / "images" / "extender.Dockerfile").read_text()

    assert f"{python.replace('python', 'python:')}." in dockerfile
    assert "-slim-bookworm@" in dockerfile
