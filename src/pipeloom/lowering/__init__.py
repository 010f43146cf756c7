"""Lowering: Schedule -> Program, one pass per file."""

from .passes import lower

__all__ = ["lower"]
