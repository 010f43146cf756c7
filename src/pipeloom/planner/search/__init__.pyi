from .bands import (
    Bands as Bands,
    all_bands as all_bands,
    bands_around as bands_around,
    bands_below as bands_below,
    best_cuts_within as best_cuts_within,
    count_intervals as count_intervals,
)
from .cut_search import Search as Search, best_cuts as best_cuts, growing_part as growing_part
from .depth_labels import DepthLabels as DepthLabels, Frontier as Frontier, StageTimes as StageTimes
from .down_sets import (
    DownSets as DownSets,
    PieceGraph as PieceGraph,
    best_chain as best_chain,
    count_down_sets as count_down_sets,
)
from .evaluation import Evaluation as Evaluation, Known as Known, Memoised as Memoised
from .even_ranks import even_ranks as even_ranks
from .layer_groups import (
    Piece as Piece,
    borders as borders,
    calls as calls,
    layer_names as layer_names,
    layers as layers,
)
from .polish import polish_cuts as polish_cuts
from .problem import Cuts as Cuts, Key as Key, Partition as Partition, Problem as Problem, largest as largest
