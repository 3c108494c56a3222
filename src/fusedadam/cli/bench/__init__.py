"""`python -m fusedadam bench`: every optimizer of ours beside its peers, on this machine.

command.py        options, and the order of things
contestants.py    (one folder up) who is measured: ours, and the peers that are installed
shapes.py         on which parameters; shapes_from.py takes them from a checkpoint or a Hugging Face config
planning.py       how large, on this machine
measuring.py      ours and its peers taking turns, each in a process of its own
processes.py      such processes, with a time limit
worker.py         what runs in them
timing.py         how a call is timed
traffic.py        bytes that must move, that are kept, that are needed in between
results.py        what was measured; the JSON file is this
tables.py, picture.py, page.py    for the terminal, as a PNG, as an HTML page
"""

from fusedadam.cli.bench.command import main

__all__ = ["main"]
