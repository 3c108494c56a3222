"""transformers.Trainer with a GPT-2 of two small layers: both ways to pass an optimizer, clipping, resuming."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.trainers import training
from tests.trainers.training import assert_same_bits, everything, far, schedule, weights

OPTIONS = {**training.OPTIONS, "eps": 1e-3}  # gradients are smaller here
STEPS, SAVED = 6, 3
WAYS = ["optimizers", "optimizer_cls_and_kwargs"]


@pytest.fixture(scope="module")
def hf():
    pytest.importorskip("accelerate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("transformers")


def language_model(hf, seed):
    torch.manual_seed(seed)
    config = hf.GPT2Config(
        vocab_size=31, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return hf.GPT2LMHeadModel(config)  # with dropout: a resumed run must find the random numbers again


def sentences():
    tokens = torch.randint(31, (24, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


@pytest.fixture
def train(hf, tmp_path):
    def train(make, way, resume=None, max_grad_norm=0.1, options=OPTIONS):
        model = language_model(hf, seed=0 if resume is None else 7)  # what is resumed must come from the files
        if way == "optimizers":
            optimizer = make(model.parameters(), **options)
            given = {"optimizers": (optimizer, schedule(optimizer))}
        else:
            given = {"optimizer_cls_and_kwargs": (make, options)}
        arguments = hf.TrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=STEPS,
            save_steps=SAVED,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=max_grad_norm,
            weight_decay=0.1,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
        )
        trainer = hf.Trainer(model, arguments, train_dataset=sentences(), **given)
        trainer.train(resume_from_checkpoint=resume)
        return model, trainer.optimizer.optimizer

    return train


@pytest.mark.parametrize("way", WAYS)
def test_a_clipped_run_is_torchs_and_a_resumed_one_is_the_uninterrupted_one(train, tmp_path, way):
    model, optimizer = train(fusedadam.AdamW, way)
    assert type(optimizer) is fusedadam.AdamW
    assert [g["weight_decay"] for g in optimizer.param_groups] == ([0.1] if way == "optimizers" else [0.1, 0.0])
    whole = everything(model, optimizer)
    assert_same_bits(everything(*train(fusedadam.AdamW, way, resume=str(tmp_path / f"run/checkpoint-{SAVED}"))), whole)
    assert all(state["step"] == STEPS for state in whole[1])
    torch.testing.assert_close(whole[0], weights(train(torch.optim.AdamW, way)[0]), rtol=1e-4, atol=1e-5)
    assert far(whole[0], weights(train(fusedadam.AdamW, way, max_grad_norm=0.0)[0]), 1e-3), "clipping changed nothing"


def test_clipping_inside_the_step_is_the_trainers(train):
    outside = weights(train(fusedadam.AdamW, "optimizer_cls_and_kwargs")[0])
    options = {**OPTIONS, "max_grad_norm": 0.1}
    inside = weights(train(fusedadam.AdamW, "optimizer_cls_and_kwargs", max_grad_norm=0.0, options=options)[0])
    torch.testing.assert_close(inside, outside, rtol=1e-4, atol=1e-5)


def test_averages_survive_a_checkpoint(train, tmp_path):
    options = {**OPTIONS, "ema_decay": 0.9}
    way = "optimizer_cls_and_kwargs"
    whole = everything(*train(fusedadam.EmaAdamW, way, options=options))
    resumed = train(fusedadam.EmaAdamW, way, resume=str(tmp_path / f"run/checkpoint-{SAVED}"), options=options)
    assert_same_bits(everything(*resumed), whole)
    assert far([state["ema_params"] for state in whole[1]], whole[0], 1e-3)
