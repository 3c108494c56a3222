"""torch.distributed.checkpoint with FSDP2: a checkpoint is restored to the bit.

With other numbers of processes, and in other ways: test_every_checkpoint.py.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import fusedadam
from tests.contract.common import MAKERS, PLAIN, leaves
from tests.distributed import reference
from tests.distributed.parts import fully_shard
from tests.distributed.world import on

STEPS, MORE = 3, 2  # before a checkpoint, and after it
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Bits = dict[str, str]


class Model(nn.Module):
    """Seven rows, which two and three processes divide unevenly, and one row, of which most processes have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh()).square().mean()


class Run:
    """A model and its optimizer, divided unless ``plain``."""

    def __init__(self, name: str, seed: int = 0, plain: bool = False, two_groups: bool = False, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        if not plain:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("parts",))
            fully_shard(self.model.first, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        params: Any = list(self.model.parameters())
        if two_groups:
            params = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.3}]
        self.optimizer = MAKERS[name](params, **options)
        self.rank, self.done = 0 if plain else dist.get_rank(), 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(100 * self.done + self.rank)
            self.model(torch.randn(4, 6, generator=generator)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **given)
        self.done = STEPS

    def bits(self) -> Bits:
        """Of every weight and state, whole."""
        found = {}
        for name, param in self.model.named_parameters():
            own = {"": param.detach(), **self.optimizer.state[param]}
            found |= {f"{name} {state}": digest(value) for state, value in own.items()}
        return found


def digest(tensor: Any) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    bits = hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:12]
    return f"{whole.dtype} {tuple(whole.shape)} {bits}"


def alike(answers: list[Any]) -> Any:
    """What all processes have answered."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


# What the processes of a world run together. Fresh models begin with other weights: what is not loaded shows.


class Waiting(dcp.FileSystemWriter):
    """Writes nothing until training has gone on."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.may_write = threading.Event()

    def write_data(self, *what: Any) -> Any:
        self.may_write.wait()
        return super().write_data(*what)


@on("two")
def test_saving_asynchronously_saves_that_moment_and_disturbs_nothing(tmp_path):
    group, ends = dist.new_group(backend="gloo"), {}
    for name in PLAIN:
        run, undisturbed, loaded = Run(name), Run(name), Run(name, seed=1)
        run.train(STEPS)
        undisturbed.train(STEPS)
        writer, before = Waiting(f"{tmp_path}/{name}"), run.bits()
        saving = dcp.async_save(run.state(), storage_writer=writer, process_group=group)
        run.train(MORE)
        undisturbed.train(MORE)
        assert run.bits() == undisturbed.bits()
        assert not saving.done()
        writer.may_write.set()
        saving.result()
        loaded.load(f"{tmp_path}/{name}")
        assert loaded.bits() == before
        loaded.train(MORE)
        ends[name] = loaded.bits()
        assert ends[name] == run.bits()
    return ends


@on("three")
@pytest.mark.parametrize("steps", [1, 0], ids=["trained", "untrained"])
def test_every_process_has_the_same_keys_whatever_its_shards_are(steps):
    keys = {}
    for name in PLAIN:
        run = Run(name)
        run.train(steps)
        keys[name] = list(get_optimizer_state_dict(run.model, run.optimizer, options=FLAT))
    assert "state.last.weight.exp_avg" in keys["AdamW"]
    assert "state.last.bias.ema_params" in keys["EmaAdamW"]
    return keys


# Before the first step torch asks for states by calling step() with gradients of zero.

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "lr as a tensor": {"lr": 0.03},  # made anew for each run, since tensors are not to be shared
    "two groups": {"two_groups": True},
}


def asked_and_not_asked(variant: str, plain: bool) -> dict[str, tuple[Bits, Bits]]:
    found = {}
    for name in PLAIN if VARIANTS[variant] else reference.EVERY:
        ends = []
        for ask in (False, True):
            options = {**VARIANTS[variant], "backend": "eager"}  # kernels have no part in it
            if "lr" in options:
                options["lr"] = torch.tensor(options["lr"])
            run = Run(name, plain=plain, **options)
            if ask:
                before = {n: digest(p.detach()) for n, p in run.model.named_parameters()}
                states = get_optimizer_state_dict(run.model, run.optimizer)["state"]
                assert {float(own["step"]) for own in states.values()} == {0.0}
                assert {n: digest(p.detach()) for n, p in run.model.named_parameters()} == before
                assert all(p.grad is None for p in run.model.parameters())
            run.train(STEPS)
            assert {float(own["step"]) for own in run.optimizer.state.values()} == {STEPS}
            ends.append(run.bits())
        found[name] = ends[0], ends[1]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_asking_for_states_before_the_first_step_is_no_step(two, variant):
    for ends in (alike(two.run(asked_and_not_asked, variant, False)), asked_and_not_asked(variant, True)):
        for name, (not_asked, asked) in ends.items():
            assert asked == not_asked, name


def test_what_torch_asks_with_is_still_a_step_for_whoever_calls_it_himself():
    """Gradients of zero and lr=0 are nothing special: only torch's own question is no step."""
    (param,) = params = leaves([(3, 2)])
    optimizer = fusedadam.AdamW(params, lr=0.0)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 1


@pytest.mark.parametrize("ask", [False, True])
def test_before_the_first_step_averages_are_the_weights_as_they_are(ask):
    """For whoever looks: as an evaluation before training, or a checkpoint of step 0, does."""
    run = Run("EmaAdamW", plain=True)
    if ask:
        get_optimizer_state_dict(run.model, run.optimizer)
    with torch.no_grad():
        for param in run.model.parameters():
            param.fill_(7.0)  # weights that came later
    with run.optimizer.ema_weights():
        assert all(bool((param == 7).all()) for param in run.model.parameters())
    assert all(bool((value == 7).all()) for value in run.optimizer.ema_state_dict(run.model).values())
    saved = get_optimizer_state_dict(run.model, run.optimizer)["state"]
    assert all(bool((own["ema_params"] == 7).all()) and not own["ema_params"].requires_grad for own in saved.values())


def test_averages_in_backward_begin_with_the_weights_that_it_finds():
    ends = []
    for ask in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = fusedadam.step_in_backward(model, lambda params: fusedadam.EmaAdamW(params, lr=0.5, ema_decay=0.9))
        if ask:
            get_optimizer_state_dict(model, optimizer)
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        ends.append([optimizer.state[p]["ema_params"] for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=0, atol=0)
