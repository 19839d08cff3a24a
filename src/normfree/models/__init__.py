"""Models by name: the networks of the four papers, and third-party ones."""

from normfree.models.base import BaseModel, Network
from normfree.models.builder import build, supports
from normfree.models.model_registry import Family, catalog, find_family, is_model_name
from normfree.models.transformer import Decoder, DecoderCache, Encoder, Memory, Transformer

__all__ = [
    "BaseModel",
    "Decoder",
    "DecoderCache",
    "Encoder",
    "Family",
    "Memory",
    "Network",
    "Transformer",
    "build",
    "catalog",
    "find_family",
    "is_model_name",
    "supports",
]
