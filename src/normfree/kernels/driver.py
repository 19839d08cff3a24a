"""Choose, load and launch the kernels of a stage on PyTorch's current stream, through the CUDA driver's C interface."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from normfree.kernels.compile import awaited_binary, compile_ahead
from normfree.kernels.tiling import Form, Tiling, choose_tiling, neutral_mask

Argument = Tensor | int | None
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"the CUDA driver failed in {what} with status {status}: {(text.value or b'?').decode()}")


def _value(argument: Argument) -> ctypes.c_int | ctypes.c_void_p:
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_void_p(0 if argument is None else argument.data_ptr())


class Kernel:
    """One kernel on one device."""

    def __init__(self, module: ctypes.c_void_p, name: str) -> None:
        self.name = name
        self._handle = ctypes.c_void_p()
        self._shared = 48 * 1024
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._handle), module, name.encode()), f"loading {name}")

    def launch(self, grid: tuple[int, int], threads: int, shared: int, *arguments: Argument) -> None:
        """Start the kernel; tensors are passed as addresses and `None` as the null address."""
        if shared > self._shared:
            _check(_driver().cuFuncSetAttribute(self._handle, _MAX_DYNAMIC_SHARED, shared), f"sizing {self.name}")
            self._shared = shared
        values = [_value(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            _driver().cuLaunchKernel(self._handle, *grid, 1, threads, 1, 1, shared, stream, addresses, None),
            f"launching {self.name}",
        )


class Kernels:
    """The kernels of one stage on one device."""

    def __init__(self, tiling: Tiling, device: int) -> None:
        code = awaited_binary(tiling, torch.cuda.get_device_capability(device))
        module = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "loading the stage kernels")
        self.tiling = tiling
        self.forward = Kernel(module, "stage_forward")
        self.backward = Kernel(module, "stage_backward")
        self.weights = Kernel(module, "stage_weights")
        self.reduce = Kernel(module, "stage_reduce")
        self.pack = Kernel(module, "stage_pack")


@cache
def kernels_for(tiling: Tiling, device: int) -> Kernels:
    """The kernels of a stage, compiled and loaded at the first call."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context current
        return Kernels(tiling, device)


@cache
def multiprocessors(device: int) -> int:
    """How many multiprocessors the device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that a thread block can have on the device."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some of them
    return int(properties.shared_memory_per_block_optin)


def prepare(
    channels: int,
    size: int,
    *,
    images: int,
    form: Form,
    neutral: Collection[str],
    stream: torch.dtype,
    recompute: bool,
    device: torch.device,
) -> None:
    """Start to compile the kernels of a stage in another thread; the first call of `stage` waits for them.

    The arguments are those of `stage` and the properties of its `x`.
    """
    index = device_index(device)
    tiling = _tiling((images, channels, size), stream, index, form, neutral_mask(neutral), recompute)
    compile_ahead(tiling, torch.cuda.get_device_capability(index))


def device_index(device: torch.device) -> int:
    """The number of a CUDA device; of the current one if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def _tiling(
    shape: tuple[int, ...], stream: torch.dtype, device: int, form: str, neutral: int, recompute: bool
) -> Tiling:
    return choose_tiling(
        shape[1],
        shape[2],
        cast(Form, form),
        images=shape[0],
        multiprocessors=multiprocessors(device),
        neutral=neutral,
        wide_stream=stream == torch.float32,
        recompute=recompute,
        wgmma=torch.cuda.get_device_capability(device) == (9, 0),
        shared_memory=shared_memory(device),
    )


def chosen_kernels(x: Tensor, form: str, neutral: int, recompute: bool) -> Kernels:
    """The kernels for these images, compiled and loaded."""
    device = device_index(x.device)
    return kernels_for(_tiling(tuple(x.shape), x.dtype, device, form, neutral, recompute), device)
