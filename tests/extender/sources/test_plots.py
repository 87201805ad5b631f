import base64
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from extender.core.devices.readings import DeviceKey
from extender.settings.sources import Prometheus
from extender.sources.prometheus.plots import _STEPS, PrometheusPlots, _context
from simulation.cluster import run_cluster
from simulation.demo_fleet import demo_fleet

CARD = DeviceKey(("GPU-a", ""))


@asynccontextmanager
async def answering(handler: object) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/api/v1/query_range", handler)  # type: ignore[arg-type] # a test's
    async with TestServer(app) as server:
        yield f"http://{server.host}:{server.port}"


def plots(**settings: Any) -> PrometheusPlots:
    chosen = Prometheus(**settings)
    return PrometheusPlots(lambda: chosen, time.time)


async def test_the_last_hour_of_cards_and_mig_instances_is_returned() -> None:
    fleet = demo_fleet()
    async with run_cluster(fleet) as cluster:
        requested = [
            DeviceKey((view.uuid, view.gpu_instance_id))
            for node in ("gpu-h100-02", "gpu-a100-mig-01")
            for view in fleet.views(node)
        ]

        hour = await plots(url=cluster.prometheus_url).hour(requested)

    assert hour.error == ""
    assert len(hour.times) == _STEPS
    assert set(hour.activity) == set(requested)
    assert max(value or 0.0 for value in hour.activity[requested[0]]) == pytest.approx(
        0.97, abs=0.03
    )
    assert any(hour.memory_bytes[requested[0]])


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (web.Response(status=503), "HTTP 503"),
        (web.Response(text="<html>"), "unexpected"),
        (web.Response(status=302, headers={"Location": "/login"}), "HTTP 302"),
        (web.Response(body=b" " * (5 << 20)), "larger than"),
    ],
    ids=["fault", "no-json", "login-page", "too-large"],
)
async def test_an_unusable_answer_is_reported_and_not_raised(
    response: web.Response, why: str
) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return response

    async with answering(answer) as url:
        hour = await plots(url=url).hour([CARD])

    assert why in hour.error
    assert hour.activity == {}


async def test_an_answer_of_four_megabytes_is_read() -> None:
    text = '{"status": "success", "data": {"result": []}}'

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text.ljust(4 << 20))

    async with answering(answer) as url:
        assert (await plots(url=url).hour([CARD])).error == ""


async def test_an_unreachable_server_is_reported() -> None:
    hour = await plots(url="http://127.0.0.1:9").hour([CARD])

    assert "cannot query Prometheus" in hour.error


async def test_odd_rows_are_ignored() -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        rows = [
            {"metric": {"UUID": "GPU-a"}, "values": [[0, "1"], ["x"], None, [time.time(), "NaN"]]},
            {"metric": {}, "values": [[1, "1"]]},
            "odd",
        ]
        return web.json_response({"status": "success", "data": {"result": rows}})

    async with answering(answer) as url:
        hour = await plots(url=url).hour([CARD])

    assert hour.error == ""
    assert hour.activity == {CARD: [None] * _STEPS}


@pytest.mark.parametrize(
    "row",
    [
        '{"metric": {"UUID": ' + '{"a":' * 1015 + "1" + "}" * 1015 + '}, "values": []}',
        '{"metric": {"UUID": "GPU-a"}, "values": [["inf", "1"]]}',
    ],
    ids=["deep-label", "infinite-time"],
)
async def test_rows_that_cannot_be_read_are_reported_and_not_raised(row: str) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(text=f'{{"status": "success", "data": {{"result": [{row}]}}}}')

    async with answering(answer) as url:
        hour = await plots(url=url).hour([CARD])

    assert "cannot query Prometheus" in hour.error


async def test_credentials_and_selector_are_sent_with_each_query(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    seen = []

    async def answer(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        seen.append((request.headers["Authorization"], str(form["query"])))
        return web.json_response({"status": "success", "data": {"result": []}})

    async with answering(answer) as url:
        asking = plots(url=url, bearer_token_file=token, selector='{cluster="a"}')
        await asking.hour([CARD, DeviceKey(('"}bad', ""))])

    assert {header for header, _ in seen} == {"Bearer secret"}
    assert all('{cluster="a",' in query for _, query in seen)
    assert any('DCGM_FI_DEV_GPU_UTIL{cluster="a",UUID=~"GPU-a"}' in query for _, query in seen)
    assert any('dcgm_gpu_utilization{cluster="a",uuid=~"GPU-a"}' in query for _, query in seen)


@pytest.mark.parametrize(("password", "expected"), [("word\n", "me:word"), (None, "me:")])
async def test_a_user_is_sent_with_each_query(
    tmp_path: Path, password: str | None, expected: str
) -> None:
    file = tmp_path / "password"
    if password is not None:
        file.write_text(password)
    seen = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.add((request.headers["Authorization"], request.headers["X-Scope-OrgID"]))
        return web.json_response({"status": "success", "data": {"result": []}})

    async with answering(answer) as url:
        credentials = {"username": "me", "password_file": None if password is None else file}
        await plots(url=url, headers={"X-Scope-OrgID": "a"}, **credentials).hour([CARD])

    encoded = base64.b64encode(expected.encode()).decode()
    assert seen == {(f"Basic {encoded}", "a")}


def test_servers_are_verified_unless_that_is_switched_off(tmp_path: Path) -> None:
    safe, unsafe = (
        _context(Prometheus(url="https://p", insecure_skip_verify=is_unsafe))
        for is_unsafe in (False, True)
    )

    assert _context(Prometheus(url="http://p", insecure_skip_verify=True)) is None
    assert safe is not None
    assert unsafe is not None
    assert (safe.verify_mode, safe.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (unsafe.verify_mode, unsafe.check_hostname) == (ssl.CERT_NONE, False)
    absent = tmp_path / "absent"
    for settings in (
        Prometheus(url="https://p", ca_file=absent),
        Prometheus(url="https://p", cert_file=absent, key_file=absent),
    ):
        with pytest.raises(FileNotFoundError):
            _context(settings)


async def test_the_higher_of_two_values_counts_and_gaps_are_filled_by_the_other_metric() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        start, step = float(str(form["start"])), float(str(form["step"]))

        def row(*values: float | None, uuid: str = "GPU-a") -> dict[str, object]:
            samples = [
                [start + step * (at - 1), str(value)]
                for at, value in enumerate(values)
                if value is not None
            ]
            return {"metric": {"UUID": uuid}, "values": samples}

        rows: list[object] = []
        if "DCGM_FI_PROF_GR_ENGINE_ACTIVE{" in str(form["query"]):
            rows = [row(9, 0.5, None, 0.25, 9), row(None, 0.1, None, 0.75)]
        if "DCGM_FI_DEV_GPU_UTIL{" in str(form["query"]):
            rows = [row(None, 1, 2, 3), row(None, 30, None, None, uuid="GPU-b")]
        return web.json_response({"status": "success", "data": {"result": rows}})

    other = DeviceKey(("GPU-b", ""))
    async with answering(answer) as url:
        past = await plots(url=url).past([CARD, other], seconds=2.0, steps=3)

    assert past.activity == {CARD: [0.5, 0.02, 0.75], other: [0.3, None, None]}


async def test_the_number_of_devices_of_a_query_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extender.sources.prometheus.plots._MAX_DEVICES", 2)
    seen = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(str((await request.post())["query"]))
        return web.json_response({"status": "success", "data": {"result": []}})

    async with answering(answer) as url:
        asking = plots(url=url)
        await asking.hour([DeviceKey((f"GPU-{number}", "")) for number in (2, 1, 0)])
        queries = len(seen)
        await asking.hour([])

    assert all('"GPU-1|GPU-2"' in query for query in seen)
    assert len(seen) == queries > 0


async def test_without_a_prometheus_plots_are_not_configured() -> None:
    assert not plots(url="").is_configured


async def test_a_longer_time_has_wider_steps() -> None:
    day = 86_400.0
    seen = []

    async def answer(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        start, end = float(str(form["start"])), float(str(form["end"]))
        seen.append((end - start, form["step"]))
        rows = [{"metric": {"UUID": "GPU-a"}, "values": [[start, "100"], [end, "50"]]}]
        if "DCGM_FI_DEV_GPU_UTIL{" not in str(form["query"]):
            rows = []
        return web.json_response({"status": "success", "data": {"result": rows}})

    async with answering(answer) as url:
        past = await plots(url=url).past([CARD], seconds=day, steps=241)

    assert {(round(span), step) for span, step in seen} == {(86_400, "360.000")}
    assert len(past.times) == len(past.activity[CARD]) == 241
    assert past.times[-1] - past.times[0] == pytest.approx(day)
    assert (past.activity[CARD][0], past.activity[CARD][-1]) == (1.0, 0.5)
    assert past.activity[CARD][1:-1] == [None] * 239
