"""kubernetes-asyncio is there without its nine hundred classes, and whole for whoever wants it."""

import subprocess
import sys


def told_by(program: str) -> list[str]:
    """Run a program in a Python of its own and return the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_extender_imports_no_class_of_the_apis_types() -> None:
    loaded = told_by(
        "import gc, extender.app, extender.cli.remote.cluster\n"
        "print(*{one.__module__ for one in gc.get_objects() if isinstance(one, type)})"
    )

    assert "kubernetes_asyncio.client.api_client" in loaded
    assert not [name for name in loaded if ".client.models." in name or ".client.api." in name]


def test_a_later_import_gets_the_full_library() -> None:
    (told,) = told_by(
        "import extender.kube.client\n"
        "from kubernetes_asyncio import client, config, watch\n"
        "print(client.CoreV1Api is not None and client.models.V1Pod is not None)"
    )

    assert told == "True"


def test_where_all_of_it_is_there_already_that_is_used() -> None:
    (told,) = told_by(
        "from kubernetes_asyncio.client import ApiClient\n"
        "from extender.kube import library\n"
        "print(library.ApiClient is ApiClient)"
    )

    assert told == "True"
