"""Timeline -> terminal tables and Gantt chart, Chrome/Perfetto trace, and one self-contained HTML page.

It reads timelines only, whoever made them: it knows neither the simulator nor the runtime, and imports no
torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
