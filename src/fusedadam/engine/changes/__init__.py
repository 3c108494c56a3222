"""What has changed since the last step: address, dtype, shape, strides and dispatch keys of every tensor.

snapshot.py   the tensors as they were in the last step, and whether any has changed
loop.py       the comparison, as one compiled loop over all tensors
names.py      what snapshot and loop share
internals.py  where torch keeps an address, a storage and dispatch keys: found and verified at start-up
"""
