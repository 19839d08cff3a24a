"""The models that the papers were tested on, by name."""

from normfree.models.families import Family, catalog, find, is_ours
from normfree.models.layers import Cache, Memory
from normfree.models.network import Network
from normfree.models.registry import admits, build
from normfree.models.stated import Stated
from normfree.models.transformer import Decoder, Encoder, Transformer

__all__ = [
    "Cache",
    "Decoder",
    "Encoder",
    "Family",
    "Memory",
    "Network",
    "Stated",
    "Transformer",
    "admits",
    "build",
    "catalog",
    "find",
    "is_ours",
]
