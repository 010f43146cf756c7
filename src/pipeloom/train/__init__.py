"""The main job: trains a byte-level GPT, or the user's own model, through the public API.

An application, not a layer: no other room imports it but the command line.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
