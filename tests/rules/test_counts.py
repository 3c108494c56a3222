"""Step counts: ``beta ** step`` is a power. That a device has its bits: see engine/test_device_scalars.py."""

from __future__ import annotations

import math
import sys
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedadam.rules.counts import LAST, RECENT, SIZES, Count, Powers, recent_powers
from fusedadam.rules.ops import where

BETAS = st.one_of(
    st.sampled_from([0.0, 0.9, 0.95, 0.99, 0.999, 0.9999, 1 - 1e-7, 1e-300, 5e-324]), st.floats(0, 1 - 2**-53)
)
BORDERS = [n + k for n in (2**6, 2**12, 2**18, 2**24) for k in (-1, 0, 1)]
NUMBERS = st.one_of(st.integers(1, 2**13), st.integers(1, 2**24 + 1), st.sampled_from(BORDERS))


@settings(max_examples=200, deadline=None)
@given(BETAS, st.lists(NUMBERS, min_size=1, max_size=4))
@example(0.999, [2**24 + 1])
@example(0.9999999, BORDERS)
def test_a_power_is_a_power(beta, steps):
    for step in steps:
        power = beta ** Count(step)
        # each factor and product is rounded once; beside 1, what is left of a small power is as good as 0
        assert power == pytest.approx(math.pow(beta, step), rel=2**-50, abs=1e-30)
        assert 0.0 <= power < 1.0


def test_powers_are_kept_for_recent_betas_only():
    """Schedulers that cycle the momentum (OneCycleLR) bring another beta in every step."""
    for step in range(1, 200):
        assert (0.85 + step * 1e-4) ** Count(step) > 0
    assert recent_powers.cache_info().currsize <= RECENT


def test_threads_that_ask_for_powers_at_once():
    """Two of them could leave a table that was wrong for the rest of the process."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for k in range(60):
            powers, barrier = Powers(0.999 - k * 1e-6), threading.Barrier(4)

            def ask(powers=powers, barrier=barrier):
                barrier.wait()
                for number in (20_000, 3_000_000, 77):
                    powers.power(number)

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            fresh = Powers(0.999 - k * 1e-6)
            assert [powers.power(n) for n in (1, 20_000, 3_000_000)] == [fresh.power(n) for n in (1, 20_000, 3_000_000)]
    finally:
        sys.setswitchinterval(interval)


def test_a_new_beta_costs_a_fraction_of_a_millisecond():
    on_host, table = [], []
    for k in range(100):  # the quickest: a busy machine is as slow as it likes
        begin = time.thread_time()
        Powers(0.85 + k * 1e-5).power(20_000 + k)
        middle = time.thread_time()
        assert len(Powers(0.85 + k * 1e-5).table) == sum(SIZES)
        on_host.append(middle - begin)
        table.append(time.thread_time() - middle)
    assert min(on_host) < 3e-4
    assert min(table) < 1e-3


@pytest.mark.parametrize("step", [LAST, LAST + 1, 2.0**25, 1e9])
def test_a_count_beyond_the_tables_is_the_last_power(step):
    """Only a loaded state dict can say so: float32 counts to 2**24."""
    assert 0.5 ** Count(0) == 1.0
    assert 0.9 ** Count(step) == 0.0
    assert 0.0 <= 0.99999999 ** Count(step) <= 1.0


def test_a_count_on_the_host_compares_as_a_number():
    assert (Count(1) == 1) is True
    assert where(Count(2) == 1, 0.0, 1.0) == 1.0
