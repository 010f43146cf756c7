"""`python -m pipeloom` is `pipeloom`."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="pipeloom")
