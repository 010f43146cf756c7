from .balanced import balanced as balanced
from .dawnpiper import binary_partition as binary_partition, dawnpiper as dawnpiper
from .equal import equal as equal
from .exact import exact as exact
from .graph_chains import (
    Arranged as Arranged,
    Machine as Machine,
    arranged_by as arranged_by,
    pieces_of as pieces_of,
    pipedream_graph as pipedream_graph,
    pipedream_graph_layers as pipedream_graph_layers,
    pipedream_graph_ops as pipedream_graph_ops,
    piper as piper,
    piper_layers as piper_layers,
    piper_ops as piper_ops,
)
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
