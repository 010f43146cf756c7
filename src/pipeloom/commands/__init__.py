"""One file per command: flags, then one call. Whatever imports torch is imported inside the command."""
