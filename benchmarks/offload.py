"""States in host memory: how much of the bus's bandwidth a whole step reaches.

    python benchmarks/offload.py [--parameters 400]

On one GPU: the bandwidth of the bus, one way and both ways at once, by copies; AdamW with ``offload=True``, with
float32 states and in 8 bits; torch's fused AdamW on the host's cores, before gradients and weights have crossed the
bus; and torchao's CPUOffloadOptimizer, if it is installed. Medians, all in one run.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable

import torch

from fusedadam import AdamW, FusedOptimizer, step_in_backward
from fusedadam.cli.doctor.bus import bandwidth

SHAPE = (4096, 4096)
BF16 = torch.bfloat16
OURS = {"float32 states": {"state_dtype": torch.float32}} | {
    f'"{s}"': {"storage": s} for s in ("exact", "16bit", "8bit")
}


def seconds(run: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(2 + times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:])


def parameters(count: int, device: str = "cuda", dtype: torch.dtype = BF16) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(SHAPE, device=device, dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def beside_a_model(layers: int, repeats: int) -> None:
    """``step_in_backward`` in 8 bits, where a backward pass takes as long as the bus does."""
    model = torch.nn.Sequential(*(torch.nn.Linear(*SHAPE, bias=False) for _ in range(layers))).to("cuda", BF16)

    def backward(tokens: int) -> Callable[[], None]:
        x = torch.randn(tokens, SHAPE[0], device="cuda", dtype=BF16)

        def run() -> None:
            model(x).sum().backward()
            if optimizer is None:
                for param in model.parameters():
                    param.grad = None
            else:
                optimizer.step()

        return run

    def forward(tokens: int) -> Callable[[], None]:
        x = torch.randn(tokens, SHAPE[0], device="cuda", dtype=BF16)
        return lambda: model(x)

    optimizer: FusedOptimizer | None = step_in_backward(
        model, lambda params: AdamW(params, storage="8bit", offload=True)
    )
    bus = seconds(backward(16), repeats)  # the model itself takes next to nothing
    optimizer.stop_in_backward()
    stopped, optimizer = optimizer, None
    tokens = 8192
    alone = seconds(backward(tokens), repeats) - seconds(forward(tokens), repeats)
    tokens = max(256, round(tokens * bus / alone) // 256 * 256)
    ahead = seconds(forward(tokens), repeats)
    alone = seconds(backward(tokens), repeats) - ahead
    del stopped
    gc.collect()
    optimizer = step_in_backward(model, lambda params: AdamW(params, storage="8bit", offload=True))
    together = seconds(backward(tokens), repeats) - ahead
    print(
        f"in backward, 8 bits, {tokens} tokens: backward pass alone {1e3 * alone:.1f} ms, steps alone {1e3 * bus:.1f} "
        f"ms, together {1e3 * together:.1f} ms, {together / max(alone, bus):.2f} times the longer"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=400, help="in millions (default: 400)")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    tensors = max(1, round(options.parameters * 1e6 / (SHAPE[0] * SHAPE[1])))
    count = tensors * SHAPE[0] * SHAPE[1]
    bus = bandwidth(torch.device("cuda", torch.cuda.current_device()), 1024)
    print(f"{torch.cuda.get_device_name()}: {count / 1e6:.0f}M parameters in {tensors} bfloat16 matrices")
    print(
        f"bus: {bus.to_device:.1f} GB/s to the device, {bus.from_device:.1f} from it, {bus.both:.1f} each way at once"
    )
    for name, given in OURS.items():
        params = parameters(tensors)
        optimizer = AdamW(params, offload=True, **given)
        begin = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        first, before = time.perf_counter() - begin, torch.cuda.memory_allocated()
        taken = seconds(optimizer.step, options.repeats)
        state = optimizer.state[params[0]]
        width = sum(v.nbytes for v in state.values() if v.is_cpu and v.numel() > 1) / params[0].numel()
        rate = width * count / taken / 1e9
        del optimizer
        print(
            f"AdamW, {name}: {1e3 * taken:.1f} ms, {1e12 * taken / count:.0f} ps a parameter, {width:.2f} bytes each "
            f"way: {rate:.1f} GB/s, {rate / bus.both:.0%} of the bus both ways; first step {first:.1f} s, "
            f"{(before - 4 * count) / 2**20:.1f} MiB of state on the device"
        )
        del params, state
        gc.collect()
    beside_a_model(tensors, options.repeats)
    gc.collect()
    plain = AdamW(parameters(tensors), storage="8bit")
    print(f'AdamW, "8bit", on the device: {1e3 * seconds(plain.step, options.repeats):.1f} ms')
    del plain
    params = parameters(max(1, tensors // 4), "cpu", torch.float32)
    fused = torch.optim.AdamW(params, fused=True)
    taken = seconds(fused.step, max(1, options.repeats // 2)) / sum(p.numel() for p in params)
    print(f"torch's fused AdamW on {torch.get_num_threads()} cores of the host: {1e12 * taken:.0f} ps a parameter")
    try:
        low_bit = importlib.import_module("torchao.optim")
    except ImportError:
        print("torchao is not installed")
        return
    params = parameters(tensors)
    grads = [param.grad for param in params]
    theirs = low_bit.CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True)

    def step() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None
            torch.autograd.backward(param, grad)  # its hooks send gradients to the host as they come
        theirs.step()

    print(f"torchao's CPUOffloadOptimizer: {1e12 * seconds(step, options.repeats) / count:.0f} ps a parameter")


if __name__ == "__main__":
    main()
