"""pipeloom export: the trained model as one safetensors file."""

from __future__ import annotations

from pathlib import Path

import click

from .common import NEW_FILE


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.argument("file", type=NEW_FILE)
def export(*, directory: Path, file: Path) -> None:
    """Write the model of a checkpoint to FILE, under its original parameter names.

    DIRECTORY is a run (runs/gpt-1), its checkpoint folder, or one checkpoint (.../step-00000300). A tied
    parameter is stored once; its other names are in the file's metadata.
    """
    from ..runtime.checkpoint import export_safetensors

    inside = directory / "checkpoint"
    source = export_safetensors(inside if inside.is_dir() else directory, file)
    click.echo(f"{source} -> {file}")
