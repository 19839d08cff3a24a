"""A small case of the kernels of one stage, for compute-sanitizer.

    compute-sanitizer --tool racecheck python benchmarks/stage_sanitize.py 64 8 [images [blocks]]

The tools are memcheck and racecheck. Up to half as many images as multiprocessors take two thread blocks each; use 67
images on an H200 for one each. Two blocks use the ring of weights more than once.
"""

from __future__ import annotations

import sys

import torch

from normfree.kernels import NEUTRAL, stage


def main(channels: int, size: int, images: int = 2, blocks: int = 2) -> None:
    for kind, form, recompute in ((torch.bfloat16, "post", False), (torch.float32, "pre", True)):
        x = torch.randn(images, channels, size, size, device="cuda").to(kind).requires_grad_()
        weights = (0.1 * torch.randn(blocks, 2, channels, channels, 3, 3, device="cuda")).requires_grad_()
        scalars = torch.tensor(NEUTRAL, device="cuda").repeat(blocks, 1).requires_grad_()
        biases = torch.randn(blocks, 2, channels, device="cuda").requires_grad_()
        stage(x, weights, scalars, biases, form=form, recompute=recompute).float().sum().backward()  # type: ignore[arg-type]
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
