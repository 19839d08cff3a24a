"""Compile the CUDA source at run time by NVRTC, which comes with PyTorch's CUDA packages, and cache the binaries."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from normfree.kernels.tiling import Tiling
from normfree.storage.writing import write_bytes

_PARTS = ("primitives", "layout", "convolution", "chain", "gradients", "pack")


class CompilerMissingError(RuntimeError):
    """No NVRTC was found."""


@cache
def source() -> str:
    """The CUDA source of all kernels, one translation unit."""
    folder = Path(__file__).parent / "cuda"
    return "\n".join((folder / f"{part}.cuh").read_text(encoding="utf-8") for part in _PARTS)


def architecture(capability: tuple[int, int]) -> str:
    """The compiler's name of a compute capability; Hopper's own instructions need the suffix.

    >>> architecture((9, 0)), architecture((12, 0))
    ('sm_90a', 'sm_120')
    """
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")


def cache_folder() -> Path:
    """Where binaries are kept: NORMFREE_CACHE, or the user's cache directory."""
    base = os.environ.get("NORMFREE_CACHE")
    if base:
        return Path(base) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normfree" / "kernels"


def options_of(tiling: Tiling, capability: tuple[int, int]) -> list[str]:
    """The compiler's options for the kernels of a stage."""
    options = [f"--gpu-architecture={architecture(capability)}", "--std=c++17", "--generate-line-info"]
    return options + [f"-D{name}={value}" for name, value in tiling.defines().items()]


def binary(tiling: Tiling, capability: tuple[int, int]) -> bytes:
    """The machine code of the kernels of a stage, from disk or compiled now.

    Raises `CompilerMissingError` when it must be compiled and no compiler is there, `RuntimeError` when the compiler
    refuses the source.
    """
    options = options_of(tiling, capability)
    key = hashlib.sha256("\0".join([source(), *options]).encode()).hexdigest()[:32]
    path = cache_folder() / f"stage-{architecture(capability)}-{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = compiler()(source(), options)
    with suppress(OSError):  # a cache that cannot be written is no error
        write_bytes(path, code)
    return code


_ahead: dict[tuple[Tiling, tuple[int, int]], Future[bytes]] = {}


def compile_ahead(tiling: Tiling, capability: tuple[int, int]) -> None:
    """Start to compile in another thread; `awaited_binary` waits for the result."""
    if (tiling, capability) not in _ahead:
        _ahead[tiling, capability] = _threads().submit(binary, tiling, capability)


def awaited_binary(tiling: Tiling, capability: tuple[int, int]) -> bytes:
    """The machine code, from a compilation that was started ahead if there is one; see `binary`."""
    started = _ahead.pop((tiling, capability), None)
    return binary(tiling, capability) if started is None else started.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="nvrtc")


@cache
def compiler() -> Callable[[str, list[str]], bytes]:
    """The compiler to use: the NVRTC library itself, or the one that cuda-core or CuPy finds.

    Raises `CompilerMissingError` when there is none.
    """
    library = _nvrtc_library()
    if library is not None:
        return lambda text, options: _by_nvrtc(library, text, options)
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
        return _by_cuda_core
    if importlib.util.find_spec("cupy"):
        return _by_cupy
    raise CompilerMissingError(
        "expected NVRTC to compile the stage kernels, got neither its library nor cuda-core nor CuPy; "
        "install PyTorch with CUDA, or cuda-core"
    )


def why_no_compiler() -> str | None:
    """Return why the kernels cannot be compiled here, in one sentence, or None if they can."""
    try:
        compiler()
    except CompilerMissingError:
        return "no NVRTC was found to compile the stage kernels (install PyTorch with CUDA, or cuda-core)"
    return None


def _nvrtc_library() -> ctypes.CDLL | None:
    for name in _nvrtc_names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _nvrtc_names() -> Iterator[str]:
    """Files that may be NVRTC: those of NVIDIA's Python packages first, since they fit PyTorch."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(folder).glob("**/libnvrtc.so.*"), reverse=True)
        yield from (str(path) for path in found if "alt" not in path.name)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _by_nvrtc(library: ctypes.CDLL, text: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()

    def check(status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"NVRTC failed in {what} with status {status}: {_log(library, program)}")

    check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"stage.cu", 0, None, None), "createProgram")
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        check(library.nvrtcCompileProgram(program, len(options), flags), "compileProgram")
        size = ctypes.c_size_t()
        check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "getCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        check(library.nvrtcGetCUBIN(program, code), "getCUBIN")
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if not program or library.nvrtcGetProgramLogSize(program, ctypes.byref(size)):
        return "no log"
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _by_cuda_core(text: str, options: list[str]) -> bytes:
    core: Any = importlib.import_module("cuda.core")
    defines = [tuple(option[2:].split("=")) for option in options if option.startswith("-D")]
    settings = core.ProgramOptions(arch=options[0].split("=")[1], std="c++17", define_macro=defines, lineinfo=True)
    return bytes(core.Program(text, code_type="c++", options=settings).compile("cubin").code)


def _by_cupy(text: str, options: list[str]) -> bytes:
    compiling: Any = importlib.import_module("cupy.cuda.compiler")
    nvrtc: Any = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(text, "stage.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except compiling.NVRTCError as error:
        raise RuntimeError(f"NVRTC failed: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
