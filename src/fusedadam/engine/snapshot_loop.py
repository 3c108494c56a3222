"""The compiled loop of snapshot.py. It calls Python's own C interface, with the GIL held, through addresses.

Never imported: snapshot.py hands this text to generated.py, which is why its constants are repeated here. Everything
is an int64, pointers included: arrays would be counted in and out of every call.
"""

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusedadam.generated import numba_cache

SAME, MOVED, CHANGED = 0, 1, 2
PARAM, GRAD, NO_GRAD, STATE, STEP = 0, 1, 2, 3, 4
DATA, DEVICE, KIND, SHAPE, STRIDES, OFFSET = range(6)  # the words of a DLTensor; KIND is dimensions and dtype
WORDS = 8  # of a slot
TYPE = 1  # the word of any Python object that says what it is
HINTS = 8  # words that are remembered of a slot
AHEAD = 3  # by how many slots memory is asked for before it is needed
# Of a dict the word that leads to its keys, and words of a TensorImpl: for hints alone, so they may as well be wrong
KEYS, AUTOGRAD, VERSION = 4, 3, 5
I32, I64 = ir.IntType(32), ir.IntType(64)


def caller(result, arguments):
    """Calls the C function at an address with one, two or three arguments."""

    def emit(context, b, signature, args):
        function = ir.FunctionType(I32 if result == "int" else I64, [I64] * arguments)
        value = b.call(b.inttoptr(args[0], function.as_pointer()), args[1:])
        return b.sext(value, I64) if result == "int" else value

    def one(context, function, a):
        return types.int64(types.int64, types.int64), emit

    def two(context, function, a, b):
        return types.int64(types.int64, types.int64, types.int64), emit

    def three(context, function, a, b, c):
        return types.int64(types.int64, types.int64, types.int64, types.int64), emit

    return intrinsic({1: one, 2: two, 3: three}[arguments])


@intrinsic
def at(context, address, index):
    """The word at ``index`` of the memory at ``address``."""

    def emit(context, b, signature, args):
        return b.load(b.gep(b.inttoptr(args[0], I64.as_pointer()), [args[1]]))

    return types.int64(types.int64, types.int64), emit


@intrinsic
def differs(context, address, index, value):
    """Whether the word at ``index`` is another than ``value``, which it then becomes."""

    def emit(context, b, signature, args):
        place = b.gep(b.inttoptr(args[0], I64.as_pointer()), [args[1]])
        before = b.load(place)
        b.store(args[2], place)
        return b.zext(b.icmp_signed("!=", before, args[2]), I64)

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def prefetch(context, address):
    """Asks for the memory at an address, and does nothing if there is none."""

    def emit(context, b, signature, args):
        pointer = b.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        b.call(b.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind), [pointer, I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), emit


call1, call2, call2_int, call3_int = caller("pointer", 1), caller("pointer", 2), caller("int", 2), caller("int", 3)


@numba.njit(error_model="numpy")
def compare(clear_error, describe, found, kind, tensor, layout, dimensions, address, needed, words):
    """Compares one tensor with what it was: ``layout`` has its device, dtype, shape, strides and dispatch keys, and is
    kept up. ``needed``: the bytes from its first element to its last. ``words``: where torch keeps what DLPack does not
    tell, see internals.py."""
    if found == 0 or at(found, TYPE) != kind:  # never let a foreign object be taken for a tensor
        return CHANGED
    impl_at, storage_at, keys_at, data_at, nbytes_at = words
    if call2_int(describe, found, tensor) != 0:
        call1(clear_error, 0)
        return CHANGED
    impl = at(found, impl_at)
    changed = differs(layout, 0, at(tensor, DEVICE)) | differs(layout, 1, at(tensor, KIND))
    changed |= differs(layout, 2, at(impl, keys_at))
    own_dimensions = at(tensor, KIND) & 0xFFFFFFFF
    if own_dimensions > dimensions:
        return CHANGED
    for d in range(own_dimensions):
        changed |= differs(layout, 3 + 2 * d, at(at(tensor, SHAPE), d))
        changed |= differs(layout, 4 + 2 * d, at(at(tensor, STRIDES), d))
    begin = at(tensor, DATA) + at(tensor, OFFSET)
    moved = differs(address, 0, begin)
    if needed > 0:  # a storage may have shrunk under its tensor, to nothing or to less than it needs
        storage = at(impl, storage_at)
        if storage == 0 or at(storage, data_at) == 0:
            return CHANGED
        if begin + needed > at(storage, data_at) + at(storage, nbytes_at):
            return CHANGED
    return CHANGED if changed else MOVED if moved else SAME


@numba.njit(error_model="numpy")
def expect(hint):
    """Asks for all that a slot led to the last time. Between two steps other things have filled the caches, and each
    object of a tensor is only found through the one before: the loop would wait for one after the other."""
    if at(hint, 0) != 0:
        for k in range(HINTS):
            prefetch(at(hint, k))
        prefetch(at(hint, 0) + 56)  # where a DTensor's own words may be on another line of the cache
        prefetch(at(hint, 2) + 64)  # and a TensorImpl has three
        prefetch(at(hint, 2) + 128)


@numba.njit(error_model="numpy")
def remember(hint, found, here, impl_at, storage_at, owner):
    """Where a tensor is: its objects, for Python and for C++, and its storage; the dict that leads to a state, and what
    leads from a parameter to its gradient. Numbers only: what was there may be gone by the next time."""
    if differs(hint, 0, found) | differs(hint, 1, here):
        impl, outer = at(here, impl_at), at(found, impl_at)
        differs(hint, 2, impl)
        differs(hint, 3, at(impl, storage_at))
        differs(hint, 4, owner if owner else outer)
        differs(hint, 5, at(owner, KEYS) if owner else at(outer, AUTOGRAD))
        differs(hint, 6, owner if owner else at(impl, VERSION))  # which is counted up after the step
        differs(hint, 7, owner if owner else at(outer, VERSION))


@numba_cache.njit("int64(int64[::1])", error_model="numpy")
def look(a):
    list_item, set_item, attribute, dict_item, keep, clear_error, describe = (
        a[0], a[1], a[2], a[3], a[4], a[5], a[6]
    )  # fmt: skip
    params, owners, values, tensors, none, grad, part_at, spec_at = a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14]
    known_params, n_params, known_owners, n_owners = a[15], a[16], a[17], a[18]
    slots, n_slots, addresses, layouts, dimensions, tensor, otherwise = a[19], a[20], a[21], a[22], a[23], a[24], a[25]
    hints, impl_at, storage_at = a[26], a[27], a[28]
    words = a[27], a[28], a[29], a[30], a[31]
    for k in range(n_params):
        if call2(list_item, params, k) != at(known_params, k):
            return CHANGED
    for k in range(n_owners):
        if call2(list_item, owners, k) != at(known_owners, k):
            return CHANGED
    answer, others = SAME, 0
    for k in range(min(AHEAD, n_slots)):
        expect(hints + 8 * HINTS * k)
    for k in range(n_slots):
        expect(hints + 8 * HINTS * min(k + AHEAD, n_slots - 1))
        slot = slots + 8 * WORDS * k
        param, what, key, state, kind, part_kind, needed = (
            at(slot, 0), at(slot, 1), at(slot, 2), at(slot, 3), at(slot, 4), at(slot, 5), at(slot, 7)
        )  # fmt: skip
        owner = 0
        if what in (STATE, STEP):
            owner = call2(list_item, values, state)
            found = call2(dict_item, owner, key) if owner != 0 else 0
        else:
            found = call2(list_item, params, param)
            if what != PARAM:
                found = call2(attribute, found, grad)
        if found == 0:
            call1(clear_error, 0)
            return CHANGED
        if what not in (GRAD, NO_GRAD):  # an attribute comes with a reference of its own, which the list takes over
            call1(keep, found)
        call3_int(set_item, tensors, k, found)
        if what == NO_GRAD:
            own = SAME if found == none else CHANGED
        else:
            layout, address = layouts + 8 * k * (3 + 2 * dimensions), addresses + 8 * k
            here = found
            if part_kind == 0:
                own = compare(
                    clear_error, describe, found, kind, tensor, layout, dimensions, address, needed, words
                )  # fmt: skip
            elif at(found, TYPE) != kind:
                own = CHANGED
            else:  # divided among processes
                here = at(found, part_at)
                own = compare(
                    clear_error, describe, here, part_kind, tensor, layout, dimensions, address, needed, words
                )  # fmt: skip
                others |= differs(slot, 6, at(found, spec_at))
            if own != CHANGED:
                remember(hints + 8 * HINTS * k, found, here, impl_at, storage_at, owner)
        if what == STEP and own == MOVED:  # no longer a view of the optimizer's own counts
            own = CHANGED
        answer = max(answer, own)
    differs(otherwise, 0, others)
    return answer
