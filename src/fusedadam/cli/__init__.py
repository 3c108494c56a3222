"""The commands of ``python -m fusedadam``, one module or folder each: demo, bench, verify, doctor, run.

They use the package as a user would, and nothing in the package uses them. A new command goes here, and into
``__main__.py``'s list.
"""
