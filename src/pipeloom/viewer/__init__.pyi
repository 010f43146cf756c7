from .blocks import PAIR as PAIR, legend as legend, timelines_figure as timelines_figure
from .chrome import chrome_trace as chrome_trace, write_trace as write_trace
from .curves import memory_figure as memory_figure
from .html import write_report as write_report
from .labels import (
    COLOURS as COLOURS,
    OTHER as OTHER,
    colour as colour,
    group_name as group_name,
    label as label,
)
from .path import fold as fold
from .reasons import merged as merged, sentence as sentence, sources as sources
from .report_facts import (
    Comparison as Comparison,
    StageRow as StageRow,
    facts as facts,
    memory_kinds as memory_kinds,
    peak_of as peak_of,
    stage_comparisons as stage_comparisons,
    stage_seconds as stage_seconds,
)
from .stage_graph import (
    BOX as BOX,
    StageEdge as StageEdge,
    draw_stages as draw_stages,
    stage_edges as stage_edges,
)
from .terminal import (
    gantt as gantt,
    memory_table as memory_table,
    print_report as print_report,
    stage_table as stage_table,
    summary_table as summary_table,
)
from .units import SizeUnit as SizeUnit
