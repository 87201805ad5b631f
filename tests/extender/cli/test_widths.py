"""Tables at any width: no line is wider, and only optional columns are dropped."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from extender.cli.tables import _Sheet, sheet

NAMES = st.text(st.sampled_from("ab-/.:0 é界"), min_size=1, max_size=40)


def shown(table: _Sheet, width: int) -> list[str]:
    console = Console(width=width, markup=False, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


@given(
    rows=st.lists(st.tuples(NAMES, NAMES, st.integers(0, 10**6), NAMES), min_size=1, max_size=4),
    width=st.integers(20, 120),
)
def test_no_line_is_wider_than_the_terminal_and_no_value_is_lost(
    rows: list[tuple[str, str, int, str]], width: int
) -> None:
    cells = [[one, other, str(number), last] for one, other, number, last in rows]

    lines = shown(sheet(["NAME", "=WORD", ">COUNT", "MORE TEXT"], cells), width)

    assert all(cell_len(line) <= width for line in lines)
    letters = sorted("".join(lines).replace(" ", ""))
    head = "NAMEWORDCOUNTMORETEXT"
    assert letters == sorted(
        "".join([head, *(text for row in cells for text in row)]).replace(" ", "")
    )


def test_narrow_table_drops_optional_columns_and_wraps_others() -> None:
    columns = ["POD", "?>AGE", "?MODEL", "_BY US"]
    table = sheet(columns, [["team/a", "3", "H100", "1 busy", "Job a"]], ["OWNER"])

    assert shown(table, 80) == [
        "POD      AGE   MODEL   BY US    OWNER",
        "team/a     3   H100    1 busy   Job a",
    ]
    assert shown(table, 28) == [
        "POD    AGE MODEL",
        "team/a   3 H100",
        "    by us: 1 busy; owner:",
        "    Job a",
    ]
    assert shown(table, 12)[:2] == ["POD    AGE", "team/a   3"]
