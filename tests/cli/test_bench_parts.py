"""What `bench` is made of: bytes, peers, processes, sizes, and shapes from files."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusedadam import AdamP, AdamW, BertAdam, EmaAdamW
from fusedadam.cli import contestants, demo
from fusedadam.cli.bench import options, planning, processes, shapes, tables, traffic
from fusedadam.cli.bench.measuring import Conditions, Turns, _bytes, copied_per_ms, rounds
from fusedadam.cli.bench.page import page
from fusedadam.cli.bench.processes import Failed, Worker
from fusedadam.cli.bench.results import Report, Result, Set, Spread
from fusedadam.cli.bench.shapes_from import Unreadable, shapes_from
from fusedadam.cli.bench.timing import Pace, Timer, compare, parameters_with_gradients
from fusedadam.optimizers.base import FusedOptimizer

F32, BF16 = torch.float32, torch.bfloat16
MACHINE = {"device": "cpu", "name": "a machine", "threads": 2, "copy_gb_s": 10.0}


def stepped(cls: type[FusedOptimizer], shape: tuple[int, ...], dtype: torch.dtype = F32, **options: Any) -> Any:
    optimizer = cls(parameters_with_gradients([shape], "cpu", dtype), **options)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("cls", "shape", "dtype", "options", "each"),
    [
        (AdamW, (10, 10), F32, {}, 28),
        (AdamW, (10, 10), BF16, {}, 14),
        (AdamW, (10, 10), BF16, {"state_dtype": F32}, 22),
        (AdamW, (10, 10), F32, {"amsgrad": True}, 36),
        (AdamW, (10, 10), F32, {"max_grad_norm": 1.0}, 32),
        (EmaAdamW, (10, 10), F32, {}, 36),
        (BertAdam, (10, 10), F32, {}, 32),
        (AdamP, (10, 10), F32, {}, 40),
        (AdamP, (100,), F32, {}, 28),
    ],
)
def test_bytes_a_parameter_follow_from_the_rule(
    cls: type[FusedOptimizer], shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], each: int
) -> None:
    assert traffic.bytes_moved(stepped(cls, shape, dtype, **options)) == 100 * each


def test_states_are_counted_wherever_they_are_kept() -> None:
    params = parameters_with_gradients([(100, 100)], "cpu", F32)
    for name, kept in (("AdamW", 80_000), ("EmaAdamW", 120_000)):
        for by in ("fusedadam", contestants.PEERS[name][0].name):
            optimizer = contestants.make(name, by, params)
            optimizer.step()
            assert kept <= traffic.state_bytes(optimizer, params) < kept * 1.02, (name, by)


def test_memory_in_between_is_seen() -> None:
    params = parameters_with_gradients([(100, 100)], "cpu", F32)
    foreach, ours = (contestants.make("AdamW", by, params) for by in ("torch-foreach", "fusedadam"))
    for optimizer in (foreach, ours):
        optimizer.step()
    assert traffic.extra_bytes(foreach.step, "cpu") >= 40_000
    assert traffic.extra_bytes(ours.step, "cpu") < 400


HERE = [
    (name, peer.name)
    for name, peers in contestants.PEERS.items()
    for peer in peers
    if peer.installed and not peer.gpu_only and not peer.compiles
]


@pytest.mark.parametrize(("optimizer", "by"), HERE, ids=str)
def test_peers_compute_the_same(optimizer: str, by: str) -> None:
    torch.testing.assert_close(*parameters_after(optimizer, by), rtol=0, atol=1e-12)


@pytest.mark.exhaustive
def test_the_compiled_peer_computes_the_same() -> None:
    """But for beta ** step, which it takes in float32."""
    torch.testing.assert_close(*parameters_after("AdamW", "torch-compiled"), rtol=0, atol=1e-7)


def parameters_after(optimizer: str, by: str) -> list[list[torch.Tensor]]:
    results = []
    for name in (contestants.OURS, by):
        params = parameters_with_gradients([(6, 20), (40,), (8, 4, 3, 3)], "cpu", torch.float64)
        made = contestants.make(optimizer, name, params)
        for _ in range(4):
            made.step()
        results.append([param.detach() for param in params])
    return results


def test_a_peer_is_chosen_if_it_is_installed_and_soon_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.Peer, "installed", property(lambda peer: peer.name != "optimi"))
    chosen, absent = contestants.choose("AdamW", "cpu", None)
    assert chosen == ["torch-fused", "torch-foreach", "bitsandbytes", "bitsandbytes-8bit"]
    why = {one.by: one.why for one in absent}
    assert why["optimi"] == "not installed"
    assert why["flashoptim"] == "runs on a GPU only"
    assert why["torch-compiled"] == contestants.COMPILES
    assert "torch-compiled" in contestants.choose("AdamW", "cpu", ["all"])[0]
    assert contestants.choose("AdamW", "cpu", ["torch-compiled"])[0] == ["torch-compiled"]
    assert contestants.choose("AdamW", "cuda", ["flashoptim"])[0] == ["flashoptim"]
    assert contestants.choose("AdamW", "cpu", ["none"]) == ([], [])


def test_every_optimizer_of_ours_is_measured() -> None:
    assert list(contestants.optimizers())[:2] == ["AdamW", "Adam"]
    assert {AdamW, EmaAdamW, AdamP, BertAdam} < set(contestants.optimizers().values())


class Answering:
    """Made in another process."""

    def __init__(self, word: str) -> None:
        self.word = word

    def say(self) -> tuple[str, int]:
        return self.word, os.getpid()

    def rest(self) -> None:
        time.sleep(1000)


@pytest.fixture
def no_server_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that processes are forked from would stay, and is not the one that other tests want."""
    monkeypatch.setattr(processes, "_context", lambda device: multiprocessing.get_context("spawn"))


@pytest.mark.usefixtures("no_server_is_left")
def test_a_process_answers_and_is_gone_afterwards() -> None:
    with Worker(Answering, "hello", "cpu", limit=60) as worker:
        word, pid = worker.ask("say")
        assert word == "hello"
        assert pid != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("no_server_is_left")
def test_a_process_that_hangs_is_ended_at_its_limit() -> None:
    began = time.monotonic()
    with Worker(Answering, "", "cpu", limit=3) as worker:
        _, pid = worker.ask("say")
        with pytest.raises(Failed, match=r"no answer within 3 seconds"):
            worker.ask("rest")
    assert time.monotonic() - began < 300
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_turn_is_many_calls_but_not_too_many() -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.002)

    timer = Timer(step, "cpu", seconds=0.02)
    before = calls
    assert 2 <= timer.turn() < 100
    assert 1 <= calls - before <= 10
    times = compare({"a": step, "b": step}, "cpu", Pace(turns=3, seconds=0.002))
    assert [len(own) for own in times.values()] == [3, 3]


def test_ours_takes_part_in_every_round() -> None:
    assert list(rounds(["a", "b", "c"], at_once=3)) == [("fusedadam", "a", "b"), ("fusedadam", "c")]
    assert list(rounds(["a", "b"], at_once=0)) == [("fusedadam", "a"), ("fusedadam", "b")]
    assert list(rounds([], at_once=3)) == [("fusedadam",)]


def test_bars_of_the_same_length_mean_the_same_time() -> None:
    """Each process copies, but all are held against the same copy."""
    quiet, disturbed = Turns(copied_per_ms=[10.0, 10.0]), Turns(copied_per_ms=[10.0, 4.0])
    assert copied_per_ms([quiet, disturbed, Turns(failed="so")]) == 10.0


def test_a_peer_that_keeps_smaller_states_moves_fewer_bytes() -> None:
    ours = Turns(bytes_moved=28_000, account={"state_bytes": 8_000})
    assert _bytes(ours, ours) == 28_000
    assert _bytes(Turns(account={"state_bytes": 8_100}), ours) == 28_000
    assert _bytes(Turns(account={"state_bytes": 2_000}), ours) == 16_000


def test_sets_are_scaled_to_memory_and_time() -> None:
    roomy = Conditions("cpu", Pace(1, 0.1), 1.0, free_bytes=2**40)
    fast = {**MACHINE, "copy_gb_s": 1e4}
    assert planning.sized("gpt", shapes.gpt(), "float32", None, 25.0, fast, roomy).described.divided_by == 1
    smaller = planning.sized("gpt", shapes.gpt(), "float32", None, 25.0, MACHINE, roomy).described
    assert smaller == Set("gpt", 146, 7_799_808, 4)
    tight = Conditions("cpu", Pace(1, 0.1), 1.0, free_bytes=2**31)
    assert planning.sized("gpt", shapes.gpt(), "float32", None, 25.0, fast, tight).described.divided_by == 4
    assert planning.sized("gpt", shapes.gpt(), "float32", 2, 25.0, MACHINE, tight).described.divided_by == 2
    assert shapes.shrunk([(64, 3, 7, 7), (1,)], 4) == [(16, 3, 7, 7), (1,)]


def test_curves_span_what_the_machine_can_do() -> None:
    over_size, over_count = planning.growing_size(4, 25.0, MACHINE), planning.growing_count(4)
    assert (min(over_size), max(over_size)) == (2**12, 2**22)
    assert all(list(over_count.values())[k] == [(1024,)] * n for k, n in enumerate(over_count))
    assert (min(over_count), max(over_count)) == (1, 1024)


def test_shapes_come_from_a_hugging_face_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, tie_word_embeddings=False, **small)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    expected = [tuple(p.shape) for p in transformers.LlamaForCausalLM(config).parameters()]
    assert shapes_from(tmp_path / "config.json") == shapes_from(tmp_path) == expected


def test_shapes_come_from_a_checkpoint_without_what_is_not_trained(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4, bias=False), nn.Linear(5, 4, bias=False))
    model[3].weight = model[2].weight  # tied
    expected = [(5, 4), (5,), (5,), (5,), (4, 5)]
    for k, saved in enumerate((model.state_dict(), {"state_dict": model.state_dict(), "epoch": 3})):
        torch.save(saved, tmp_path / f"{k}.pt")
        assert shapes_from(tmp_path / f"{k}.pt") == expected


def test_shapes_come_from_safetensors_and_their_index(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": torch.zeros(3, 4), "n": torch.zeros(2, dtype=torch.int64)}, tmp_path / "1.safetensors")
    safetensors.save_file({"b": torch.zeros(5, dtype=BF16)}, tmp_path / "2.safetensors")
    assert shapes_from(tmp_path / "1.safetensors") == [(3, 4)]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert shapes_from(index) == shapes_from(tmp_path) == [(3, 4), (5,)]
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(Unreadable, match=r"2\.safetensors, which is not beside it"):
        shapes_from(index)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.safetensors", b"short", "not a safetensors file"),
        ("a.safetensors", b"\xff" * 20, "longer than the file"),
        ("a.pt", b"nothing of torch", "cannot be read as a checkpoint"),
        ("config.json", b"{}", "no model_type"),
        ("config.json", b"{", "cannot be read as JSON"),
        ("config.json", b'{"model_type": "no such model"}', "transformers cannot make that model"),
    ],
)
def test_a_file_without_shapes_is_refused_with_a_reason(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Unreadable, match=said):
        shapes_from(tmp_path / name)


def test_a_checkpoint_of_other_things_is_refused_by_its_keys(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "optimizer": {}}, tmp_path / "a.pt")
    with pytest.raises(Unreadable, match="found epoch, optimizer, looked for state_dict"):
        shapes_from(tmp_path / "a.pt")


def report(*results: Result) -> Report:
    return Report(MACHINE, {"torch": "2"}, "command", "now", [Set("gpt", 1, 100)], list(results), complete=True)


def test_names_cannot_break_the_page() -> None:
    made = report(Result("AdamW", "fusedadam", "gpt", "float32", ms=Spread(1.0, 1.0, 1.0)))
    made.results.append(Result("AdamW", "<script>alert(1)</script>", "gpt", "float32", failed="1 < 2 & 'so'"))
    text = page(made)
    assert "<script" not in text
    assert "1 &lt; 2 &amp;" in text


def test_spread_and_percentages_follow_from_the_times() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([2.0]).percent == 0
    result = Result("AdamW", "fusedadam", "gpt", "float32", ms=Spread(2.0, 1.9, 2.1), bytes_moved=10**7, copy_gb_s=10.0)
    assert result.roofline_ms == 1.0
    assert result.percent_of_copy == 50.0
    assert result.ms is not None
    assert result.ms.percent == pytest.approx(5.0)
    assert tables.cache_sentence(report(result)) is None
    assert "fit into a cache" in str(tables.cache_sentence(report(result, replace(result, bytes_moved=4 * 10**7))))


def test_the_document_has_every_column_and_no_option_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for column in tables.columns([Result("AdamW", "fusedadam", "gpt", "float32", host_ms=1.0)]):
        assert column == "optimizer" or f"| {column} |" in text
    for main in (options.parse, demo.main):
        with pytest.raises(SystemExit):
            main(["--help"])
    said = capsys.readouterr().out
    named = re.findall(r"(?<!-)--[a-z][a-z-]+", text)
    assert len(named) > 10
    assert not [option for option in named if option not in said]


def test_if_one_of_ours_fails_it_is_a_failure() -> None:
    assert not report(Result("AdamW", "torch-fused", "gpt", "float32", failed="so")).our_failures
    assert report(Result("AdamW", "fusedadam", "gpt", "float32", failed="so")).our_failures
