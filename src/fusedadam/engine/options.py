"""The options of all groups in one step, as the engine gets them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from fusedadam.rules.rule import HyperParameters

Flags: TypeAlias = tuple[bool, ...]


class Options(NamedTuple):
    """Lists have one entry for each group. The revisions tell whether anything changed since an earlier step."""

    flags: list[Flags]
    hyper_parameters: list[HyperParameters]
    skips_nonfinite: bool  # in any group
    on_device: bool  # the host does not know, or may not ask, which step this is or what a scalar is
    structure_revision: int  # another number whenever flags, storage or backend of a group have changed
    revision: int  # another number whenever anything has changed
