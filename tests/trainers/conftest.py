import sys

import pytest


@pytest.fixture(autouse=True)
def _accelerate_forgets():
    """Its settings are shared by all of a process, Hugging Face's Trainer included."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
