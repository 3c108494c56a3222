"""A process whose steps are interrupted by real signals: `python -m tests.faults.under_signals NAME SECONDS`."""

from __future__ import annotations

import faulthandler
import functools
import os
import random
import signal
import sys
import threading
import time

import torch

from tests.faults.consistency import assert_old_or_new, assert_same_values, reloaded, values
from tests.faults.test_interrupts import scene_of, undisturbed

LEAST = 10  # interruptions, however slow the machine is
SITUATIONS = ("first", "later", "later, gaps")


class Disturber:
    """Sends Ctrl-C at random moments from another thread; it has an effect only while a step is under way."""

    def __init__(self):
        self.armed, self.chance = False, random.Random(0)
        signal.signal(signal.SIGINT, self.handle)
        threading.Thread(target=self.run, daemon=True).start()

    def handle(self, *_):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def run(self):
        while True:
            time.sleep(self.chance.uniform(0, 200e-6))
            if self.armed:
                os.kill(os.getpid(), signal.SIGINT)

    def interrupts(self, step):
        """Whether the step was interrupted."""
        try:
            self.armed = True
            step()
            self.armed = False
        except KeyboardInterrupt:
            return True
        return False


def main(name, seconds):
    faulthandler.enable()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    scenes = [(*scene_of(name, situation), situation) for situation in SITUATIONS]
    disturber, interruptions, end = Disturber(), 0, time.monotonic() + seconds
    while time.monotonic() < end or interruptions < LEAST:
        scene, together, situation = random.choice(scenes)
        optimizer = scene()
        if not disturber.interrupts(optimizer.step):
            continue
        interruptions += 1
        where = f"{situation}, after {interruptions} interruptions"
        assert_old_or_new(values(optimizer), *undisturbed(scene), together, where)
        other = reloaded(optimizer, functools.partial(scene.make, **scene.options))
        optimizer.step()
        other.step()
        assert_same_values(values(optimizer), values(other), f"{where}: the next step")
    print(interruptions)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
