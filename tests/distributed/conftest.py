from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.reference import Library
from tests.distributed.world import World

WORLDS = ("two", "three", "four")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``pytest -n 2 --dist loadgroup`` each world exists once, and not once for each of pytest's own processes."""
    for item in items:
        worlds = [world for world in WORLDS if world in getattr(item, "fixturenames", ())]
        if worlds:  # the largest: two groups would be a third one
            item.add_marker(pytest.mark.xdist_group(f"world of {worlds[-1]}"))


def _world(size: int) -> Iterator[World]:
    world = World(size)
    yield world
    world.end()


@pytest.fixture(scope="session")
def one() -> Iterator[World]:
    """A process of its own, as in the other worlds: if it does not answer, the test fails and says where it was."""
    yield from _world(1)


@pytest.fixture(scope="session")
def two() -> Iterator[World]:
    yield from _world(2)


@pytest.fixture(scope="session")
def three() -> Iterator[World]:
    yield from _world(3)


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    yield from _world(4)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("one process"))
