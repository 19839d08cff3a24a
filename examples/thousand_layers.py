"""A signal through a thousand layers: three networks that differ in one word, drawn in the terminal.

Each gets one forward and one backward pass at initialization, on the same noise.
"""

import time

import torch

import normfree as nf
from normfree.diagnostics.propagation import propagate
from normfree.report.terminal import line_plot, open_console

MODEL = "wrn-1000-1"
METHODS = {
    "he_in": "no normalization, He initialization",
    "batchnorm": "batch normalization",
    "wn": "no normalization, weight-norm initialization",
}


def main() -> None:
    torch.set_num_threads(1)  # thousands of tiny operations: a second thread would mostly wait
    console = open_console()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    forward, backward = {}, {}
    for method, description in METHODS.items():
        start = time.perf_counter()
        model = nf.build(MODEL, method, generator=torch.Generator().manual_seed(0))
        signal = propagate(model, images)
        label = f"{method}: {description}"
        forward[label] = signal.series("sum")
        backward[label] = signal.series("sum_gradient")
        blocks = len(signal.sums)
        console.print(f"{MODEL} with {method}: {blocks} residual blocks, {time.perf_counter() - start:.1f} s")
    for title, series in (
        ("forward: variance of the signal", forward),
        ("backward: variance of its gradient", backward),
    ):
        console.print()
        console.print(line_plot(series, title=title, x_label="residual block", y_label="variance"))


if __name__ == "__main__":
    main()
