"""Have tensors moved since the last step? The answer costs a fraction of a microsecond for each parameter.

A launch table stays valid as long as every parameter, gradient and state has the address, dtype, shape, strides, device
and dispatch keys (is it negated, is it zeros without memory?) that it had, and a storage that is large enough. In plain
Python the comparison takes longer than the update of a small tensor, so a compiled loop (loop.py) makes it,
where Numba is available and internals.py has found what it reads. A snapshot holds numbers, never tensors. The tensors
that it has looked at go to the caller, who keeps them until the kernels are done.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.changes import internals, names
from fusedadam.engine.changes.names import CHANGED, FIXED, MOVED, NO_GRAD, PARAM, SAME, STATE
from fusedadam.engine.geometry import Int64s
from fusedadam.tensors.layout import address_of, extent, has_memory
from fusedadam.tensors.shards import is_dtensor, local


class Slot(NamedTuple):
    """A tensor to be looked at: ``what`` of the ``param``-th parameter, whose state is the ``state``-th. ``is_fixed``:
    a state that must stay where it is, since no other memory will do."""

    param: int
    what: int | str  # PARAM, GRAD, NO_GRAD (a gradient that is expected to be None) or the key of a state
    state: int = -1
    is_fixed: bool = False

    @property
    def code(self) -> int:
        return self.what if isinstance(self.what, int) else FIXED if self.is_fixed or self.what == "step" else STATE


Tensors: TypeAlias = list[Any]  # what was found in each slot
Look: TypeAlias = Callable[[list[Tensor], dict[Any, Any]], tuple[int, Tensors]]


class Snapshot:
    """``compare(params, states)`` says SAME, MOVED or CHANGED. Unless it is CHANGED, ``addresses`` are then the present
    ones, and the tensors that come with the answer are the ones that have them: another thread may replace a gradient
    at any time, but its memory stays as long as they are kept.

    ``params`` and ``states`` are the optimizer's, handed in anew each time; their order counts. ``compare`` is one
    of two functions: the compiled loop's (``prepare_loop``), or ``_plain_look``'s.
    """

    def __init__(
        self, slots: Sequence[Slot], params: list[Tensor], states: dict[Any, Any], expected: Tensors | None = None
    ) -> None:
        """``expected``: the tensors that are to be in the slots; see ``is_of_expected``."""
        self.slots = list(slots)
        self.params, self.owners = list(map(id, params)), list(map(id, states))
        tensors = list(find(self.slots, params, states)) if expected is None else expected
        self.addresses: Int64s = np.array([0 if t is None else address_of(local(t)) for t in tensors], dtype=np.int64)
        self.specs = [t._spec if is_dtensor(t) else None for t in tensors]  # how each DTensor is sharded
        self.increment_versions: Callable[[], None] | None = None  # of the parameters, where a compiled loop can
        self.compare: Look = (prepare_loop() or _plain_look)(self, tensors, params, states)
        addresses = self.addresses.copy()
        _, found = self.compare(params, states)
        # a tensor that the compiled loop cannot describe, or finds elsewhere than torch does
        if self.compare(params, states)[0] != SAME or (self.addresses != addresses).any():
            self.compare, self.increment_versions = _plain_look(self, tensors, params, states), None
            _, found = self.compare(params, states)
        # False: another thread has replaced one of them in the meantime
        self.is_of_expected = len(found) == len(tensors) and all(map(operator.is_, found, tensors))

    def sharded_as_before(self, tensors: Tensors) -> bool:
        """Whether DTensors whose specs are other objects than before are still sharded the same."""
        for k, tensor in enumerate(tensors):
            known = self.specs[k]
            if known is not None and tensor._spec is not known:
                if tensor._spec.placements != known.placements or tensor._spec.mesh != known.mesh:
                    return False
                self.specs[k] = tensor._spec
        return True


def find(slots: Sequence[Slot], params: list[Tensor], states: dict[Any, Any]) -> Iterator[Any]:
    """What is in each slot now."""
    values = list(states.values())
    for param, what, state, _ in slots:
        if isinstance(what, str):
            yield values[state].get(what)
        else:
            yield params[param] if what == PARAM else params[param].grad


def _plain_look(snapshot: Snapshot, _tensors: Sequence[Any], _params: list[Tensor], _states: dict[Any, Any]) -> Look:
    seen: list[Any] = [None] * len(snapshot.slots)

    def look(params: list[Tensor], states: dict[Any, Any]) -> tuple[int, Tensors]:
        params, states = list(params), dict(states)  # at once: other threads may change them at any time
        if list(map(id, params)) != snapshot.params or list(map(id, states)) != snapshot.owners:
            return CHANGED, []
        answer, tensors = SAME, list(find(snapshot.slots, params, states))
        for k, tensor in enumerate(tensors):
            what = snapshot.slots[k].what
            if what == NO_GRAD:
                answer = answer if tensor is None else CHANGED
                continue
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                return CHANGED, []
            here = local(tensor)
            keys = internals.dispatch_keys(here)
            layout = (type(tensor), here.dtype, here.size(), here.stride(), here.device, keys)
            if layout != seen[k] or not has_memory(here):
                seen[k], answer = layout, CHANGED
            address = address_of(here)
            if address != snapshot.addresses[k]:
                snapshot.addresses[k] = address
                answer = max(answer, CHANGED if snapshot.slots[k].code == FIXED else MOVED)
        if answer != CHANGED and not snapshot.sharded_as_before(tensors):
            answer = CHANGED
        return answer, tensors

    return look


@functools.cache
def prepare_loop() -> Callable[[Snapshot, Sequence[Any], list[Tensor], dict[Any, Any]], Look] | None:
    """Makes compiled looks; None where one is unavailable, and the plain look has to do, more slowly."""
    at, sample = internals.find(), object()
    if at is None or importlib.util.find_spec("numba") is None:
        return None
    if ctypes.c_void_p.from_address(id(sample) + 8).value != id(type(sample)):
        return None  # the second word of an object is not its type, as in CPython
    from fusedadam import codegen
    from fusedadam.codegen import object_code

    text = Path(__file__).with_name("loop.py").read_text(encoding="utf-8")
    try:
        made_for = object_code.made_for() + inspect.getsource(names) + inspect.getsource(internals)
        loop, increment, enter = (
            codegen.function("snapshot", text, made_for, name).address
            for name in ("look", "increment_versions", "enter")
        )
    except ImportError:  # a Numba that does not go with this numpy, say
        return None
    run = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(enter)  # which keeps the GIL
    functions = np.array([*map(_address, names.C_FUNCTIONS)], dtype=np.int64)
    grad_name = "grad"

    def make(snapshot: Snapshot, tensors: Sequence[Any], params: list[Tensor], states: dict[Any, Any]) -> Look:
        if not _can_be_read(tensors):
            return _plain_look(snapshot, tensors, params, states)
        slots = _slot_words(snapshot, tensors, params, states)
        known_params, owners = (np.array(ids, dtype=np.int64) for ids in (snapshot.params, snapshot.owners))
        dimensions = max((local(t).dim() for t in tensors if t is not None), default=0)  # as few words as will do
        layouts = np.full((len(slots), names.LAYOUT_DIMENSIONS + 2 * dimensions), -1, dtype=np.int64)
        other_specs = np.zeros(1, dtype=np.int64)
        hints = np.zeros((len(slots), names.HINT_WORDS), dtype=np.int64)
        arrays = {
            names.KNOWN_PARAMS: known_params, names.KNOWN_OWNERS: owners, names.SLOTS: slots,
            names.ADDRESSES: snapshot.addresses, names.LAYOUTS: layouts, names.OTHER_SPECS: other_specs,
            names.HINTS: hints,
        }  # fmt: skip
        words = np.zeros(names.N_ARGUMENTS, dtype=np.int64)
        words[names.LIST_ITEM : names.CLEAR_ERROR + 1] = functions
        words[[names.NONE, names.GRAD_NAME, names.DICT_TYPE]] = id(None), id(grad_name), id(dict)
        words[[names.N_PARAMS, names.N_OWNERS, names.N_SLOTS]] = len(known_params), len(owners), len(slots)
        words[names.IMPL_AT : names.SHARED + 1] = at
        words[names.MOST_DIMENSIONS] = dimensions
        for name, array in arrays.items():
            words[name] = array.ctypes.data
        if any(spec is not None for spec in snapshot.specs):
            words[[names.LOCAL_AT, names.SPEC_AT]] = _dtensor_words()
        words[names.FUNCTION] = loop
        lists = slice(names.PARAMS, names.FOUND + 1)
        argument = ctypes.c_void_p(words.ctypes.data)
        # The loop knows classes by their addresses: if one were freed, a class of other objects could take its place.
        alive = arrays, {type(tensor) for outer in tensors for tensor in (outer, local(outer))}

        def look(now: list[Tensor], states: dict[Any, Any], _alive: object = alive) -> tuple[int, Tensors]:
            now, states = list(now), dict(states)  # at once: other threads may change them at any time
            now_owners, values = list(states), list(states.values())
            if len(now) != len(known_params) or len(now_owners) != len(owners):
                return CHANGED, []
            tensors: Tensors = [None] * len(slots)
            words[lists] = id(now), id(now_owners), id(values), id(tensors)
            other_specs[0] = 0
            answer: int = run(argument)
            if other_specs[0] and answer != CHANGED and not snapshot.sharded_as_before(tensors):
                answer = CHANGED
            return answer, tensors

        # words of its own: another thread may be in a look
        to_increment = words.copy()
        to_increment[names.FUNCTION] = increment
        incremented = ctypes.c_void_p(to_increment.ctypes.data)

        def increment_versions(_alive: object = (alive, to_increment)) -> None:
            run(incremented)

        snapshot.increment_versions = increment_versions
        return look

    return make


def _slot_words(snapshot: Snapshot, tensors: Sequence[Any], params: list[Tensor], states: dict[Any, Any]) -> Int64s:
    slots = np.zeros((len(tensors), names.SLOT_WORDS), dtype=np.int64)
    owned, grad = list(states.values()), torch._C.TensorBase.__dict__["grad"]
    _, get_grad, _, _, closure = (ctypes.c_uint64 * 5).from_address(_definition(grad))  # PyGetSetDef
    has_own_grad = {cls: inspect.getattr_static(cls, "grad") is not grad for cls in {*map(type, params)}}
    for row, slot, tensor, spec in zip(slots, snapshot.slots, tensors, snapshot.specs, strict=True):
        if isinstance(slot.what, str):
            row[names.SLOT_ENTRY], row[names.SLOT_DICT_SHAPE] = _entry(owned[slot.state], slot.what)
        elif slot.what == PARAM:
            row[names.SLOT_TRACKED] = not tensor.is_inference()
        elif not closure and not has_own_grad[type(params[slot.param])]:
            row[names.SLOT_ENTRY] = get_grad
        row[names.SLOT_PARAM], row[names.SLOT_STATE] = slot.param, slot.state
        row[names.SLOT_KIND], row[names.SLOT_KEY] = slot.code, id(slot.what)
        row[names.SLOT_TYPE] = id(type(tensor))
        if spec is not None:
            row[names.SLOT_LOCAL_TYPE], row[names.SLOT_SPEC] = id(type(tensor._local_tensor)), id(spec)
        if tensor is not None:
            here = local(tensor)  # whose dtype is not always the DTensor's
            row[names.SLOT_NEEDED], row[names.SLOT_ITEM] = extent(here), here.element_size()
    return slots


@functools.cache
def _dtensor_words() -> tuple[int, int]:
    """Which words of a DTensor are its local tensor and its spec."""
    from torch.distributed.tensor import DTensor

    return _word_of(DTensor.__dict__["_local_tensor"]), _word_of(DTensor.__dict__["_spec"])


def _can_be_read(tensors: Sequence[Any]) -> bool:
    """Whether every DTensor has a plain local tensor in the word that its class says; it may be an async collective."""
    for tensor in filter(is_dtensor, tensors):
        words = [ctypes.c_void_p.from_address(id(tensor) + 8 * word).value for word in _dtensor_words()]
        if type(tensor._local_tensor) is not Tensor or words != [id(tensor._local_tensor), id(tensor._spec)]:
            return False
    return True


def _entry(state: Any, key: str) -> tuple[int, int]:
    """The word of a dict's keys that holds a value, and the shape of the keys; zeros if they are not where CPython 3.10
    to 3.14 have them. See ``entry`` in loop.py."""
    if type(state) is not dict or not (3, 10) <= sys.version_info[:2] <= (3, 14):
        return 0, 0
    keys = ctypes.c_uint64.from_address(id(state) + 8 * names.DICT_KEYS).value
    count = (state.__sizeof__() - dict.__basicsize__) // 8  # of the words that keys have, if they are there
    if not keys or count <= 0:
        return 0, 0
    words = (ctypes.c_uint64 * count).from_address(keys)
    pair = id(key), id(state.get(key))
    for k in range(names.KEYS_SHAPE + 1, count - 1):
        if (words[k], words[k + 1]) == pair:
            return k + 1, words[names.KEYS_SHAPE] & internals.HALF_WORD
    return 0, 0


def _definition(descriptor: Any) -> int:
    """The address of a descriptor's PyMemberDef or PyGetSetDef: after head, class, name and qualified name."""
    return ctypes.c_void_p.from_address(id(descriptor) + 40).value or 0


def _word_of(slot: Any) -> int:
    """Which word of an object holds one of its class's ``__slots__``."""
    return (ctypes.c_ssize_t.from_address(_definition(slot) + 16).value) // 8  # the offset, after name and type


def _address(name: str) -> int:
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
