"""The compiled loop of snapshot.py. It calls Python's own C interface, with the GIL held, through addresses."""

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

SAME, MOVED, CHANGED = 0, 1, 2
PARAM, GRAD, NO_GRAD, STATE = 0, 1, 2, 3
I32, I64 = ir.IntType(32), ir.IntType(64)


def caller(result, arguments):
    """Calls the C function at an address; integers and pointers alike are int64."""

    def emit(context, b, signature, args):
        function = ir.FunctionType(I32 if result == "int" else I64, [I64] * arguments)
        value = b.call(b.inttoptr(args[0], function.as_pointer()), args[1:])
        return b.sext(value, I64) if result == "int" else value

    def one(context, function, a):
        return types.int64(types.int64, types.int64), emit

    def two(context, function, a, b):
        return types.int64(types.int64, types.int64, types.int64), emit

    return intrinsic(one if arguments == 1 else two)


@intrinsic
def at(context, address, index):
    """The int64 at ``index`` of the memory at ``address``."""

    def emit(context, b, signature, args):
        return b.load(b.gep(b.inttoptr(args[0], I64.as_pointer()), [args[1]]))

    return types.int64(types.int64, types.int64), emit


call1, call2, call2_int = caller("pointer", 1), caller("pointer", 2), caller("int", 2)


@numba.njit(error_model="numpy")
def differs(row, column, value):
    if row[column] == value:
        return False
    row[column] = value
    return True


@numba.njit(error_model="numpy")
def relaid(tensor, row):
    """Compares a DLTensor's device, dtype, shape and strides with what they were, and keeps them."""
    changed = differs(row, 0, tensor[1]) | differs(row, 1, tensor[2])  # device; dimensions and dtype
    dimensions = tensor[2] & 0xFFFFFFFF
    if dimensions > (len(row) - 2) // 2:
        return True
    for d in range(dimensions):
        changed |= differs(row, 2 + 2 * d, at(tensor[3], d)) | differs(row, 3 + 2 * d, at(tensor[4], d))
    return changed


@numba.njit(error_model="numpy")
def compare(functions, found, kind, tensor, layout, addresses, k):
    type_of, release, clear_error, describe = functions[3], functions[4], functions[5], functions[6]
    own_kind = call1(type_of, found)
    call1(release, own_kind)
    if own_kind != kind:
        return CHANGED
    if call2_int(describe, found, tensor.ctypes.data) != 0:
        call1(clear_error, 0)
        return CHANGED
    changed = relaid(tensor, layout)
    address = tensor[0] + tensor[5]
    moved = addresses[k] != address
    addresses[k] = address
    return CHANGED if changed else MOVED if moved else SAME


SIGNATURE = (
    "int64(int64[::1], int64, int64, int64, int64, int64,"
    "int64[::1], int64[::1], int64[:, ::1], int64[::1], int64[:, ::1], int64[::1])"
)


@numba.njit(SIGNATURE, error_model="numpy", cache=globals().get("cached", False))  # set by the loader
def look(functions, params, owners, values, none, grad, known_params, known_owners, slots, addresses, layouts, tensor):
    list_item, attribute, dict_item = functions[0], functions[1], functions[2]
    release, clear_error = functions[4], functions[5]
    for k in range(len(known_params)):
        if call2(list_item, params, k) != known_params[k]:
            return CHANGED
    for k in range(len(known_owners)):
        if call2(list_item, owners, k) != known_owners[k]:
            return CHANGED
    answer = SAME
    for k in range(len(slots)):
        param, what, key, state, known = slots[k, 0], slots[k, 1], slots[k, 2], slots[k, 3], slots[k, 4]
        if what == STATE:
            if call2(dict_item, call2(list_item, values, state), key) != known:
                call1(clear_error, 0)
                return CHANGED
            continue
        found = call2(list_item, params, param)
        if what != PARAM:
            found = call2(attribute, found, grad)
            if found == 0:
                call1(clear_error, 0)
                return CHANGED
        if what == NO_GRAD:
            own = SAME if found == none else CHANGED
        else:
            own = compare(functions, found, known, tensor, layouts[k], addresses, k)
        if what != PARAM:  # an attribute comes with a reference of its own
            call1(release, found)
        answer = max(answer, own)
    return answer
