"""Parameter groups: each parameter once, norms and biases without weight decay, learning rates by depth."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import fusedadam
from fusedadam import param_groups


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(4)  # a norm by its class alone
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Transformer(nn.Module):
    """The shape of most of them: tokens, positions, blocks, a norm, and a head that is tied to the embedding or not."""

    def __init__(self, tied=False):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.wte = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.ln_f = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.late = nn.Embedding(2, 4)  # an embedding wherever it is registered
        if tied:
            self.head.weight = self.wte.weight


def names(groups):
    return [[name for name, _ in group["params"]] for group in groups]


def rates(groups):
    return {name: group["lr"] for group in groups for name, _ in group["params"]}


def test_norms_and_biases_do_not_decay():
    decayed, others = param_groups(Transformer(), weight_decay=0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    matrices = [f"blocks.{k}.mlp.{i}.weight" for k in range(3) for i in (0, 2)]
    assert names([decayed]) == [["cls_token", "wte.weight", *matrices, "head.weight", "late.weight"]]
    assert all("ln" in name or "bias" in name for name, _ in others["params"])
    assert "lr" not in decayed


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)])
def test_a_norm_in_a_sequence_is_known_by_its_class(norm):
    decayed, others = param_groups(nn.Sequential(norm, nn.Linear(4, 4, bias=False)), weight_decay=0.1)
    assert names([decayed]) == [["1.weight"]]
    assert names([others])[0][0] == "0.weight"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [{}, {"lr": 1.0, "lr_by_depth": 0.5}])
def test_each_parameter_that_requires_a_gradient_is_there_once(tied, options):
    model = Transformer(tied)
    model.blocks[0].requires_grad_(False)
    given = [param for group in param_groups(model, **options) for _, param in group["params"]]
    wanted = [param for param in model.parameters() if param.requires_grad]
    assert sorted(map(id, given)) == sorted(map(id, wanted))


def test_shared_modules_and_the_order_are_those_of_named_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.append(model[0])
    assert names(param_groups(model, no_decay=())) == [[name for name, _ in model.named_parameters()]]
    assert names(param_groups(Transformer())) == names(param_groups(Transformer()))


def test_words_are_parts_of_names_or_classes_in_any_case():
    model = nn.ModuleDict({"LayerNorm": nn.Linear(2, 2), "embed": nn.Embedding(2, 2), "proj": nn.Linear(2, 2)})
    assert names(param_groups(model, 0.1, ("layernorm", "EMBEDDING"))) == [
        ["proj.weight", "proj.bias"], ["LayerNorm.weight", "LayerNorm.bias", "embed.weight"],
    ]  # fmt: skip
    assert names(param_groups(model, 0.1, ("proj.bias",)))[1] == ["proj.bias"]


def test_one_word_stands_for_vectors():
    """nanoGPT's rule: only what has two dimensions or more decays. Conv1d has the letters in its name."""
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.LayerNorm(2))
    model.scale = nn.Parameter(torch.ones(()))
    assert names(param_groups(model, 0.1, ("1d",))) == [["0.weight"], ["scale", "0.bias", "1.weight", "1.bias"]]
    with pytest.raises(ValueError, match="uninitialized parameter"):
        param_groups(nn.LazyLinear(2), 0.1, ("1d",))


def test_weight_decay_may_be_left_to_the_optimizer():
    optimizer = fusedadam.AdamW(param_groups(Transformer()), lr=0.5, weight_decay=0.25)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize("make", [fusedadam.AdamW, torch.optim.AdamW, fusedadam.SGD, torch.optim.SGD])
def test_optimizers_take_the_groups_and_keep_the_names(make):
    model = Transformer()
    optimizer = make(param_groups(model, 0.1, lr=1e-2, lr_by_depth=0.5))
    kept = {
        n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)
    }  # fmt: skip
    assert all(kept[name] is param for name, param in model.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    before = [group["lr"] for group in optimizer.param_groups]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [lr / 2 for lr in before]


def test_learning_rates_fall_with_depth():
    """As in BEiT: tokens and embeddings below the first block, the norm and the head above the last."""
    groups = param_groups(Transformer(), lr=1.0, lr_by_depth=0.5)
    found = rates(groups)
    assert found["head.weight"] == found["ln_f.weight"] == 1.0
    assert [found[f"blocks.{k}.mlp.2.bias"] for k in range(3)] == [0.125, 0.25, 0.5]
    assert found["cls_token"] == found["wte.weight"] == found["late.weight"] == 0.0625
    assert [group["lr"] for group in groups] == sorted(group["lr"] for group in groups)


def test_frozen_blocks_count():
    model = Transformer()
    model.blocks[1].requires_grad_(False)
    found = rates(param_groups(model, lr=1.0, lr_by_depth=0.5))
    assert found == {n: r for n, r in rates(param_groups(Transformer(), lr=1.0, lr_by_depth=0.5)).items() if n in found}
    assert "blocks.1.ln_1.weight" not in found


def test_what_has_no_parameters_is_no_block_and_the_last_block_may_be_the_head():
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Dropout(), nn.Linear(2, 2))
    assert set(rates(param_groups(model, lr=1.0, lr_by_depth=0.1)).values()) == {0.1, 1.0}


def test_blocks_of_several_lists_follow_each_other():
    """As in a ResNet. What comes between belongs to the block before it; named children of a Sequential count too."""
    stage = OrderedDict(a=nn.Linear(2, 2, bias=False), b=nn.Linear(2, 2, bias=False))
    model = nn.ModuleDict()
    model["stem"] = nn.Linear(2, 2, bias=False)
    model["layer1"] = nn.Sequential(stage)
    model["between"] = nn.LayerNorm(2, bias=False)
    model["layer2"] = nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)))
    model["fc"] = nn.Linear(2, 2, bias=False)
    found = rates(param_groups(model, lr=1.0, lr_by_depth=0.5))
    assert found == {
        "stem.weight": 0.0625, "layer1.a.weight": 0.125, "layer1.b.weight": 0.25, "between.weight": 0.25,
        "layer2.0.0.weight": 0.5, "layer2.0.1.weight": 0.5, "fc.weight": 1.0,
    }  # fmt: skip


def test_parts_may_be_grouped_one_by_one():
    backbone, head = Transformer(), nn.Linear(4, 2)
    groups = param_groups(backbone, 0.1, lr=1e-4, lr_by_depth=0.75) + param_groups(head, 0.1, lr=1e-3)
    optimizer = fusedadam.AdamW(groups)
    assert [group["lr"] for group in optimizer.param_groups[-2:]] == [1e-3, 1e-3]


def test_bad_input_is_named():
    model = Transformer()
    with pytest.raises(TypeError, match=r"model is a generator; it must be a torch.nn.Module, not its parameters"):
        param_groups(model.parameters())
    for words in ("bias", None, ("",), (1,)):
        with pytest.raises(TypeError, match="must be a tuple of words, such as"):
            param_groups(model, no_decay=words)
    with pytest.raises(ValueError, match=r"weight_decay=-0.1 is out of range"):
        param_groups(model, weight_decay=-0.1)
    with pytest.raises(ValueError, match=r"lr_by_depth=0.75 needs lr, the learning rate of the head; pass it here too"):
        param_groups(model, lr_by_depth=0.75)
    for factor in (0, 1.5, -1):
        with pytest.raises(ValueError, match="is out of range; it must be above 0 and at most 1"):
            param_groups(model, lr=1.0, lr_by_depth=factor)
    with pytest.raises(ValueError, match="lr=-1 is out of range"):
        param_groups(model, lr=-1)
    with pytest.raises(ValueError, match="lr_by_depth needs blocks to count, and model has no ModuleList"):
        param_groups(nn.Linear(2, 2), lr=1.0, lr_by_depth=0.5)


def test_names_of_modules_may_have_dots():
    model = nn.Module()
    setattr(model, "first.part", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    names = [[name for name, _ in group["params"]] for group in param_groups(model, lr=1.0, lr_by_depth=0.5)]
    blocks = ("first.part.0", "first.part.1")
    assert names == [[f"{block}.{name}"] for block in blocks for name in ("weight", "bias")]


def test_a_learning_rate_that_is_a_tensor_is_the_same_tensor_in_every_group():
    """As in torch.optim, where the default of all groups is one tensor: a copy would not see it change."""
    lr = torch.tensor(0.1)
    groups = param_groups(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), weight_decay=0.1, lr=lr)
    assert len(groups) == 2
    assert all(group["lr"] is lr for group in groups)
    blocks = param_groups(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lr=lr, lr_by_depth=0.5)
    assert len({id(group["lr"]) for group in blocks}) == len(blocks), "scaled ones are tensors of their own"


def muons(model, **options):
    """The names that are for Muon, and the others."""
    groups = param_groups(model, optimizer="muon", **options)
    return [
        [name for group in groups if group["use_muon"] is on for name, _ in group["params"]] for on in (True, False)
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_the_matrices_of_hidden_layers_and_what_it_takes_is_printed(tied, capsys):
    chosen, others = muons(Transformer(tied))
    assert chosen == [*(f"blocks.{k}.mlp.{i}.weight" for k in range(3) for i in (0, 2))]
    assert {"wte.weight", "late.weight", "ln_f.weight", "blocks.0.mlp.0.bias"} < {*others}
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Muon: 6 parameters of 96 elements: blocks.0.mlp.0.weight, ")
    assert said[1].startswith("AdamW: ")
    assert len(said) == 2


def test_the_last_linear_layer_is_a_head_if_it_is_a_block_of_its_own():
    assert muons(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)))[0] == ["0.weight"]
    assert muons(nn.Sequential(Block(), Block()))[0] == [f"{k}.mlp.{i}.weight" for k in (0, 1) for i in (0, 2)]


def test_convolutions_over_one_dimension_or_in_groups_are_not_for_muon():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv1d(4, 4, 3),
        nn.ConvTranspose2d(4, 4, 2),
        nn.Linear(4, 2),
    )
    assert muons(model)[0] == ["0.weight", "3.weight"]


def test_names_are_read_word_by_word():
    """ "head" in "multihead_attn" took all cross-attention from Muon."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos, self.rel_pos, self.cls_token = (nn.Parameter(torch.zeros(3, 4)) for _ in range(3))
            self.decoder = nn.TransformerDecoderLayer(4, 2, 8)
            self.token_mixing, self.decomposition, self.lm_head = (nn.Linear(4, 4) for _ in range(3))
            self.final = nn.Linear(4, 2)

    chosen, others = muons(Model())
    assert {"decoder.multihead_attn.in_proj_weight", "token_mixing.weight", "decomposition.weight"} < {*chosen}
    assert {"pos", "rel_pos", "cls_token", "lm_head.weight", "final.weight"} < {*others}


def test_muon_takes_its_groups_and_weight_decay_goes_by_the_same_words():
    groups = param_groups(Transformer(), 0.1, optimizer="muon")
    assert [(group["use_muon"], group["weight_decay"]) for group in groups] == [(True, 0.1), (False, 0.1), (False, 0.0)]
    optimizer = fusedadam.Muon(groups, lr=0.03)
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 3e-4, 3e-4]


def test_bad_input_of_muons_groups_is_named():
    with pytest.raises(ValueError, match="optimizer='adam' is unknown; it must be 'muon', or None for any other"):
        param_groups(Transformer(), optimizer="adam")
    for options in ({"lr": 0.1}, {"lr": 0.1, "lr_by_depth": 0.5}):
        with pytest.raises(ValueError, match=r"lr and lr_by_depth cannot be used with optimizer='muon'.*set group"):
            param_groups(Transformer(), optimizer="muon", **options)
