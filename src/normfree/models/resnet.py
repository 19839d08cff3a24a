"""Residual networks: CIFAR, wide, pre-activation and ImageNet ResNets and residual MLPs, from one description."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from normfree.models.base import BlockBuilder, ModelConfig, Network
from normfree.plan import Position, positions


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
        body = nn.Sequential()
        width = self.stem_width
        numbered = iter(self._positions())
        for stage, (count, base) in enumerate(zip(self.blocks, self.widths, strict=True)):
            blocks = nn.Sequential()
            for i in range(count):
                outputs = base * self.expansion
                inner = [base] * (len(self.kernels) - 1)
                blocks.append(
                    builder.block(
                        [width, *inner, outputs],
                        self.kernels,
                        next(numbered),
                        stride=2 if self.spatial and stage > 0 and i == 0 else 1,
                        strided=self.strided_layer,
                        option_a=self.option_a,
                    )
                )
                width = outputs
            body.append(blocks)
        stem = builder.stem(
            config.input_shape[0],
            self.stem_width,
            self.stem_kernel,
            self.stem_stride,
            activated=self.stem_activated,
            pool=self.stem_pool,
        )
        return Network(stem, body, builder.head(width), width, config)

    def _positions(self) -> tuple[Position, ...]:
        """Return the position of every block, with the changes of shape marked."""
        width, changes = self.stem_width, []
        for stage, (count, base) in enumerate(zip(self.blocks, self.widths, strict=True)):
            for i in range(count):
                outputs = base * self.expansion
                changes.append(i == 0 and ((stage > 0 and self.spatial) or outputs != width))
                width = outputs
        return positions(self.blocks, changes)


IMAGENET_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
IMAGENET_WIDTHS = (64, 128, 256, 512)


def cifar_resnet(depth: int) -> ResNetShape:
    """ResNet-(6n+2) for 32×32 images: three stages of n basic blocks, shortcuts without weights.

    Reference: fixup, Table 1; He 2016a, section 4.2.
    """
    n = (depth - 2) // 6
    return ResNetShape(blocks=(n, n, n), widths=(16, 32, 64), stem_width=16, option_a=True)


def wide_resnet(depth: int, width: int) -> ResNetShape:
    """WRN-(6n+4)-k for 32×32 images: three stages of n pre-activation blocks, k times as wide.

    Reference: fixup, section 4.1; wninit, section 5.1; Zagoruyko & Komodakis 2016, Table 1.
    """
    n = (depth - 4) // 6
    return ResNetShape(
        blocks=(n, n, n),
        widths=(16 * width, 32 * width, 64 * width),
        stem_width=16,
        stem_activated=False,
    )


def preact_resnet(depth: int) -> ResNetShape:
    """Pre-activation ResNet-18 to 152 for 32×32 images: a 3×3 stem without activation or pooling.

    Reference: robust, section 4 and Table 1; normdead, Figure 4.
    """
    shape = ResNetShape(
        blocks=IMAGENET_BLOCKS[depth],
        widths=IMAGENET_WIDTHS,
        stem_width=64,
        stem_activated=False,
    )
    return shape if depth < 50 else _bottleneck(shape)


def imagenet_resnet(depth: int) -> ResNetShape:
    """ResNet-18 to 152 for 224×224 images: a 7×7 stem with stride 2 and max pooling.

    Reference: fixup, Table 2; He 2016a, Table 1.
    """
    shape = ResNetShape(
        blocks=IMAGENET_BLOCKS[depth],
        widths=IMAGENET_WIDTHS,
        stem_width=64,
        stem_kernel=7,
        stem_stride=2,
        stem_pool=True,
    )
    return shape if depth < 50 else _bottleneck(shape)


def residual_mlp(blocks: int, width: int, layers: int = 2) -> ResNetShape:
    """Residual MLP: one stage of blocks with `layers` linear layers each.

    Reference: wninit, Figure 1, bottom; fixup, appendix B.1.
    """
    return ResNetShape(
        blocks=(blocks,),
        widths=(width,),
        stem_width=width,
        kernels=(1,) * layers,
        stem_activated=False,
        spatial=False,
    )


def _bottleneck(shape: ResNetShape) -> ResNetShape:
    return replace(shape, kernels=(1, 3, 1), expansion=4, strided_layer=1)
