"""A process in which other threads disturb a step: `python -m tests.faults.racing RACE BACKEND SECONDS`.

It exits with 0 if nothing unexpected was raised and all values are plausible. Gradients are between -1 and 1, so first
moments must be, too, and second moments between 0 and 1: foreign memory soon shows.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import random
import re
import sys
import threading
import time
import traceback

if len(sys.argv) > 2 and sys.argv[2] == "triton":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, which torch.optim does

import torch

import fusedadam
from fusedadam.functional import adamw_

# The one thing that a step may answer if tensors are replaced while it runs.
ALLOWED = re.compile(r"another thread replaces parameters, gradients or states")
# malloc returns blocks of 1 MB and more to the system at once: who still reads there crashes
LARGE, SMALL = (1024, 512), (16,)
LR = 1e-4


def drawn(like):
    return torch.empty_like(like).uniform_(-1, 1)


class Race:
    """``turn`` is what the main thread does again and again, ``disturb`` what the others do meanwhile."""

    disturbers = 1
    make = staticmethod(fusedadam.AdamW)

    def __init__(self, backend):
        shapes = [SMALL, SMALL, (2, 3)] if backend == "triton" else [LARGE, SMALL, LARGE, (3, 5), SMALL]
        self.params = [torch.nn.Parameter(drawn(torch.empty(shape))) for shape in shapes]
        self.set_grads()
        self.optimizer = self.make(self.params, lr=LR, backend=backend)
        self.turns = 0

    def set_grads(self):
        for p in self.params:
            p.grad = drawn(p.detach())

    def turn(self):
        self.optimizer.step()

    def disturb(self):
        raise NotImplementedError

    def check(self):
        """After all threads have ended."""
        for p in self.params:
            own = {"param": p.detach(), **self.optimizer.state.get(p, {})}
            assert own["param"].abs().max() <= 1 + 20 * LR * (self.turns + 1), "a parameter has gone too far"
            for name, (low, high) in {"exp_avg": (-1, 1), "exp_avg_sq": (0, 1)}.items():
                if name in own:
                    assert low <= own[name].min(), f"{name} has {own[name].min()}"
                    assert own[name].max() <= high, f"{name} has {own[name].max()}"
        self.set_grads()
        self.turn()


class GradientsReplaced(Race):
    """By others, never by None: torch itself crashes if one thread reads ``p.grad`` while another sets it to None."""

    def disturb(self):
        self.set_grads()


class GradientsReplacedAndClipped(GradientsReplaced):
    """In the step, by the norm of all; rules that sum run several kernels."""

    @staticmethod
    def make(params, **options):
        return fusedadam.AdamP(params, max_grad_norm=1.0, **options)


class ZeroGrad(Race):
    def disturb(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.set_grads()


class StatesReplaced(Race):
    def disturb(self):
        for p in self.params:
            state = self.optimizer.state.get(p, {})
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = state[name].clone()


class StatesTakenAway(Race):
    """And put back: the optimizer's dict of states has one entry less in between."""

    def disturb(self):
        for p in self.params:
            state = self.optimizer.state.pop(p, None)
            if state is not None:
                self.optimizer.state[p] = state


class ValuesWritten(Race):
    def disturb(self):
        for p in self.params:
            with torch.no_grad():
                p.copy_(drawn(p))
                if p.grad is not None:
                    p.grad.uniform_(-1, 1)


class OptionsWritten(Race):
    def disturb(self):
        for group in self.optimizer.param_groups:
            group["lr"] = random.uniform(0, LR)
            group["betas"] = (random.uniform(0.5, 0.9), 0.999)
            group["amsgrad"] = random.random() < 0.5
            group["max_grad_norm"] = random.choice([None, 1.0])


class LookedAt(Race):
    """What a progress display or a checkpoint in the background may ask for."""

    def disturb(self):
        self.optimizer.state_dict()
        repr(self.optimizer)
        self.optimizer.memory_summary()


class TwoOptimizers(Race):
    def __init__(self, backend):
        super().__init__(backend)
        self.other = Race(backend)

    def disturb(self):
        self.other.turn()


class OwnLock(Race):
    """The same optimizer in several threads, one at a time."""

    disturbers = 2

    def __init__(self, backend):
        super().__init__(backend)
        self.lock = threading.Lock()

    def turn(self):
        with self.lock:
            self.set_grads()
            self.optimizer.step()

    disturb = turn


class Clipping(GradientsReplaced):
    def turn(self):
        fusedadam.clip_grad_norm_(self.params, 0.5)


class Operator(Race):
    """The caller lets go of tensors that an operator was given."""

    def __init__(self, backend):
        super().__init__(backend)
        self.backend = backend
        self.lists = [[p.detach().clone().abs() for p in self.params] for _ in range(4)]

    def turn(self):
        param, grad, exp_avg, exp_avg_sq = self.lists
        adamw_(param, grad, exp_avg, exp_avg_sq, step=3, lr=LR, backend=self.backend)

    def disturb(self):
        for own in self.lists:
            for k, tensor in enumerate(own):
                own[k] = drawn(tensor).abs()


RACES = {
    kind.__name__: kind
    for kind in (
        GradientsReplaced, GradientsReplacedAndClipped, ZeroGrad, StatesReplaced, StatesTakenAway, ValuesWritten,
        OptionsWritten, LookedAt, TwoOptimizers, OwnLock, Clipping, Operator,
    )
}  # fmt: skip


LEAST = 10  # turns, however slow the machine is


def run(race, seconds):
    """What was raised that may not be, as tracebacks, each once."""
    wrong, stop = {}, threading.Event()

    @contextlib.contextmanager
    def noting():
        try:
            yield
        except Exception as error:
            if not (isinstance(error, RuntimeError) and ALLOWED.search(str(error))):
                wrong.setdefault((type(error), str(error)[:60]), traceback.format_exc())

    def disturb():
        while not stop.is_set():
            with noting():
                race.disturb()

    threads = [threading.Thread(target=disturb) for _ in range(race.disturbers)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for race.turns in itertools.count(1):
        with noting():
            race.turn()
        if time.monotonic() > end and race.turns >= LEAST:
            break
    stop.set()
    for thread in threads:
        thread.join()
    with noting():
        race.check()
    return list(wrong.values())


def main(backend, seconds, *names):
    faulthandler.enable()
    torch.set_num_threads(2)
    sys.setswitchinterval(1e-5)
    for name in names:
        print(name, file=sys.stderr, flush=True)  # the last one is the one that crashed
        race = RACES[name](backend)
        race.turn()  # compiled before anything is disturbed
        wrong = run(race, float(seconds))
        print(race.turns)
        if wrong:
            print("\n".join(wrong), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
