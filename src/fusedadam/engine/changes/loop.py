"""The compiled loop of snapshot.py: it compares every tensor of a step with what it was.

Never imported: snapshot.py hands this text to the loader of generated code. Everything is an int64, pointers included:
arrays would be reference-counted in every call. The loop calls CPython's C interface by address, with the GIL held.

What it assumes about objects in memory, and what makes sure of it:
- the second word of every Python object is its type: snapshot.py checks it on one object
- where a tensor's Python object leads to its TensorImpl, and what that keeps in which word: internals.py finds each
  word at start-up and verifies it on tensors of many kinds
- which word of a DTensor is its local tensor: from the class's slot descriptors, and checked for every tensor
Where one of these does not hold, the plain look in snapshot.py is used. Hints are only prefetched: memory that is gone
or never was does no harm, so what they assume about dicts and TensorImpls may be wrong.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusedadam.codegen import numba_cache
from fusedadam.codegen.numba_cache import inline
from fusedadam.engine.changes.internals import HALF_WORD, INLINE
from fusedadam.engine.changes.names import *

TYPE = 1  # the word of any Python object that says what it is
WORD = 8  # bytes
VERSION = 16  # bytes of a version counter before the version itself
AHEAD = 3  # slots between a prefetch and its use
AUTOGRAD = 3  # a word of a TensorImpl, for hints alone
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
def exchange(context, address, index, value):
    """Stores ``value`` as the word at ``index``; returns whether it changed."""

    def emit(context, b, signature, args):
        place = b.gep(b.inttoptr(args[0], I64.as_pointer()), [args[1]])
        before = b.load(place)
        b.store(args[2], place)
        return b.zext(b.icmp_signed("!=", before, args[2]), I64)

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def increment(context, address):
    """Adds 1 to the half word at an address, as other threads see it at once."""

    def emit(context, b, signature, args):
        b.atomic_rmw("add", b.inttoptr(args[0], I32.as_pointer()), I32(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def prefetch(context, address):
    """Asks for the memory at an address, and does nothing if there is none."""

    def emit(context, b, signature, args):
        pointer = b.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        b.call(b.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind), [pointer, I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), emit


call1, call2, call3_int = caller("pointer", 1), caller("pointer", 2), caller("int", 3)


@inline
def compare(words, most_dimensions, found, kind, layout, address, slot):
    """Compares one tensor with its layout, which is brought up to date, and with its address."""
    if found == 0 or at(found, TYPE) != kind:  # never let a foreign object be taken for a tensor
        return CHANGED
    impl_at, storage_at, dimensions_at, offset_at, kind_at, keys_at, data_at, nbytes_at, deleter_at, _, shared = words
    impl = at(found, impl_at)
    count = at(impl, dimensions_at)
    changed = exchange(layout, LAYOUT_KIND, at(impl, kind_at) & HALF_WORD)
    changed |= exchange(layout, LAYOUT_KEYS, at(impl, keys_at)) | exchange(layout, LAYOUT_COUNT, count)
    if count > most_dimensions:
        return CHANGED
    sizes = impl + WORD * (dimensions_at + 1)
    if count > INLINE:
        sizes = at(sizes, 0)
    strides = sizes + WORD * max(count, INLINE)
    for d in range(count):
        changed |= exchange(layout, LAYOUT_DIMENSIONS + 2 * d, at(sizes, d))
        changed |= exchange(layout, LAYOUT_DIMENSIONS + 2 * d + 1, at(strides, d))
    begin, needed = 0, at(slot, SLOT_NEEDED)
    if needed > 0:  # a storage may have shrunk under its tensor, to nothing or to less than it needs
        storage = at(impl, storage_at)
        if storage == 0 or at(storage, data_at) == 0 or at(storage, deleter_at) == shared:
            return (
                CHANGED  # shared: memory of a lazy clone, of which torch makes a copy when it is asked for the address
            )
        offset = at(impl, offset_at) * at(slot, SLOT_ITEM)
        if offset + needed > at(storage, nbytes_at):
            return CHANGED
        begin = at(storage, data_at) + offset
    moved = exchange(address, 0, begin)
    return CHANGED if changed else MOVED if moved else SAME


@inline
def prefetch_slot(hint):
    """Prefetches everything that a slot led to the last time. Between two steps the caches have been filled with other
    things, and each object of a tensor is only found through the one before: the loop would wait for each in turn."""
    if at(hint, 0) != 0:
        for k in range(HINT_WORDS):
            prefetch(at(hint, k))
        prefetch(at(hint, 0) + 56)  # a DTensor's own words may be on the next line of the cache
        prefetch(at(hint, 2) + 64)  # and a TensorImpl has three lines
        prefetch(at(hint, 2) + 128)


@inline
def remember(words, hint, found, here, owner):
    """Where a tensor is: its Python and C++ objects and its storage; the dict that leads to a state, and what leads
    from a parameter to its gradient. Addresses only: the objects may be gone by the next time."""
    if exchange(hint, 0, found) | exchange(hint, 1, here):
        impl_at, storage_at = words[0], words[1]
        impl, outer = at(here, impl_at), at(found, impl_at)
        exchange(hint, 2, impl)
        exchange(hint, 3, at(impl, storage_at))
        exchange(hint, 4, owner if owner else outer)
        exchange(hint, 5, at(owner, DICT_KEYS) if owner else at(outer, AUTOGRAD))
        exchange(hint, 6, owner if owner else at(impl, words[9]))  # the version, which is incremented after the step
        exchange(hint, 7, owner if owner else at(outer, words[9]))


@inline
def entry(owner, slot):
    """What a dict has for a key, read where it was when the snapshot was taken; 0 if it is no longer there. Keys of the
    same shape have as many entries, and a dict has a key only once."""
    keys, k = at(owner, DICT_KEYS), at(slot, SLOT_ENTRY)
    if (at(keys, KEYS_SHAPE) & HALF_WORD) != at(slot, SLOT_DICT_SHAPE) or at(keys, k - 1) != at(slot, SLOT_KEY):
        return 0
    return at(keys, k)


@inline
def same_objects(a, objects, known, count):
    """Whether a list still holds the same objects in the same order."""
    same = True
    for k in range(count):
        same &= call2(a[LIST_ITEM], objects, k) == at(known, k)
    return same


@numba_cache.function("int64(CPointer(int64))", error_model="numpy")
def look(a):
    """``a``: the words that names.py lists. Returns SAME, MOVED or CHANGED."""
    if not same_objects(a, a[PARAMS], a[KNOWN_PARAMS], a[N_PARAMS]):
        return CHANGED
    if not same_objects(a, a[OWNERS], a[KNOWN_OWNERS], a[N_OWNERS]):
        return CHANGED
    # in registers: the compiler would load them again after every call
    words = (
        a[IMPL_AT], a[STORAGE_AT], a[DIMENSIONS_AT], a[OFFSET_AT], a[KIND_AT], a[KEYS_AT], a[DATA_AT], a[NBYTES_AT],
        a[DELETER_AT], a[VERSION_AT], a[SHARED],
    )  # fmt: skip
    list_item, set_item, dict_item, add_reference = a[LIST_ITEM], a[SET_ITEM], a[DICT_ITEM], a[ADD_REFERENCE]
    params, values, tensors, slots, count, hints = a[PARAMS], a[VALUES], a[FOUND], a[SLOTS], a[N_SLOTS], a[HINTS]
    layouts, addresses, most_dimensions, dict_type = a[LAYOUTS], a[ADDRESSES], a[MOST_DIMENSIONS], a[DICT_TYPE]
    layout_size = WORD * (LAYOUT_DIMENSIONS + 2 * most_dimensions)
    answer, other_specs = SAME, 0
    for k in range(min(AHEAD, count)):
        prefetch_slot(hints + WORD * HINT_WORDS * k)
    for k in range(count):
        prefetch_slot(hints + WORD * HINT_WORDS * min(k + AHEAD, count - 1))
        slot = slots + WORD * SLOT_WORDS * k
        kind = at(slot, SLOT_KIND)

        owner = 0
        if kind in (STATE, FIXED):
            owner = call2(list_item, values, at(slot, SLOT_STATE))
            found = 0
            if owner != 0 and at(slot, SLOT_ENTRY) != 0 and at(owner, TYPE) == dict_type:
                found = entry(owner, slot)
            if found == 0 and owner != 0:
                found = call2(dict_item, owner, at(slot, SLOT_KEY))
        else:
            found = call2(list_item, params, at(slot, SLOT_PARAM))
            if kind != PARAM:
                get_grad = at(slot, SLOT_ENTRY)  # the function itself, where the class does not have its own
                found = call2(get_grad, found, 0) if get_grad != 0 else call2(a[GET_ATTRIBUTE], found, a[GRAD_NAME])
        if found == 0:
            call1(a[CLEAR_ERROR], 0)
            return CHANGED
        if kind not in (GRAD, NO_GRAD):  # an attribute comes with a reference of its own, which the list takes over
            call1(add_reference, found)
        call3_int(set_item, tensors, k, found)

        if kind == NO_GRAD:
            answer_here = SAME if found == a[NONE] else CHANGED
        else:
            layout, address = layouts + layout_size * k, addresses + WORD * k
            here = found
            if at(slot, SLOT_LOCAL_TYPE) == 0:
                answer_here = compare(words, most_dimensions, found, at(slot, SLOT_TYPE), layout, address, slot)
            elif at(found, TYPE) != at(slot, SLOT_TYPE):
                answer_here = CHANGED
            else:  # a DTensor
                here = at(found, a[LOCAL_AT])
                answer_here = compare(words, most_dimensions, here, at(slot, SLOT_LOCAL_TYPE), layout, address, slot)
                other_specs |= exchange(slot, SLOT_SPEC, at(found, a[SPEC_AT]))
            if answer_here != CHANGED:
                remember(words, hints + WORD * HINT_WORDS * k, found, here, owner)
        if kind == FIXED and answer_here == MOVED:
            answer_here = CHANGED
        answer = max(answer, answer_here)
    exchange(a[OTHER_SPECS], 0, other_specs)
    return answer


@numba_cache.function("int64(CPointer(int64))", error_model="numpy")
def increment_versions(a):
    """Of the parameters that the last look has found, as torch.autograd.graph.increment_version does."""
    for k in range(a[N_SLOTS]):
        slot = a[SLOTS] + WORD * SLOT_WORDS * k
        if at(slot, SLOT_TRACKED):
            param = at(a[KNOWN_PARAMS], at(slot, SLOT_PARAM))
            increment(at(at(param, a[IMPL_AT]), a[VERSION_AT]) + VERSION)
    return 0


@intrinsic
def call_function(context, address, a):
    def emit(context, b, signature, args):
        return numba_cache.call(context, b, args[0], types.int64, [a], [args[1]])

    return types.int64(types.int64, a), emit


@numba_cache.cfunc("int64(CPointer(int64))", error_model="numpy")
def enter(a):
    """What snapshot.py calls, with the GIL held: a C function that calls ``look`` or ``increment_versions``."""
    return call_function(a[FUNCTION], a)
