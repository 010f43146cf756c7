"""Results as tables, the same for terminals and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True)
class Column:
    """head: one line or more.  show: a value as text.  left: words, which are aligned left and may be folded;
    figures are neither.  short: the head in a terminal, if it is another."""

    head: str
    show: Callable[[Any], str] = str
    left: bool = False
    short: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of values, and how each column shows its own: text as it is, None as a dash.

    A row whose first cell is "" belongs to the row above.

    >>> table = Table("t", (Column("rank"), Column("s", "{:.1f}".format), Column("cap")), ((0, 0.25, None),))
    >>> table.without_empty_columns().texts
    [['0', '0.2']]
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    def without_empty_columns(self) -> Table:
        kept = [any(value not in (None, "") for value in cells) for cells in zip(*self.rows, strict=True)]

        def of(cells: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(cell for cell, keep in zip(cells, kept, strict=True) if keep)

        return replace(self, columns=of(self.columns), rows=[*map(of, self.rows)]) if self.rows else self

    @property
    def texts(self) -> list[list[str]]:
        shown = (zip(self.columns, row, strict=True) for row in self.rows)
        return [[text_of(value, column.show) for column, value in cells] for cells in shown]

    def to_rich(self) -> rich.table.Table:
        """For a terminal: a narrow one takes its room from words, never from figures."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        texts = self.texts
        table = Table(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
        )
        for at, column in enumerate(self.columns):
            head = column.short or column.head
            if column.left:
                table.add_column(head, justify="left", overflow="fold")
            else:
                lines = [*head.split("\n"), *(row[at] for row in texts)]
                table.add_column(head, justify="right", no_wrap=True, min_width=max(map(len, lines)))
        for row in texts:
            table.add_row(*map(Text, row))
        return table


def text_of(value: Any, show: Callable[[Any], str]) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else show(value)
