"""Planners: OpGraph x Profile x Cluster -> Plan. One strategy per file, one cost and memory model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
