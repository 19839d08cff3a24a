"""What the stage operators do without a GPU: shapes, reasons, errors, the cache of binaries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normfree.kernels import NEUTRAL, SCALARS, SHAPES, compile, stage, why_not
from normfree.kernels.tiling import SHARED_MEMORY, Tiling, choose_tiling, neutral_mask


def _meta(
    images: int = 3, blocks: int = 2, channels: int = 16, size: int = 32, **kind: torch.dtype
) -> list[torch.Tensor]:
    x = torch.empty(images, channels, size, size, device="meta", dtype=kind.get("x", torch.bfloat16))
    weights = torch.empty(blocks, 2, channels, channels, 3, 3, device="meta")
    return [x, weights, torch.empty(blocks, len(SCALARS), device="meta")]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_shapes_and_types_are_known_without_a_device(kind: torch.dtype) -> None:
    out = stage(*_meta(x=kind))
    assert (out.shape, out.dtype) == ((3, 16, 32, 32), kind)
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("form", "stream"), [("post", 3), ("pre", 2), ("linear", 2)])
def test_what_is_kept_follows_the_form(form: str, stream: int) -> None:
    kept = [torch.ops.normfree.stage_forward(*_meta(), None, form, 0, keep)[1:3] for keep in (0, 1, 2)]
    assert [(a.shape[0], b.shape[0]) for a, b in kept] == [(0, 0), (stream, 0), (stream, 2)]


def test_gradients_have_the_shapes_of_their_inputs() -> None:
    inputs = [t.requires_grad_() for t in _meta()]
    stage(*inputs).sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in inputs)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((48, 32, "post"), "48 at 32×32"),
        ((16, 32, "none"), "'none'"),
    ],
)
def test_reasons_name_what_is_missing(arguments: tuple[int, int, str], part: str) -> None:
    reason = why_not(*arguments)
    assert reason is not None
    assert part in reason


def test_kernels_compile_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests compile once, the result waits for its reader, and an error reaches the reader."""
    compiled: list[int] = []

    def binary(tiling: Tiling, capability: tuple[int, int]) -> bytes:
        compiled.append(tiling.channels)
        if tiling.channels == 32:
            raise RuntimeError("no")
        return b"code"

    monkeypatch.setattr(compile, "binary", binary)
    good, bad = (choose_tiling(*shape, "post", images=1, multiprocessors=132) for shape in ((16, 32), (32, 16)))
    for tiling in (good, good, bad):
        compile.compile_ahead(tiling, (9, 0))
    assert compile.awaited_binary(good, (9, 0)) == b"code"
    with pytest.raises(RuntimeError, match="no"):
        compile.awaited_binary(bad, (9, 0))
    assert sorted(compiled) == [16, 32]
    assert compile.awaited_binary(good, (9, 0)) == b"code"
    assert sorted(compiled) == [16, 16, 32]


def test_a_cpu_has_no_kernels() -> None:
    assert why_not(16, 32, device=torch.device("cpu")) == "the stage kernels need a CUDA device"


def test_wrong_inputs_are_named() -> None:
    x, weights, scalars = _meta()
    with pytest.raises(ValueError, match="'scalars' of stage"):
        stage(x, weights, scalars[:1])
    with pytest.raises(ValueError, match="'weights' of stage"):
        stage(x, weights.double(), scalars)
    with pytest.raises(ValueError, match="'biases' of stage"):
        stage(x, weights, scalars, torch.empty(2, 16, device="meta"))
    with pytest.raises(ValueError, match="'x' of stage"):
        stage(x.half(), weights, scalars)
    with pytest.raises(ValueError, match="got 'gamma'"):
        stage(x, weights, scalars, neutral=("gamma",))


def test_neutral_scalars_are_bits_in_order() -> None:
    assert [neutral_mask((name,)) for name in SCALARS] == [1 << i for i in range(len(NEUTRAL))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("images", [1, 64, 128])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("wgmma", [False, True])
def test_plans_fit_a_multiprocessor(shape: tuple[int, int], images: int, recompute: bool, wgmma: bool) -> None:
    tiling = choose_tiling(*shape, "pre", images=images, multiprocessors=132, recompute=recompute, wgmma=wgmma)
    assert tiling.ring >= (3 if tiling.wgmma else 2)
    assert max(tiling.chain_bytes) <= SHARED_MEMORY
    assert tiling.weight_bytes * tiling.weight_blocks <= SHARED_MEMORY
    assert tiling.threads in (128, 256, 512)


def test_too_little_shared_memory_is_a_reason() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        choose_tiling(64, 16, "post", images=1, multiprocessors=132, shared_memory=48 * 1024)


def test_binaries_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setenv("NORMFREE_CACHE", str(tmp_path))
    monkeypatch.setattr(compile, "compiler", lambda: lambda text, options: calls.append(options) or b"code")
    tiling = choose_tiling(16, 32, "post", images=1, multiprocessors=132)
    assert [compile.binary(tiling, (9, 0)) for _ in range(2)] == [b"code", b"code"]
    assert len(calls) == 1
    assert "--gpu-architecture=sm_90a" in calls[0]
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".cubin"]  # no temporary file is left
    compile.binary(choose_tiling(16, 32, "pre", images=1, multiprocessors=132), (9, 0))
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    monkeypatch.setenv("NORMFREE_CACHE", str(tmp_path))
    monkeypatch.setattr(compile, "compiler", lambda: lambda text, options: b"code")
    assert compile.binary(choose_tiling(16, 32, "post", images=1, multiprocessors=132), (9, 0)) == b"code"


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_nvrtc_library", lambda: None)
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: None)
    compile.compiler.cache_clear()
    try:
        reason = compile.why_no_compiler()
        assert reason is not None
        assert "NVRTC" in reason
        with pytest.raises(compile.CompilerMissingError, match="install"):
            compile.compiler()
    finally:
        compile.compiler.cache_clear()
