"""Residual networks of images or vectors: their stages, and those of the ImageNet ResNets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from normfree.models.base import BlockBuilder, ModelConfig, Network
from normfree.plan import positions


@dataclass(frozen=True, kw_only=True)
class ResNetShape:
    """The stages, widths, kernels and stem of a residual network.

    A block in a stage of width w has the branch widths in → w… → w·expansion. The first block of every stage but the
    first has stride 2. Where the shape changes, the shortcut is a convolution, or with `option_a` subsampling and zero
    channels.
    """

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    stem_width: int
    kernels: tuple[int, ...] = (3, 3)
    expansion: int = 1
    strided_layer: int = 0
    stem_kernel: int = 3
    stem_stride: int = 1
    stem_pool: bool = False
    stem_activated: bool = True
    option_a: bool = False
    spatial: bool = True

    def build(self, config: ModelConfig) -> Network:
        """Build the network; its parameters are not initialized."""
        builder = BlockBuilder(config.method, config.form, self.spatial, config.padding_mode)
        width, blocks = self.stem_width, []
        for stage, (count, base) in enumerate(zip(self.blocks, self.widths, strict=True)):
            for i in range(count):
                widths = [width, *[base] * (len(self.kernels) - 1), base * self.expansion]
                stride = 2 if self.spatial and stage > 0 and i == 0 else 1
                blocks.append((stage, widths, stride, i == 0 and (stride == 2 or widths[-1] != width)))
                width = widths[-1]
        stages = [nn.Sequential() for _ in self.blocks]
        placed = positions(self.blocks, [changes_shape for *_, changes_shape in blocks])
        for (stage, widths, stride, _), position in zip(blocks, placed, strict=True):
            stages[stage].append(
                builder.block(
                    widths, self.kernels, position, stride=stride, strided=self.strided_layer, option_a=self.option_a
                )
            )
        stem = builder.stem(
            config.input_shape[0],
            self.stem_width,
            self.stem_kernel,
            self.stem_stride,
            activated=self.stem_activated,
            pool=self.stem_pool,
        )
        return Network(stem, nn.Sequential(*stages), builder.head(width), width, config)


IMAGENET_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
IMAGENET_WIDTHS = (64, 128, 256, 512)


def imagenet_shape(depth: int, **settings: Any) -> ResNetShape:
    """Return four stages of basic blocks, or of bottlenecks from 50 layers on."""
    shape = ResNetShape(blocks=IMAGENET_BLOCKS[depth], widths=IMAGENET_WIDTHS, stem_width=64, **settings)
    return shape if depth < 50 else replace(shape, kernels=(1, 3, 1), expansion=4, strided_layer=1)
