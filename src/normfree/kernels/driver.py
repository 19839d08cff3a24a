"""Load compiled kernels and launch them on PyTorch's current stream, through the CUDA driver's C interface."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from normfree.kernels.compile import awaited_binary
from normfree.kernels.tiling import Tiling

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
