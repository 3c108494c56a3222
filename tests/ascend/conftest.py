"""Where the operators run: they take no ``backend``, so these tests choose it for them."""

import pytest

from fusedadam import backends
from tests.support import PLACES


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    """Each device with each of its backends."""
    choose, asked = backends.choose, []

    def chosen(device, wanted):
        asked.append(device)
        return choose(device, request.param[1])

    monkeypatch.setattr(backends, "choose", chosen)
    yield request.param
    assert asked, f"nothing asked for a backend, so {request.param[1]} was not tested"


@pytest.fixture
def device(place):
    return place[0]
