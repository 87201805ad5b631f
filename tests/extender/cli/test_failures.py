"""A failure prints one line and sets the exit status."""

import contextlib
import os
import shlex
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from aiohttp import web

from extender.cli.__main__ import COMMANDS, _module_of
from testkit.certificates import issue
from testkit.cli_serving import Run, runner, serving
from testkit.world import World


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["gpus", "gone"], 1, "node 'gone' is not known"),
        (["gpus", "--model", "tpu"], 1, "no such GPUs"),
        (["nodes", "--model", "tpu"], 1, "no such nodes"),
        (["best", "--gpus", "64"], 1, ""),
        (["explain", "absent"], 1, "no decision about 'absent' is remembered"),
        (["decisions", "absent"], 1, "no decision about 'absent' is remembered"),
        (["best", "--memory", "20"], 2, "memory='20' must be a quantity from 1Mi to 16Ti"),
        (["best", "--gpus", "0"], 2, "'--gpus': '0': must be a whole number from 1 to 1024"),
        (["best", "--gpus", "x"], 2, "'--gpus': 'x': must be a whole number from 1 to 1024"),
        (["top", "--interval", "0"], 2, "'0': must be a number from 0.2 to 3600"),
        (["best", "--resource", "cpu"], 2, "resource='cpu' must be a GPU resource"),
        (["holders", "--idle-for", "soon"], 2, "'soon': must be a time such as 30m, 1h"),
        (["costs", "--since", "90d"], 2, "'90d': must be a time from 1h to 31d"),
        (["advise", "--over", "0"], 2, "'0': must be a time from 15m to 30d"),
        (["size", "--owner", "chat"], 2, "'chat': must be KIND/NAME, such as Deployment/chat"),
        (["explain"], 2, "name one of: POD..., --filename FILE, --number N"),
        (["explain", "a", "--number", "1"], 2, "name one of: POD"),
        (["explain", "a", "-f", "-"], 2, "name one of: POD"),
        (["explain", "--number", "0"], 2, "'0': must be a decision's number, such as 812, or its"),
        (["explain", "--number", "1,2"], 2, "'1,2': must be a decision's number"),
        (["explain", "--number", "812"], 1, "decision '812' is not remembered"),
        (["explain", "--number", "7f3a-812"], 1, "decision '7f3a-812' is not remembered"),
        (["explain", "fresh", "absent"], 1, "no decision about 'absent' is remembered"),
        (["explain", "-f", "/nowhere"], 2, "cannot read /nowhere: No such file or directory"),
        (["nodes", "-o", "xml"], 2, "is not one of 'table', 'wide', 'json', 'yaml'"),
        (["gpuss"], 2, "'gpuss' is not a command: did you mean gpus? must be one of nodes, gpus"),
        (["zzz"], 2, "'zzz' is not a command: must be one of nodes, gpus"),
        (["gpus", "node-9"], 1, "node 'node-9' is not known: did you mean node-1, node-2, "),
        (["nodes", "--url", "ftp://x"], 2, "must be like https://localhost:8889"),
        (["nodes", "--token-file", "/nowhere"], 2, "token file '/nowhere' cannot be read: No such"),
        (["run"], 2, "state the command to run after --"),
        (["run", "--hold", "--", "x"], 2, "--hold takes no command"),
        (["completion", "csh"], 2, "is not one of 'bash', 'zsh', 'fish'"),
        (["nodes", "--url", "http://127.0.0.1:9"], 3, "cannot reach http://127.0.0.1:9: "),
    ],
)
def test_failure_names_the_value_and_allowed_values(
    run: Run, arguments: list[str], status: int, words: str
) -> None:
    result = run(*arguments)

    assert words in " ".join(result.stderr.split())
    assert result.exit_code == status
    assert "Traceback" not in result.output


def test_a_failure_does_not_control_the_terminal() -> None:
    hostile = "node-\x1b[2J1"
    world = World()
    world.add_node(hostile)

    with serving(world.build_app()) as url:
        result = runner(url)("gpus", "node-1")

    assert "did you mean node-\\x1b[2J1?" in result.stderr


def test_a_cluster_without_gpus_is_said_to_have_none() -> None:
    with serving(World().build_app()) as url:
        result = runner(url)("best")

    assert result.stdout.splitlines() == [
        "no node suits",
        "no node offers this resource: idlegpu nodes lists all",
    ]
    assert result.exit_code == 1


def test_one_pod_without_decisions_prints_no_empty_list(run: Run) -> None:
    assert run("decisions", "absent").stdout == ""


def test_plain_http_to_a_tls_port_is_reported(run: Run, tmp_path: Path) -> None:
    issue(tmp_path)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(tmp_path / "extender" / "tls.crt", tmp_path / "extender" / "tls.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = shown.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = run("nodes", "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()

    assert "closes the connection (use https:// if it speaks TLS)" in " ".join(
        result.stderr.split()
    )
    assert result.exit_code == 3


def test_tls_to_a_plain_port_is_reported(run: Run) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = run("nodes", "--url", f"https://127.0.0.1:{server.server_port}")
        server.shutdown()

    assert ": it does not speak TLS (use http://); check" in " ".join(result.stderr.split())


def test_a_certificate_of_another_ca_is_reported(run: Run, tmp_path: Path) -> None:
    issue(tmp_path)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(tmp_path / "extender" / "tls.crt", tmp_path / "extender" / "tls.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = shown.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = run("nodes", "--url", f"https://localhost:{server.server_port}")
        server.shutdown()

    said = " ".join(result.stderr.split())
    assert "its certificate is not trusted: " in said
    assert "(--ca-file: its CA)" in said
    assert "SSL" not in said
    assert result.exit_code == 3


def test_a_port_for_clients_with_certificates_is_reported(run: Run, tmp_path: Path) -> None:
    issue(tmp_path)
    own = tmp_path / "extender"
    demanding = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    demanding.load_cert_chain(own / "tls.crt", own / "tls.key")
    demanding.load_verify_locations(own / "ca.crt")
    demanding.verify_mode = ssl.CERT_REQUIRED

    def refuse(listening: socket.socket) -> None:
        client, _ = listening.accept()
        tls = demanding.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        with contextlib.suppress(ssl.SSLError):
            tls.do_handshake()
        with socket.socket(fileno=tls.detach()) as plain:
            while plain.recv(4096):  # a reset would overtake the alert
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=refuse, args=(listening,))
        thread.start()
        url = f"https://localhost:{listening.getsockname()[1]}"
        result = run("nodes", "--url", url, "--ca-file", str(own / "ca.crt"))
        thread.join()

    assert "it demands a client certificate, as port 8888 does (the API: port 8889)" in " ".join(
        result.stderr.split()
    )
    assert result.exit_code == 3


@pytest.mark.parametrize("options", [[], ["-o", "json"], ["--help"]])
@pytest.mark.parametrize(("where", "status"), [("/dev/full", 2), ("&-", 0)])
def test_output_that_cannot_be_written_is_one_line(
    options: list[str], where: str, status: int
) -> None:
    command = [sys.executable, "-m", "extender.cli", "size", "--text", "x", *options]

    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {shlex.join(command)} >{where}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KUBECONFIG": "/nowhere"},
        timeout=60,
    )

    failed = "idlegpu: cannot write the output: No space left on device\n"
    assert done.stderr == (failed if status else "")
    assert done.returncode == status


def test_a_refused_connection_is_reported_as_such(run: Run) -> None:
    assert "refused" in run("nodes", "--url", "http://127.0.0.1:9").stderr


@pytest.mark.parametrize("text", ["kind: Service", "a: [", "{}", "kind: Job\nspec: {template: 1}"])
def test_a_manifest_without_a_pod_is_refused(run: Run, text: str) -> None:
    result = run("explain", "-f", "-", standard_input=text)

    assert result.exit_code == 2
    assert result.stderr.startswith("idlegpu: ")


@pytest.mark.parametrize(
    ("kubeconfig", "words"),
    [
        (
            "/nowhere",
            "/nowhere: no such file: set another one with --kubeconfig (KUBECONFIG); or connect "
            "to an extender directly, --url (IDLEGPU_URL)",
        ),
        ("text", "cannot use kubeconfig"),
        ("{}", "cannot use kubeconfig"),
    ],
)
def test_invalid_kubeconfig_is_reported(
    run: Run, tmp_path: Path, kubeconfig: str, words: str
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(kubeconfig)
    path = kubeconfig if kubeconfig.startswith("/") else str(file)

    result = run("nodes", IDLEGPU_URL="", KUBECONFIG=path)

    assert words in result.stderr
    assert result.exit_code == 2


@pytest.fixture
def odd() -> Iterator[str]:
    """Yield a server that answers with the status in the path."""

    async def answer(request: web.Request) -> web.Response:
        wanted = request.headers.get("Authorization", "").removeprefix("Bearer ")
        status, _, text = wanted.partition("-")
        return web.Response(status=int(status or 200), text=text or "{}")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    with serving(app) as url:
        yield url


@pytest.mark.parametrize(
    ("token", "status", "words"),
    [
        ("401-no", 4, "wants a valid token: no; give one with --token"),
        ("403-no", 4, "refuses this: no; docs/api.md says"),
        ("429-later", 4, "has too many requests: later; try again"),
        ("500-x", 5, "fails: x; its log says why"),
        ("502-x", 3, "is not ready: x; `kubectl get pods -n idlegpu`"),
        ("503-x", 3, "is not ready: x; `kubectl get pods -n idlegpu`"),
        ("404-404: Not Found", 5, "is not idlegpu's API: as installed, it is on port 8889"),
        ("302-", 5, "is not idlegpu's API"),
        ("504-x", 3, "is not ready: x; `kubectl get pods -n idlegpu`"),
        ("300-x", 5, "is not idlegpu's API"),
        ("404-x", 5, "is not idlegpu's API"),
        ('404-{"error": "x (GET /v1/nodes)"}', 1, "idlegpu: x\n"),
        ('400-{"error": "x"}', 2, "idlegpu: x\n"),
        ('409-{"error": "x"}', 2, "idlegpu: x\n"),
        ('413-{"error": "x"}', 2, "idlegpu: x\n"),
        ('422-{"error": "x"}', 2, "idlegpu: x\n"),
        ('404-{"error": "x"}', 1, "idlegpu: x\n"),
        ('404-{"error": "", "message": "x"}', 1, "idlegpu: x\n"),
        ('404-{"error": 5}', 5, "is not idlegpu's API"),
        ("500-" + "x" * 400, 5, f"fails: {'x' * 300}; its log says why"),
        ('401-{"kind": "Status", "message": "x"}', 4,
         "refuses the credentials of the kubeconfig: x; log in again, as for kubectl"),
        ('403-{"kind": "Status", "message": "x"}', 4,
         "refuses this: x; ask the cluster's administrator for this right"),
        ('503-{"kind": "Status", "message": "x"}', 3, "reaches no extender: x; `kubectl get pods"),
        ('500-{"kind": "Status", "message": "x"}', 5, "fails: x; its log says why"),
        ('503-{"kind": "Other", "message": "x"}', 3, "is not ready: x"),
        ("200-", 5, "the answer for /v1/nodes cannot be read"),
        ("200-<html>", 5, "the answer for /v1/nodes cannot be read"),
    ],
)  # fmt: skip
def test_odd_answers_have_their_statuses(odd: str, token: str, status: int, words: str) -> None:
    result = runner(odd)("nodes", "--token", token)

    assert words in result.stderr
    assert result.exit_code == status


def test_the_token_is_read_from_a_file_too(odd: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("403-from-file\n")

    result = runner(odd)("nodes", "--token-file", str(tmp_path / "token"))

    assert "from-file" in result.stderr


def test_options_after_the_subcommand_override_those_before(url: str, odd: str) -> None:
    run = runner("http://127.0.0.1:9")

    assert run("--url", url, "nodes").exit_code == 0
    assert run("--url", odd, "nodes", "--url", url).exit_code == 0


# --- help, completion, start ----------------------------------------------------------------------


def test_help_names_every_command_and_imports_none() -> None:
    code = (
        "import sys; sys.argv = ['kubectl-idlegpu', '--help']\n"
        "from extender.cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'rich', 'yaml', 'aiohttp', 'numpy', 'kubernetes_asyncio', 'requests'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stderr == "[]\n"
    assert result.stdout.startswith("Usage: kubectl idlegpu [OPTIONS] COMMAND")
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(run: Run, name: str) -> None:
    result = run(name, "--help")

    assert result.exit_code == 0
    assert _module_of(name).endswith(name)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_completion_for_shells(run: Run, shell: str) -> None:
    script = run("completion", shell).stdout

    assert "_IDLEGPU_COMPLETE" in script
    assert "idlegpu" in script


def test_completion_knows_the_commands_and_their_options(run: Run) -> None:
    commands = run(_IDLEGPU_COMPLETE="bash_complete", COMP_WORDS="idlegpu ho", COMP_CWORD="1")
    options = run(
        _IDLEGPU_COMPLETE="bash_complete", COMP_WORDS="idlegpu holders --idle", COMP_CWORD="2"
    )

    assert commands.stdout == "plain,holders\n"
    assert options.stdout == "plain,--idle-for\n"


@pytest.mark.parametrize(
    "arguments", ["explain absent", "decisions absent", "gpus absent", "explain --number 812"]
)
def test_an_error_names_a_command_that_helps_and_no_http(run: Run, arguments: str) -> None:
    said = run(*arguments.split()).stderr

    assert "`idlegpu " in said
    assert not any(word in said for word in ("GET", "/v1/", "http", "404"))
