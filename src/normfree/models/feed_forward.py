"""Networks without skip connections: the fully connected and convolutional ones of `wninit`."""

from __future__ import annotations

from normfree.models.builder import Kit, Named, chain
from normfree.models.network import Network, Request, has_activation, walk
from normfree.plan import ResidualPlan


class PlainNetwork(Network):
    """A network whose layers follow one another."""

    skip = "none"

    @property
    def plan(self) -> ResidualPlan:
        """The plan: no residual sums."""
        _, activated = walk("stem", self.stem, False)
        body, activated = walk("body", self.body, activated, after=has_activation(self.head))
        return self._outside(body, stem_activated_out=False, activated=activated)


def mlp(depth: int, width: int, request: Request) -> Network:
    """`depth` linear layers, the classifier counted, ReLU between them.

    Reference: wninit, section 5.1 and Figures 1 and 2.
    """
    kit = Kit(request.method, "post", spatial=False)
    body: Named = []
    for _ in range(depth - 2):
        body += [*kit.bias(), *kit.named_layer(width, width), *kit.norm(width), *kit.activation()]
    stem = kit.stem(request.input_shape[0], width)
    return PlainNetwork(stem, chain(body), chain(kit.bias()), width, request)


def cnn(depth: int, width: int, request: Request) -> Network:
    """`depth` layers, the classifier counted: 3×3 convolutions of one width, the first two with stride 2.

    Reference: wninit, section 5.1 (convolutional networks) and Figure 3, left.
    """
    kit = Kit(request.method, "post", padding_mode=request.padding_mode)
    body: Named = []
    for i in range(depth - 2):
        layer = kit.named_layer(width, width, 3, 2 if i == 0 else 1)
        body += [*kit.bias(), *layer, *kit.norm(width), *kit.activation()]
    stem = kit.stem(request.input_shape[0], width, 3, 2)
    return PlainNetwork(stem, chain(body), kit.head(width), width, request)
