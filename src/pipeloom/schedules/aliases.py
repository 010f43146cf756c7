"""Other names of the library's schedules: those that torch, Megatron-LM and the papers use."""

from __future__ import annotations

ALIASES: dict[str, tuple[str, ...]] = {
    "gpipe": ("ScheduleGPipe", "fill_drain", "f_then_b"),
    "1f1b": ("Schedule1F1B", "pipedream_flush", "dapple", "one_f_one_b", "non_interleaved"),
    "eager_1f1b": ("eager1f1b",),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", "interleaved", "1f1b_interleaved", "vpp"),
    "looped_bfs": ("ScheduleLoopedBFS", "breadth_first", "interleaved_gpipe"),
    "async_1f1b": ("pipedream",),
    "zb_h1": ("zbh1", "zero_bubble_h1"),
    "zb_h2": ("zbh2", "zero_bubble_h2"),
    "zb_1p": ("zb1p",),
    "zb_2p": ("zb2p",),
    "zb_v": ("ScheduleZBVZeroBubble", "zbv", "v_zb", "zero_bubble_v"),
    "1f1b_v": ("one_f_one_b_v",),
    "dualpipe": ("dual_pipe",),
    "dualpipev": ("ScheduleDualPipeV", "dual_pipe_v"),
    "seq1f1b": ("seq_1f1b",),
}
"""Schedule -> its other names. Capitals, `-`, `_` and a "Schedule" in front make no difference."""

CHUNKS = "v"
"""The option of every schedule that puts several stages on a rank: how many, as in "interleaved:v=4"."""


def canonical(name: str) -> str:
    """The library's own name of a schedule; a name that is none of the aliases in small letters, with `_`.

    >>> canonical("Interleaved"), canonical("ScheduleZBVZeroBubble"), canonical("gis-g")
    ('interleaved_1f1b', 'zb_v', 'gis_g')
    """
    return _BY_ALIAS.get(_bare(name), name.lower().replace("-", "_"))


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").removeprefix("schedule")


_BY_ALIAS = {_bare(alias): name for name, others in ALIASES.items() for alias in (name, *others)}
