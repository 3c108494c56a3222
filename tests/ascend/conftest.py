"""Installs, and chooses backends for the operators, which take no ``backend``."""

import pytest

from fusedadam import ascend, backends, functional
from fusedadam.engine.kept_launches import LaunchCache
from tests.support import PLACES


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    """Each device with each of its backends."""
    choose, asked = backends.choose, []

    def chosen(device, wanted):
        asked.append(device)
        return choose(device, request.param[1])

    monkeypatch.setattr(backends, "choose", chosen)
    monkeypatch.setattr(functional, "LAUNCHES", LaunchCache(most=16))  # launches of other backends are kept there
    yield request.param
    assert asked, f"nothing asked for a backend, so {request.param[1]} was not tested"


@pytest.fixture
def device(place):
    return place[0]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request):
    """Installs; what "npu" means."""
    with ascend.install(request.param):
        yield request.param


@pytest.fixture
def cpu():
    with ascend.install("cpu"):
        yield
