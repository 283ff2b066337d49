"""The live page over HTTP: its answers, rejected requests, and the command."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from jaxrl.extras.view.server import FILES
from tests.extras.view.workdirs import (
    make_run,
    served,
    step_file,
    trajectory,
    view,
    write_lines,
    write_trajectories,
)
from tests.helpers import ROOT


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    write_trajectories(run)
    return run


@pytest.fixture(scope="module")
def server(run):
    with served(run) as server:
        get(server, "state")
        yield server


def request(server, path="/api/state", *, method="GET", host=None, **headers):
    """Return status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    response = connection.getresponse()
    result = response.status, dict(response.getheaders()), response.read().decode()
    connection.close()
    return result


def get(server, address):
    status, _, body = request(server, f"/api/{address}")
    assert status == 200, body
    return json.loads(body)


class TestAnswers:
    def test_they_are_those_of_the_viewer(self, server, run):
        viewer = view(run)
        for address in ("overview", "curves/0", "answer/0/1/0/3", "trajectory/0/4/1"):
            assert get(server, address) == json.loads(json.dumps(viewer.respond(address)))

    def test_of_a_run_that_grows_only_new_trajectories_are_sent(self, tmp_path):
        run = make_run(tmp_path / "run")
        write_trajectories(run, steps=[3])
        with served(run) as server:
            version = get(server, "state")["version"]
            known = get(server, "trajectories/0/0/0/0")
            assert (len(known["rows"]), len(known["tasks"])) == (4, 2)
            write_lines(step_file(run, 6), [trajectory("task 1"), trajectory("task 2"), "{"])
            assert get(server, "state")["version"] > version
            more = get(server, "trajectories/0/0/4/2")
            assert [row[:3] for row in more["rows"]] == [[6, 0, 1], [6, 1, 2]]
            assert more["tasks"] == [["task 2", "Where is task 2?"]]
            # All of them again, if a file was replaced.
            write_trajectories(run, steps=[3], num=1)
            get(server, "state")
            again = get(server, "trajectories/0/0/6/3")
            assert (again["generation"], again["num_known"], len(again["rows"])) == (1, [0, 0], 3)


class TestRefusals:
    def test_other_hosts(self, server):
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        for name in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST"):
            assert request(server, host=f"{name}:{port}")[0] == 200
        for name in ("evil.example", "127.0.0.1.evil.example", "0.0.0.0", "[::]", "127.1"):
            assert request(server, host=f"{name}:{port}")[0] == 403
            assert request(server, host=name)[0] == 403
        for hosts in ("", f"Host: 127.0.0.1:{port}\r\nHost: evil.example\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(f"GET / HTTP/1.1\r\n{hosts}\r\n".encode())
                assert b" 403 " in connection.recv(1000).split(b"\r\n")[0]

    def test_other_methods(self, server):
        for method in ("POST", "OPTIONS", "QUERY"):
            assert request(server, method=method)[0] == 405

    def test_pages_of_other_sites(self, server):
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
            assert request(server, Sec_Fetch_Site=site)[0] == status
            assert request(server, "/page.js", Sec_Fetch_Site=site)[0] == status
        assert request(server, "/", Sec_Fetch_Site="cross-site")[0] == 200

    @pytest.mark.parametrize(
        "path",
        [
            *("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/server.py"),
            *("/api/", "/api/curves", "/api/curves/0/0", "/api/curves/x", "/api/curves/-1"),
            *("/api/trajectory/0/9/0", "/api/trajectory/0/../0", "/api/answer/0/0/0/99", "/%00"),
            "/api/curves/" + "9" * 5000,
        ],
    )
    def test_addresses_without_an_answer(self, server, path):
        status, _, body = request(server, path)
        assert status == 404
        assert "error" in json.loads(body)

    def test_every_response_has_the_policy(self, server):
        for path in (*FILES, "/api/state", "/none"):
            _, headers, _ = request(server, path)
            policy = headers["Content-Security-Policy"].split("; ")
            assert policy[0] == "default-src 'none'"
            assert not [part for part in policy if "unsafe" in part or "*" in part]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in headers


class TestCommand:
    def test_it_serves_until_a_signal(self, run):
        code = "from jaxrl.cli import main; main()"
        command = [sys.executable, "-c", code, "view", str(run), "--port=0"]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            address = process.stdout.readline().split()[0]
            with urllib.request.urlopen(f"{address}api/overview") as response:
                assert json.load(response)["runs"][0]["name"] == "run"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
