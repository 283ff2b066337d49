"""A server whose model calls a tool, for the tests of one file."""

import pytest

from tests.extras.serve.served import Client, serving
from tests.extras.serve.writing import CALL, engine_that_writes


@pytest.fixture(scope="module")
def port(quick_compilation):
    with serving(engine_that_writes("I look." + CALL)) as (server, _):
        yield server.port


@pytest.fixture
def client(port):
    return Client(port)
