"""pipeloom: trains an unmodified PyTorch model across devices that are each too small for it.

The public names stand in `__init__.pyi` and are loaded on first use (PEP 562, by lazy_loader). So `import
pipeloom` imports no torch: planning, simulating and drawing start fast, and run where torch is not installed.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*__all__, "__version__"])


def __dir__() -> list[str]:
    return __all__
