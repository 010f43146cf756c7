"""The stand-in's library, built once per version of its source and of torch, and kept in the user's cache."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs
import torch
from filelock import FileLock
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "kernels.cpp", "torch_device.cpp")
ABI = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
FLAGS = ("-std=c++20", "-g0", "-w", "-fPIC", ABI)
QUICK = {"device.cpp": "-O1"}
"""What runs at every op; of the others, mostly torch's templates, compiling takes longer than it saves."""


def library() -> Path:
    """The built library; builds it if need be.

    Raises: subprocess.CalledProcessError if it does not compile; the compiler has printed why.
    """
    path = _library()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            _compile(path)
    return path


def _library() -> Path:
    digest = hashlib.sha256(f"{torch.__version__} {FLAGS} {QUICK}".encode())
    for source in (*SOURCES, *(path.name for path in sorted(HERE.glob("*.h")))):
        digest.update((HERE / source).read_bytes())
    return Path(platformdirs.user_cache_dir("pipeloom")) / "standin" / f"{digest.hexdigest()[:16]}.so"


def _compile(path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise ImportError("the stand-in accelerator needs a C++ compiler: no g++ here, and CXX names none")
    paths = [f"-I{folder}" for folder in include_paths()]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [str(Path(folder, source).with_suffix(".o")) for source in SOURCES]
        compiling = []
        for source, target in zip(SOURCES, objects, strict=True):
            words = (QUICK.get(source, "-O0"), *paths, "-c", str(HERE / source), "-o", target)
            compiling.append(subprocess.Popen([compiler, *FLAGS, *words]))
        for one in compiling:
            if one.wait():
                raise subprocess.CalledProcessError(one.returncode, one.args)
        linked = Path(folder, path.name)
        found = [f"-L{folder}" for folder in library_paths()]
        subprocess.run(
            [compiler, "-shared", *objects, "-o", linked, *found, "-lc10", "-ltorch_cpu", "-ltorch"],
            check=True,
        )
        linked.replace(path)  # at once: another process sees all of it or nothing
