"""The device that "npu" means: chosen by an argument or the environment; on a CPU there is only one."""

import pytest
import torch

from fusedadam import ascend


def test_the_environment_chooses_and_an_argument_overrules_it(monkeypatch):
    monkeypatch.setenv("FUSEDADAM_DEVICE", "meta")
    with ascend.install():
        assert torch.ones(1, device="npu").device.type == "meta"
    with ascend.install("cpu"):
        assert torch.ones(1, device="npu").device.type == "cpu"
    monkeypatch.setenv("FUSEDADAM_DEVICE", "")
    with ascend.install() as chosen:
        assert chosen.kind == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "1"}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}], ids=str)
def test_a_process_of_a_launch_finds_the_cpu_under_its_rank(cpu, monkeypatch, variables):
    """Every NPU of the launch is there, as on the machine that the script was written for; one more is not."""
    npu, x = torch.npu, torch.arange(3.0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert npu.device_count() == 2
    assert npu.current_device() == 1
    for rank in (0, 1):
        for device in (rank, f"npu:{rank}", torch.device("npu", rank), torch.device(f"npu:{rank}")):
            npu.set_device(device)
            npu.synchronize(device)
            with npu.device(device):
                assert torch.equal(x.npu(device), x)
        for moved in (x.npu(rank), x.to(rank), x.to(f"npu:{rank}"), torch.arange(3.0, device=rank)):
            assert torch.equal(moved, x)
    for refused in (lambda: npu.set_device(2), lambda: x.to("npu:2"), lambda: x.to(2), lambda: torch.device("npu", 2)):
        with pytest.raises(RuntimeError, match=r"'npu:2' does not exist: .*, as 'npu:0' to 'npu:1'"):
            refused()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"'npu:1' does not exist: .*, as 'npu:0'"):
        npu.set_device(1)
