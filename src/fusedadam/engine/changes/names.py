"""Names that snapshot.py and its compiled loop share: answers, kinds of slots, and the words they exchange.

Both import these names, and the loop is compiled anew when this file changes.
"""

SAME, MOVED, CHANGED = range(3)  # CHANGED: more than addresses, so a new plan is needed
# what is in a slot; NO_GRAD: a gradient that is expected to be None; FIXED: a state that must stay where it is, such as
# the step, a view of the optimizer's own counts, and what is in page-locked host memory
PARAM, GRAD, NO_GRAD, STATE, FIXED = range(5)

# The loop's argument is an array of these words. Functions of CPython's C interface:
C_FUNCTIONS = (
    "PyList_GetItem", "PyList_SetItem", "PyObject_GetAttr", "PyDict_GetItem", "Py_IncRef", "PyErr_Clear",
)  # fmt: skip
LIST_ITEM, SET_ITEM, GET_ATTRIBUTE, DICT_ITEM, ADD_REFERENCE, CLEAR_ERROR = range(6)
# lists of this call: all parameters, the owners and values of the optimizer's state, and the tensors that are found
PARAMS, OWNERS, VALUES, FOUND = range(6, 10)
# objects: None, and the attribute's name "grad"
NONE, GRAD_NAME = range(10, 12)
# which words of a DTensor are its local tensor and its spec
LOCAL_AT, SPEC_AT = range(12, 14)
# what is expected: ids of parameters and owners; the slots, their addresses and layouts
KNOWN_PARAMS, N_PARAMS, KNOWN_OWNERS, N_OWNERS, SLOTS, N_SLOTS, ADDRESSES, LAYOUTS = range(14, 22)
# memory to work in: is any DTensor's spec another object than before?; what to prefetch
OTHER_SPECS, HINTS = range(22, 24)
# where torch keeps things: internals.TensorWords, in its order
IMPL_AT, STORAGE_AT, DIMENSIONS_AT, OFFSET_AT, KIND_AT, KEYS_AT, DATA_AT, NBYTES_AT, DELETER_AT = range(24, 33)
VERSION_AT, SHARED = range(33, 35)
FUNCTION = 35  # the address of the one that is called
MOST_DIMENSIONS = 36  # of any tensor here
DICT_TYPE = 37  # the id of ``dict``
N_ARGUMENTS = 38

# The words of a slot; types and specs are the ids of objects, and NEEDED the bytes from its first element to its last.
SLOT_PARAM, SLOT_KIND, SLOT_KEY, SLOT_STATE, SLOT_TYPE, SLOT_LOCAL_TYPE, SLOT_SPEC, SLOT_NEEDED, SLOT_ITEM = range(9)
# of a state: the word of its dict's keys that holds it, if known, and what tells such keys from others; of a gradient:
# the address of the function that is the attribute, if known
SLOT_ENTRY, SLOT_DICT_SHAPE = range(9, 11)
SLOT_TRACKED = 11  # of a parameter: it has a version, which a step increments
SLOT_WORDS = 12
# Words of CPython's dicts: where one has its keys, and where keys have their shape, in the lower half
DICT_KEYS, KEYS_SHAPE = 4, 1
# The words of a layout: dtype and device, dispatch keys, how many dimensions, then size and stride of each
LAYOUT_KIND, LAYOUT_KEYS, LAYOUT_COUNT, LAYOUT_DIMENSIONS = range(4)
HINT_WORDS = 8  # of a slot
