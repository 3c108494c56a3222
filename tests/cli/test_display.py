"""Tables and progress where there is no terminal."""

import pytest

from fusedadam.cli import display


def test_a_table_has_names_on_the_left_and_numbers_on_the_right():
    made = display.table(("name", "ms"), [("a", "1.5"), ("longer", "10.25")])
    assert made == "name       ms\n------  -----\na         1.5\nlonger  10.25"


@pytest.mark.parametrize(("total", "lines", "printed"), [(3, 3, [1, 2, 3]), (40, 4, [1, 10, 20, 30, 40])])
def test_progress_prints_about_as_many_lines_as_asked(total, lines, printed, capsys):
    with display.progress(total, "steps", lines) as progress:
        for k in range(total):
            progress.done(f"number {k + 1}")
    width = len(str(total))
    expected = [f"[{k:{width}} of {total} steps] number {k}" for k in printed]
    assert capsys.readouterr().out.splitlines() == expected


def test_quiet_progress_prints_nothing(capsys):
    with display.progress(2, lines=0) as progress:
        progress.done(more=2)
    assert capsys.readouterr().out == ""
