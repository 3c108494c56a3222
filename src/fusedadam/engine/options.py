"""The options of all groups in one step, as the engine gets them."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from fusedadam.rules.rule import HyperParameters

Flags: TypeAlias = tuple[bool, ...]


class Options(NamedTuple):
    """Lists have one entry for each group. The revisions tell whether anything changed since an earlier step."""

    flags: list[Flags]
    hyper_parameters: list[HyperParameters]
    storages: list[Any]  # how parameters are kept: equal if nothing about it has changed
    skips_nonfinite: bool  # in any group
    structure_revision: int  # another number whenever more than a learning rate has changed
    revision: int  # another number whenever anything has changed
