"""Shapes of checkpoints and configs; damaged files are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fusedadam.cli.bench import shapes_from as module
from fusedadam.cli.bench.shapes_from import Unreadable, shapes_from

BF16 = torch.bfloat16


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
    with pytest.raises(Unreadable, match=r"cannot be read: FileNotFoundError: .*2\.safetensors"):
        shapes_from(index)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.safetensors", b"short", "cannot be read: SafetensorError: .*header too small"),
        ("a.safetensors", b"\xff" * 20, "header too large"),
        ("a.pt", b"nothing of torch", "cannot be read: RuntimeError: .*torch.save"),
        ("config.json", b"{}", "cannot be read: .*Should have a `model_type` key"),
        ("config.json", b"{", "cannot be read: .*not a valid JSON file"),
        ("config.json", b'{"model_type": "no such model"}', "cannot be read: .*Transformers does not recognize"),
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


@pytest.mark.parametrize("name", ["checkpoint.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_refused_by_name_wherever_the_damage_is(name: str, tmp_path: Path) -> None:
    """A changed byte in a pickle can make torch.load raise KeyError, IndexError, AttributeError and others."""
    path, refused = tmp_path / name, []
    if name.endswith(".pt"):
        torch.save({"model": {"weight": torch.zeros(3, 4), 5: torch.ones(2)}}, path)
    else:
        pytest.importorskip("safetensors.torch").save_file({"a": torch.zeros(3, 4), "b": torch.ones(2)}, path)
    assert shapes_from(path) == [(3, 4), (2,)]
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 100)):
        for damaged in (content[:place], content[:place] + bytes([content[place] ^ 0x15]) + content[place + 1 :]):
            path.write_bytes(damaged)
            try:
                shapes_from(path)
            except Unreadable as error:
                refused.append(str(error))
    assert len(refused) > 90
    assert all(str(path) in message for message in refused)


def test_an_error_of_any_kind_while_a_checkpoint_is_read_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("storage")

    torch.save({}, tmp_path / "a.pt")
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(Unreadable, match=r"a\.pt cannot be read: KeyError: 'storage'"):
        shapes_from(tmp_path / "a.pt")


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": []}'])
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(Unreadable, match=r"model\.safetensors\.index\.json"):
        shapes_from(tmp_path)


@pytest.mark.parametrize(("name", "package"), [("a.safetensors", "safetensors"), ("config.json", "transformers")])
def test_a_package_that_is_missing_is_named(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text('{"model_type": "llama"}')
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Unreadable, match=f"pip install {package}"):
        shapes_from(tmp_path / name)
