"""The commands of `python -m fusedadam`, one module each."""
