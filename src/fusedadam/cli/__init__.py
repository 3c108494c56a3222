"""The commands of ``python -m fusedadam``: demo, bench, verify, doctor (a folder each) and run.

They use the package as a user would, and nothing in the package uses them. A new command goes here, and into the list
in ``__main__.py``. What commands share:

frame.py            exit codes, parsers, JSON output
streams.py          standard streams that are closed, full or no longer read
children.py         Ctrl-C while a command has started other processes
display.py          text that fits the terminal, tables, progress
charts.py           what matplotlib charts have in common
harness/            times optimizers against their peers
optimizer_names.py  what --optimizers takes: our names, and package.module:Class
contestants.py      which optimizers are measured, with which options
peers.py            peers for optimizers that torch does not have
"""
