"""A stand-in accelerator, which shows on any CPU what goes wrong on a GPU.

Importing this makes the device "standin": torch.device("standin:1"), torch.accelerator, torch.Stream,
torch.Event, torch.get_device_module and a backend of torch.distributed know it then. It computes with the
CPU's kernels, on streams that are threads, in memory that the CPU cannot touch.

A kernel that is not ordered behind the last ones of other streams that used its memory is an error at its
call, whatever ran first: a clock per stream counts what it waits for. `syncs` has each wait of the host and
its line, `reports` each race and early free.
"""

import atexit
import ctypes
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import build

NAME = "standin"
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Happening:
    """kind: "sync", "race" or "early free".  place: the line of the program, as FILE:LINE."""

    kind: str
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.text} at {self.place}"


syncs: list[Happening] = []
reports: list[Happening] = []


def _line() -> str:
    """Where the program is: outside of torch and of the stand-in."""
    frame = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*_SKIPPED, "<frozen")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread without Python"


_Tell = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
_Work = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def _told(kind: bytes, text: bytes) -> None:
    happening = Happening(kind.decode(), text.decode(), _line())
    (syncs if happening.kind == "sync" else reports).append(happening)


def _load() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise ImportError("the stand-in accelerator needs Linux: it maps memory twice")
    path = str(build.library())
    torch.ops.load_library(path)
    lib = ctypes.CDLL(path)
    for name in ("take_failure", "hidden_waits", "launch"):
        getattr(lib, f"standin_{name}").restype = ctypes.c_char_p
    lib.standin_shadow.restype = ctypes.c_void_p
    lib.standin_shadow.argtypes = [ctypes.c_void_p]
    lib.standin_limit.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.standin_name.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_char_p]
    return lib


_lib = _load()
_tell = _Tell(_told)
_lib.standin_tell(_tell)


# ---- Kernels in Python

_works: dict[int, Callable[[], None]] = {}
_numbers = count(1)  # ranks that are threads launch at once: `next` gives no number twice


def _run(number: int) -> None:
    try:
        _works.pop(number)()
    except Exception as error:  # whatever a kernel raises fails its stream, not its thread
        _lib.standin_fail(f"{type(error).__name__}: {error}".encode())


_work = _Work(_run)


def launch(
    stream: torch.Stream,
    op: str,
    work: Callable[..., None],
    *,
    reads: Sequence[Tensor] = (),
    writes: Sequence[Tensor] = (),
) -> None:
    """Run `work` on a stream as a kernel; it gets the tensors as the CPU's, those that it reads first.

    Raises: RuntimeError as any op does, if one of the tensors is not this stream's yet.
    """
    tensors = [*reads, *writes]
    seen = [_seen(tensor) for tensor in tensors]
    number = next(_numbers)
    _works[number] = lambda: work(*seen)
    pointers, sizes, written = (
        kind * len(tensors) for kind in (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    )
    problem = _lib.standin_launch(
        ctypes.c_int(stream.device.index),
        ctypes.c_int64(stream.stream_id),
        op.encode(),
        ctypes.c_int(len(tensors)),
        pointers(*(tensor.data_ptr() for tensor in tensors)),
        sizes(*(_extent(tensor) for tensor in tensors)),
        written(*(i >= len(reads) for i in range(len(tensors)))),
        _work,
        ctypes.c_int64(number),
    )
    if problem:
        _works.pop(number, None)
        raise RuntimeError(problem.decode())


def _extent(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _seen(tensor: Tensor) -> Tensor:
    """The same bytes, where a kernel may touch them."""
    size = _extent(tensor)
    if not size:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = (ctypes.c_char * size).from_address(_lib.standin_shadow(tensor.data_ptr()))
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


# ---- What tests ask for


def hidden_waits() -> Counter[str]:
    """Ops whose shapes nobody has written down: the stand-in waited for them, a GPU would not."""
    rows = [line.rsplit(" ", 1) for line in _lib.standin_hidden_waits().decode().splitlines()]
    return Counter({op: int(count) for op, count in rows})


def raise_failure() -> None:
    """Raises: RuntimeError if a kernel failed, or memory was freed too early, and no call has said so yet."""
    if text := _lib.standin_take_failure():
        raise RuntimeError(f"{NAME}: {text.decode()}")


def name_stream(stream: torch.Stream, name: str) -> None:
    """What reports call it."""
    _lib.standin_name(stream.device.index, stream.stream_id, name.encode())


@contextmanager
def collecting() -> Iterator[list[Happening]]:
    """Races and early frees go to the list; no call fails because of them."""
    begin = len(reports)
    found: list[Happening] = []
    _lib.standin_strict(0)
    try:
        yield found
    finally:
        torch.accelerator.synchronize()
        _lib.standin_strict(1)
        found += reports[begin:]
        del reports[begin:]


@contextmanager
def deaf() -> Iterator[None]:
    """Streams that this thread tells to wait do not. Takes a wait out of a program, to see it missed."""
    _lib.standin_deaf(1)
    try:
        yield
    finally:
        _lib.standin_deaf(0)


@contextmanager
def counted_syncs() -> Iterator[list[Happening]]:
    """The waits of the host meanwhile."""
    begin = len(syncs)
    found: list[Happening] = []
    yield found
    found += syncs[begin:]


# ---- torch.standin


def _module() -> types.ModuleType:
    accelerator = torch.accelerator
    generators = tuple(
        torch.ops.standin.default_generator(i) for i in range(torch._C._accelerator_hooks_device_count())
    )
    module = types.ModuleType(f"torch.{NAME}")

    @cache
    def size(device: int) -> int:
        """Before it is limited."""
        return accelerator.get_memory_info(device)[1]

    def index(device: Any) -> int:
        number = device if isinstance(device, int) else torch.device(device or NAME).index
        return module.current_device() if number is None else number

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def set_share(share: float, device: Any = NAME) -> None:
        """Let a device have no more than this share of its bytes."""
        _lib.standin_limit(index(device), int(share * size(index(device))))

    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": torch._C._accelerator_hooks_device_count,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(index(device)),
        "current_stream": accelerator.current_stream,
        "synchronize": accelerator.synchronize,
        "get_device_name": lambda device=None: "stand-in accelerator",
        "memory_allocated": accelerator.memory_allocated,
        "max_memory_allocated": accelerator.max_memory_allocated,
        "memory_reserved": accelerator.memory_reserved,
        "memory_stats": accelerator.memory_stats,
        "mem_get_info": accelerator.get_memory_info,
        "set_per_process_memory_fraction": set_share,
        "reset_peak_memory_stats": accelerator.reset_peak_memory_stats,
        "empty_cache": accelerator.empty_cache,
        "Stream": lambda device=None: torch.Stream(device=torch.device(NAME, index(device))),
        "Event": lambda enable_timing=False: torch.Event(device=NAME, enable_timing=enable_timing),
        "stream": lambda stream: stream,
        "device": accelerator.device_index,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "default_generators": generators,
        "get_rng_state": lambda device=NAME: generators[index(device)].get_state(),
        "set_rng_state": lambda state, device=NAME: generators[index(device)].set_state(state),
        "manual_seed": lambda seed: generators[module.current_device()].manual_seed(seed),
        "manual_seed_all": manual_seed_all,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend()


from . import process_group as process_group  # noqa: E402  # it needs all of the above


@atexit.register
def _leave() -> None:
    """Streams end before Python does: a kernel in Python would find nothing any more."""
    _lib.standin_tell(ctypes.cast(None, _Tell))
    _lib.standin_leave(ctypes.c_int(2000))
