"""Timeline -> terminal tables and Gantt chart, Chrome/Perfetto trace, and one self-contained HTML page.

It reads timelines only, whoever made them: it knows neither the simulator nor the runtime, and imports no
torch."""
