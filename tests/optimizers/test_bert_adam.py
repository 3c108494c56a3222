"""BertAdam: norms that switch clipping off, and whose norm its flags mean."""

from __future__ import annotations

import pytest

import fusedadam
from fusedadam.optimizers.bert_adam import CLIPS
from tests.contract.common import assert_same, leaves, train


def test_bert_adam_without_clipping():
    for off in (0, -1, None):
        optimizer = fusedadam.BertAdam(leaves(), max_grad_norm=off)
        (stage,) = optimizer.rule.specialize(dict.fromkeys(optimizer.rule.flags, False)).stages
        assert_same(train(optimizer, 2), train(fusedadam.BertAdam(leaves(), max_grad_norm=1e30), 2))
        assert not stage.sums


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("max_grad_norm", [1.0, 0, -1, None])
def test_one_flag_at_most_says_whose_norm_is_taken(clip, max_grad_norm):
    (group,) = fusedadam.BertAdam(leaves(), clip=clip, max_grad_norm=max_grad_norm).param_groups
    chosen = [whose for whose in CLIPS if fusedadam.BertAdam.value(group, f"clip_{whose}")]
    assert chosen == ([clip] if max_grad_norm == 1 else [])
