"""BertAdam: norms that switch clipping off, and whose norm its flags mean. Results are in tests/meaning."""

from __future__ import annotations

import pytest

import fusedadam
from fusedadam.optimizers.bert_adam import CLIPS
from tests.contract.common import leaves


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("max_grad_norm", [1.0, 0, -1, None])
def test_one_flag_at_most_says_whose_norm_is_taken(clip, max_grad_norm):
    (group,) = fusedadam.BertAdam(leaves(), clip=clip, max_grad_norm=max_grad_norm).param_groups
    chosen = [whose for whose in CLIPS if fusedadam.BertAdam.value(group, f"clip_{whose}")]
    assert chosen == ([clip] if max_grad_norm == 1 else [])


def test_without_clipping_nothing_is_summed():
    rule = fusedadam.BertAdam.rule
    (stage,) = rule.specialize(dict.fromkeys(rule.flags, False)).stages
    assert not stage.sums
