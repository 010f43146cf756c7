"""Lowering: Schedule -> Program, one pass per file."""
