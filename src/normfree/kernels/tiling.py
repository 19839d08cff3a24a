"""How a stage is cut into warps, thread blocks and slices of weights, and which stages have kernels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

Form = Literal["post", "pre", "linear"]
FORMS: tuple[Form, ...] = ("post", "pre", "linear")

SCALARS = (
    "alpha",
    "entry_bias",
    "entry_gain",
    "bias_before_conv1",
    "bias_after_conv1",
    "inner_gain",
    "bias_before_conv2",
    "beta",
    "a",
    "delta",
    "c",
    "exit_gain",
)
"""The scalars of a block in the order in which the kernels read them."""

NEUTRAL = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0)
"""The value of each scalar that changes nothing."""


def neutral_mask(names: Collection[str]) -> int:
    """The bits of the named scalars.

    Raises `ValueError` for a name that is not in `SCALARS`.
    """
    wrong = [name for name in names if name not in SCALARS]
    if wrong:
        raise ValueError(f"expected names of scalars, got '{wrong[0]}' in 'neutral' of stage; use {', '.join(SCALARS)}")
    return sum(1 << SCALARS.index(name) for name in set(names))


SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a thread block can have on Hopper GPUs."""

PACK_THREADS, REDUCE_THREADS = 256, 288

# (channels, size, thread blocks per image): tiles of 16 pixels and of 8 channels per warp
_TILES = {
    (16, 32, 1): (4, 2),
    (16, 32, 2): (2, 2),
    (32, 16, 1): (4, 2),
    (32, 16, 2): (2, 2),
    (64, 8, 1): (2, 4),
    (64, 8, 2): (2, 2),
    (32, 32, 2): (4, 2),
    (64, 16, 1): (4, 2),
    (64, 16, 2): (2, 2),
    (128, 8, 1): (2, 4),
    (128, 8, 2): (2, 2),
}
# The same for the tensor instructions of Hopper, by which four warps take 64 pixels
_WGMMA_TILES = {(32, 16, 1): (1, 4), (64, 8, 1): (1, 8), (64, 16, 1): (1, 8)}
# (channels, size): image rows that the weight gradients take at a time, where it is not the whole image
_BANDS = {(16, 32): 16, (32, 16): 8, (32, 32): 4}
# channels: (dx, 16 input channels) steps in a slice, slices in shared memory
_WEIGHTS = {16: (3, 4), 32: (6, 4), 64: (6, 4), 128: (2, 6)}
SHAPES = tuple(sorted({(channels, size) for channels, size, _ in _TILES}, key=lambda s: (s[0] * s[1], s[0])))
"""The (channels, image size) of stages that have kernels."""


@dataclass(frozen=True)
class Tiling:
    """Compile-time constants of the kernels of one stage.

    `split` thread blocks share an image by rows. `wgmma` uses the tensor instructions that only Hopper GPUs have.
    `neutral` has a bit for each scalar that is neutral and does not learn. `wide_stream` keeps the residual stream in
    float32 and `recompute` computes the inner activation again in the backward pass.
    """

    channels: int
    size: int
    form: Form
    neutral: int = 0
    wide_stream: bool = False
    recompute: bool = False
    split: int = 1
    tiles: tuple[int, int] = (4, 2)
    steps: int = 3
    ring: int = 4
    wgmma: bool = False

    @property
    def pitch(self) -> int:
        """Pixels from one image row to the next in shared memory."""
        return (self.size + 2 + 7) // 8 * 8

    @property
    def rows(self) -> int:
        """Image rows of one thread block."""
        return self.size // self.split

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one image with its border in shared memory."""
        return (self.rows + 2) * self.pitch * self.channels * 2

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice of weights."""
        return self.steps * 3 * 16 * self.channels * 2

    @property
    def threads(self) -> int:
        """Threads of a thread block of the chain."""
        warps_m = self.rows * self.size // 16 // self.tiles[0]
        return warps_m * (self.channels // 8 // self.tiles[1]) * 32

    @property
    def chain_bytes(self) -> tuple[int, int]:
        """Shared memory of the forward and of the backward kernel."""
        ring = self.ring * (self.slice_bytes + 16) + 16  # and two barriers between neighbours
        return 2 * self.buffer_bytes + ring, (3 if self.recompute else 2) * self.buffer_bytes + ring

    @property
    def band(self) -> int:
        """Image rows that the weight gradients take at a time."""
        return _BANDS.get((self.channels, self.size), self.size)

    @property
    def weight_threads(self) -> int:
        """Threads of a thread block of the weight gradients."""
        return 256 if self.channels <= 32 else 512

    @property
    def weight_blocks(self) -> int:
        """Thread blocks of the weight gradients that share a multiprocessor."""
        return 512 // self.weight_threads

    @property
    def weight_channels(self) -> int:
        """Channels of the square of weights that one thread block computes the gradient of."""
        return min(self.channels, 64)

    @property
    def weight_bytes(self) -> int:
        """Shared memory of the kernel of the weight gradients."""
        width = self.weight_channels
        tiles = 2 * ((self.band + 2) * self.pitch + self.band * self.size) * width * 2
        return tiles + (0 if width == 64 else (9 * width * width + width) * 4)

    @property
    def partial(self) -> int:
        """Numbers in a partial weight gradient: the weight's, and one per output channel."""
        return 9 * self.channels**2 + self.channels

    def defines(self) -> dict[str, int]:
        """The constants by the names that the source has for them."""
        return {
            "NF_CHANNELS": self.channels,
            "NF_SIZE": self.size,
            "NF_SPLIT": self.split,
            "NF_TILES_M": self.tiles[0],
            "NF_TILES_N": self.tiles[1],
            "NF_RING": self.ring,
            "NF_STEPS": self.steps,
            "NF_BAND": self.band,
            "NF_RELU_IN": int(self.form == "pre"),
            "NF_RELU_OUT": int(self.form == "post"),
            "NF_NEUTRAL": self.neutral,
            "NF_STREAM32": int(self.wide_stream),
            "NF_RECOMPUTE": int(self.recompute),
            "NF_WGMMA": int(self.wgmma),
        }


def choose_tiling(
    channels: int,
    size: int,
    form: Form,
    *,
    images: int,
    multiprocessors: int,
    neutral: int = 0,
    wide_stream: bool = False,
    recompute: bool = False,
    wgmma: bool = False,
    shared_memory: int = SHARED_MEMORY,
) -> Tiling:
    """Choose the tiling of a stage: two thread blocks per image where one each would leave multiprocessors idle.

    Raises `ValueError` when the stage has no kernels; `why_not_shape` gives the reason.
    """
    reason = why_not_shape(channels, size, form)
    if reason:
        raise ValueError(reason)
    can_split = (channels, size, 2) in _TILES
    must_split = (channels, size, 1) not in _TILES
    split = 2 if must_split or (can_split and 2 * images <= multiprocessors) else 1
    wgmma = wgmma and (channels, size, split) in _WGMMA_TILES
    steps, most = _WEIGHTS[channels]
    tiling = Tiling(
        channels,
        size,
        form,
        neutral=neutral,
        wide_stream=wide_stream,
        recompute=recompute,
        split=split,
        tiles=(_WGMMA_TILES if wgmma else _TILES)[channels, size, split],
        steps=steps,
        ring=0,
        wgmma=wgmma,
    )
    least = 3 if wgmma else 2
    room = shared_memory - max(tiling.chain_bytes)
    while steps % 2 == 0 and room // (tiling.slice_bytes + 16) < least:
        steps //= 2
        tiling = replace(tiling, steps=steps)
    ring = min(most, room // (tiling.slice_bytes + 16))
    if ring < least or tiling.weight_bytes * tiling.weight_blocks > shared_memory:
        needed = max(
            max(tiling.chain_bytes) + least * (tiling.slice_bytes + 16), tiling.weight_bytes * tiling.weight_blocks
        )
        raise ValueError(
            f"expected {needed:,} bytes of shared memory for {channels} channels at {size}×{size}, "
            f"got {shared_memory:,}; use the compiled path"
        )
    return replace(tiling, ring=ring)


def why_not_shape(channels: int, size: int, form: str) -> str | None:
    """Return why the kernels cannot run a stage of this shape, in one sentence, or None if they can."""
    if form not in FORMS:
        return f"the stage kernels support the forms {', '.join(FORMS)}, not '{form}'"
    if (channels, size) not in SHAPES:
        known = ", ".join(f"{c} at {s}×{s}" for c, s in SHAPES)
        return f"the stage kernels support the channels and sizes {known}, not {channels} at {size}×{size}"
    return None
