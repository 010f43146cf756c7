from .bands import (
    Bands as Bands,
    around as around,
    banded as banded,
    everywhere as everywhere,
    intervals as intervals,
    worthwhile as worthwhile,
)
from .cut_search import Search as Search, sweep as sweep
from .evaluation import Evaluation as Evaluation, Memoised as Memoised
from .layer_groups import (
    Piece as Piece,
    borders as borders,
    calls as calls,
    layer_of as layer_of,
    layers as layers,
)
from .polish import polished as polished
from .problem import Cuts as Cuts, Key as Key, Partition as Partition, Problem as Problem, largest as largest
