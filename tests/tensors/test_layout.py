"""Tensors that share memory are refused, with gaps or without; tensors that only lie between each other are not."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fusedadam
from fusedadam import checks
from fusedadam.tensors.layout import Span

BASE = torch.arange(200)


def elements(tensor):
    return set(tensor.flatten().tolist())


@st.composite
def layouts(draw):
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    strides = [draw(st.integers(0, 12)) for _ in shape]
    return BASE.as_strided(shape, strides, draw(st.integers(0, 60)))


@given(layouts(), layouts())
def test_shared_means_that_an_element_is_shared(a, b):
    """Against the elements themselves, counted one by one."""
    assert Span(a).shares(Span(b)) == Span(b).shares(Span(a)) == bool(elements(a) & elements(b))


@given(layouts(), layouts())
def test_elements_of_another_size(a, b):
    """A tensor of bytes over the same memory: an element is eight of them."""
    in_bytes = b.view(torch.uint8) if b.dim() and b.stride(-1) == 1 else b[..., None].view(torch.uint8)
    assert Span(a).shares(Span(in_bytes)) == bool(elements(a) & elements(b))


def column(k, width=3):
    return torch.zeros(4, 12)[:, k : k + width]


def test_one_strided_tensor_for_two_states():
    p, g = torch.ones(4, 3), torch.ones(4, 3)
    m = column(0)
    with pytest.raises(RuntimeError, match="exp_avg and exp_avg_sq share memory"):
        fusedadam.functional.adamw_(p, g, m, m, step=1)
    assert p.eq(1).all()
    assert m.eq(0).all()


def test_overlapping_columns_of_one_buffer():
    buffer = torch.ones(4, 12)
    g = torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="share memory"):
        fusedadam.functional.adamw_(buffer[:, :3], g, buffer[:, 2:5], buffer[:, 5:8], step=1)
    assert buffer.eq(1).all()


def test_columns_beside_each_other_are_fine():
    buffer, apart = torch.ones(4, 12), [torch.ones(4, 3) for _ in range(4)]
    columns = [buffer[:, 3 * k : 3 * k + 3] for k in range(4)]
    fusedadam.functional.adamw_(*columns, step=1, lr=0.1)
    fusedadam.functional.adamw_(*apart, step=1, lr=0.1)
    assert torch.equal(buffer, torch.cat(apart, dim=1))


def test_parameters_that_overlap():
    buffer = torch.zeros(4, 6)
    params = [torch.nn.Parameter(buffer[:, k : k + 3]) for k in (0, 2)]
    for p in params:
        p.grad = torch.ones(4, 3)
    optimizer = fusedadam.AdamW(params)
    with pytest.raises(RuntimeError, match="param and param share memory"):
        optimizer.step()
    assert not optimizer.state
    assert buffer.eq(0).all()


def test_one_strided_gradient_of_two_parameters_is_read_but_not_clipped():
    params = [torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(2)]
    buffer = torch.ones(4, 6)
    for p in params:
        p.grad = buffer[:, :3]
    optimizer = fusedadam.AdamW(params)
    optimizer.step()
    assert torch.equal(*params)
    with pytest.raises(RuntimeError, match="share memory"):
        fusedadam.clip_grad_norm_(params, 1.0)
    assert buffer.eq(1).all()


def test_a_gradient_in_the_memory_of_its_parameter():
    buffer = torch.ones(4, 6)
    param = torch.nn.Parameter(buffer[:, :3])
    param.grad = buffer[:, 1:4]
    with pytest.raises(RuntimeError, match="share memory"):
        fusedadam.AdamW([param]).step()
    assert buffer.eq(1).all()


def test_many_columns_of_one_buffer_are_compared_in_a_moment():
    buffer = torch.zeros(100, 1000)
    begin = time.process_time()
    checks.no_shared_memory(("param", buffer[:, k]) for k in range(1000))
    assert time.process_time() - begin < 3
