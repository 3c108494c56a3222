"""torch.optim.swa_utils: averaging the weights with one of our optimizers, and EmaAdamW instead of it."""

from __future__ import annotations

import pytest
import torch
from torch.optim import swa_utils

import fusedadam
from tests.trainers.training import far, loader, loss_of, network, ours, torchs, weights


def train(model, optimizer, epochs, after_step=lambda: None, after_epoch=lambda: None):
    for _ in range(epochs):
        for batch in loader():
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            after_step()
        after_epoch()


def swa(make):
    model = network()
    optimizer, averaged = make(model.parameters()), swa_utils.AveragedModel(model)
    scheduler, rates = swa_utils.SWALR(optimizer, swa_lr=0.2, anneal_epochs=2), []

    def after_epoch():
        averaged.update_parameters(model)
        scheduler.step()
        rates.extend(scheduler.get_last_lr())

    train(model, optimizer, 4, after_epoch=after_epoch)
    swa_utils.update_bn(loader(), averaged)
    return list(averaged.state_dict().values()), rates, weights(model)


def test_swa_with_its_schedule_and_statistics_is_torchs():
    (averaged, rates, trained), expected = swa(ours), swa(torchs)
    torch.testing.assert_close((averaged, rates, trained), expected, rtol=1e-4, atol=1e-5)
    assert rates[-1] == pytest.approx(0.2)  # the step saw what SWALR wrote
    assert far(averaged[1:3], trained[:2], 1e-2)


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_ema_adamw_is_adamw_with_swa_utils_ema(decay):
    """Of an average that begins with the first weights; swa_utils begins with those of the first update."""
    model = network()
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(decay))
    averaged.update_parameters(model)
    train(model, torchs(model.parameters()), 3, after_step=lambda: averaged.update_parameters(model))
    own = network()
    optimizer = ours(own.parameters(), fusedadam.EmaAdamW, ema_decay=decay, ema_warmup=False)
    train(own, optimizer, 3)
    averages = [optimizer.state[p]["ema_params"] for p in own.parameters()]
    torch.testing.assert_close(averages, weights(averaged), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(own), weights(model), rtol=1e-4, atol=1e-5)
    assert far(averages, weights(own), 1e-2)
    with optimizer.ema_weights():
        torch.testing.assert_close(weights(own), averages, rtol=0, atol=0)
