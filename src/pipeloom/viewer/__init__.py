"""Timeline -> terminal tables and Gantt chart, Chrome/Perfetto trace, and one self-contained HTML page.

It reads timelines only, whoever made them: it knows neither the simulator nor the runtime, and imports no
torch.
"""

from .chrome import chrome_trace, write_trace
from .facts import StageRow, peak_of
from .html import write_report
from .path import fold
from .reasons import merged, sentence, sources
from .terminal import gantt, memory_table, print_report, stage_table, summary_table
from .units import SizeUnit

__all__ = [
    "SizeUnit",
    "StageRow",
    "chrome_trace",
    "fold",
    "gantt",
    "memory_table",
    "merged",
    "peak_of",
    "print_report",
    "sentence",
    "sources",
    "stage_table",
    "summary_table",
    "write_report",
    "write_trace",
]
