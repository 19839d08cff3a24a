"""The models that the papers were tested on, by name."""

from normfree.models.base import Stated
from normfree.models.families import Family, catalog, find, is_ours
from normfree.models.network import Network
from normfree.models.registry import admits, build
from normfree.models.transformer import Decoder, Encoder, Transformer
from normfree.models.transformer_layers import Cache, Memory

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
