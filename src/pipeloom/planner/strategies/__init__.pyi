from .balanced import balanced as balanced
from .dawnpiper import binary as binary, dawnpiper as dawnpiper
from .equal import equal as equal
from .exact import exact as exact
from .pipedream import (
    Layer as Layer,
    Rules as Rules,
    noam as noam,
    partition as partition,
    pipedream as pipedream,
    pipedream_repo as pipedream_repo,
    stage_s as stage_s,
)
from .probe import fill as fill, filled as filled, probe as probe
from .vpipe import moved as moved, one_pass as one_pass, vpipe as vpipe
