"""One server over the tiny model for most tests: the real ranks, sessions and torch engine in this process, real HTTP, the
official SDK as the client. Ray's part is tested in `test_serve.py`."""

import os

os.environ.setdefault("TINKER_TELEMETRY", "0")

import pytest

from tests.support.local_server import LocalServer


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    local = LocalServer(tmp_path_factory.mktemp("server"))
    yield local
    local.stop()


@pytest.fixture
def client(server):
    client = server.client()
    yield client
    client.close("success").result()
