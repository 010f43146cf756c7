from .balanced import balanced as balanced
from .dawnpiper import binary_partition as binary_partition, dawnpiper as dawnpiper
from .equal import equal as equal
from .exact import exact as exact
from .graphpipe import graphpipe as graphpipe, shallow_cuts as shallow_cuts
from .pipedream import (
    Layer as Layer,
    Rules as Rules,
    noam as noam,
    partition as partition,
    pipedream as pipedream,
    pipedream_repo as pipedream_repo,
    stage_s as stage_s,
)
from .probe import filled as filled, parametric_search as parametric_search, probe as probe
from .vpipe import move_layers as move_layers, one_pass as one_pass, vpipe as vpipe
