"""The optimizers: one file each, with its rule, its scalars and its class, on the base in contract/.

Nothing else is here. catalog.py lists them.
"""
