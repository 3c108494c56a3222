"""Lightning's Trainer and Fabric: clipping, mixed precision, a GradScaler, checkpoints.

Lightning raises if it is to clip the gradients of an optimizer whose ``_step_supports_amp_scaling`` is True, as it is
for torch's fused optimizers. Ours support clipping and scaling, so it is True for GradScaler and False for Lightning.
"""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.trainers.training import (
    OPTIONS,
    assert_same_bits,
    everything,
    far,
    loader,
    loss_of,
    network,
    ours,
    schedule,
    torchs,
    weights,
)

STEPS = 4  # in an epoch
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def pl():
    return pytest.importorskip("pytorch_lightning")


@pytest.fixture
def fit(pl, tmp_path):
    class Regression(pl.LightningModule):
        def __init__(self, make, seed):
            super().__init__()
            self.make, self.net = make, network(seed)

        def training_step(self, batch, _):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            optimizer = self.make(self)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"},
            }

    def fit(make, epochs=3, ckpt_path=None, accelerator="cpu", **options):
        """``make`` is given the module."""
        trainer = pl.Trainer(
            accelerator=accelerator, devices=1, max_epochs=epochs, default_root_dir=tmp_path, **QUIET, **options
        )
        module = Regression(make, seed=0 if ckpt_path is None else 7)  # what is resumed must come from the file
        trainer.fit(module, loader(), ckpt_path=ckpt_path, weights_only=ckpt_path is not None)
        return module, trainer

    return fit


def of(make, *arguments, **options):
    return lambda module: make(module.parameters(), *arguments, **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_clipped_run_is_torchs(fit, precision):
    own, expected = (weights(fit(of(make), precision=precision, gradient_clip_val=0.5)[0]) for make in (ours, torchs))
    allowed = {"32-true": 1e-5, "bf16-mixed": 2e-3}[precision]  # autocast makes steps of 2**-8 of the least difference
    torch.testing.assert_close(own, expected, rtol=0, atol=allowed)
    assert far(own, weights(fit(of(ours), precision=precision)[0]), 10 * allowed), "clipping changed nothing"


@pytest.mark.parametrize("make", [fusedadam.AdamW, fusedadam.AdamP, fusedadam.EmaAdamW])
def test_a_resumed_run_is_the_uninterrupted_one(fit, tmp_path, make):
    """To the bit, averages included; torch.load(weights_only=True) reads the file."""
    options = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    path = tmp_path / "last.ckpt"
    straight, (_, first) = fit(of(ours, make), **options), fit(of(ours, make), epochs=1, **options)
    first.save_checkpoint(path)
    resumed = fit(of(ours, make), ckpt_path=path, **options)
    (expected, states), result = (everything(module, trainer.optimizers[0]) for module, trainer in (straight, resumed))
    assert_same_bits(result, (expected, states))
    assert all(state["step"] == 3 * STEPS / 2 for state in states)
    if make is fusedadam.EmaAdamW:
        averages = [state["ema_params"] for state in states]
        assert far(averages, expected, 1e-3)
        assert far(averages, weights(network()), 1e-3)


def test_ema_weights_are_there_for_validation(pl, tmp_path):
    """``self.optimizers()`` is Lightning's wrapper, which passes everything on."""
    seen = []

    class Averaged(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _):
            return loss_of(self.net, batch)

        def validation_step(self, batch, _):
            with self.optimizers().ema_weights():
                seen.append(weights(self.net))

        def configure_optimizers(self):
            return fusedadam.EmaAdamW(self.parameters(), **OPTIONS)

    module = Averaged()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, limit_val_batches=1, default_root_dir=tmp_path, **QUIET
    )
    trainer.fit(module, loader(), loader())
    averages = [trainer.optimizers[0].state[p]["ema_params"] for p in module.parameters()]
    assert_same_bits(seen, [averages])
    assert far(averages, weights(module), 1e-3)


def test_stepping_in_backward_is_an_ordinary_run(fit):
    def in_backward(module):
        return fusedadam.step_in_backward(module, ours)

    runs = [fit(make, precision="bf16-mixed") for make in (of(ours), in_backward)]
    assert_same_bits(*(everything(module, trainer.optimizers[0]) for module, trainer in runs))


def half_precision(pl, accelerator, scale):
    scaler = torch.amp.GradScaler("cuda" if accelerator == "gpu" else "cpu", init_scale=scale)
    return pl.plugins.MixedPrecision("16-mixed", scaler._device, scaler)


# torch's optimizer is not called at all for a step that is skipped
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_float16_with_a_scaler_and_clipping_is_torchs(pl, fit, accelerator):
    """The scale begins so high that steps are skipped. (Trainer(precision="16-mixed") is bfloat16 on a CPU.)"""
    results, counts = [], []
    for make in (ours, torchs):
        plugin = half_precision(pl, accelerator, 2.0**20)
        module, trainer = fit(of(make), accelerator=accelerator, plugins=[plugin], gradient_clip_val=0.5)
        results.append(weights(module))
        counts.append({float(state["step"]) for state in trainer.optimizers[0].state.values()})
    torch.testing.assert_close(*results, rtol=0, atol=1e-3)
    assert counts[0] == counts[1]
    assert all(0 < taken < 3 * STEPS for taken in counts[0])


def test_lightnings_plugin_clips_what_it_has_unscaled(pl):
    """The refusal itself: torch's fused optimizers meet it."""
    params = list(network().parameters())
    plugin = half_precision(pl, "cpu", 8.0)
    for make, refused in ((ours, False), (torchs, True)):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = make(params, fused=True)
        if refused:
            with pytest.raises(RuntimeError, match="fused"):
                plugin.clip_gradients(optimizer, 0.5)
        else:
            plugin.clip_gradients(optimizer, 0.5)
            assert torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params])).item() == pytest.approx(0.5)


def test_fabric_clips_and_scales_as_with_torchs(pl):
    fabric_package = pytest.importorskip("lightning_fabric")
    from lightning_fabric.plugins.precision import MixedPrecision

    results = []
    for make in (ours, torchs):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
        fabric = fabric_package.Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        net = network()
        model, optimizer = fabric.setup(net, make(net.parameters()))
        for batch in [*loader(), *loader()]:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch))
            fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            optimizer.step()
        results.append(weights(net))
        assert isinstance(optimizer, torch.optim.Optimizer)
    torch.testing.assert_close(*results, rtol=0, atol=1e-3)
    assert far(results[0], weights(network()), 1e-2)
