from .csv import (
    parse_schedule as parse_schedule,
    program_text as program_text,
    read_schedule as read_schedule,
    schedule_text as schedule_text,
    write_schedule as write_schedule,
)
from .plain import parse_plain as parse_plain
from .text import parse_text as parse_text
