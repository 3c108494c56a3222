"""`install()`: the modules that it provides, and calling it again. `test_uninstall.py` has the way back."""

import importlib

import pytest
import torch

from fusedadam import ascend

X = torch.arange(4.0)


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "torch_npu": "npu optim __version__ npu_apply_adam npu_apply_adam_w npu_bert_apply_adam",
        "torch_npu.optim": "NpuFusedAdamW NpuFusedAdamP NpuFusedBertAdam NpuFusedSGD NpuFusedAdam NpuFusedAdadelta "
        "NpuFusedLamb NpuFusedRMSprop NpuFusedRMSpropTF NpuFusedOptimizerBase _DistributedMuon",
        "torch_npu.optim.distributed_muon": "_DistributedMuon",
        "torch_npu.optim.npu_fused_optim_base": "NpuFusedOptimizerBase",
        "torch_npu.npu": "is_available Stream amp",
        "torch_npu.npu.amp": "autocast GradScaler",
        "torch_npu.contrib": "",
        "torch_npu.contrib.transfer_to_npu": "",
        "torch.npu": "is_available Stream amp",
        "torch.npu.amp": "autocast GradScaler",
        "mindspeed.ops.npu_apply_fused_adamw_v2": "npu_apply_fused_adamw_v2",
        "mindspeed.ops.npu_apply_fused_ema_adamw": "npu_apply_fused_ema_adamw",
        "mindspeed.core.optimizer.fused_ema_adamw.fused_ema_adamw": "FusedEmaAdamW fused_ema_adamw",
        "mindspeed.core.optimizer.adamw": "AdamW FusedTorchAdamW",
        "mindspeed.optimizer.adamw": "AdamW FusedTorchAdamW",
        "mindspeed.optimizer.ema_adamw": "FusedEmaAdamW fused_ema_adamw",
    }.items(),
)
def test_modules_are_there_with_their_names(kind, module, names):
    imported = importlib.import_module(module)
    for name in names.split():
        thing = getattr(imported, name)
        assert thing is getattr(ascend, name, thing)


def test_one_module_under_all_its_names(kind):
    import torch_npu
    import torch_npu.npu.amp
    from torch.npu import amp

    assert torch_npu.npu is torch.npu
    assert torch_npu.npu.amp is amp


def test_installing_again_is_fine_unless_it_asks_for_another_device(kind):
    other = "cuda" if kind == "cpu" else "cpu"
    assert kind in repr(ascend.install(kind))
    assert kind in repr(ascend.install())
    with pytest.raises(RuntimeError, match=f"device='{other}', but \"npu\" already means {kind}"):
        ascend.install(other)
    assert X.npu().device.type == kind
