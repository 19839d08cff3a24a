"""What every model of ours has: a name, the method and block form it was built with, and a plan that it states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from normfree.methods import Form, Method, Skip
from normfree.models.builder import Padding
from normfree.nn.scalar_folding import Stream
from normfree.plan import ResidualPlan


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a model is built from besides its own shape.

    `input_shape` is (C, H, W), (features,), or () where tokens come in, of which there are `vocabulary`.
    """

    name: str
    method: Method
    form: Form
    input_shape: tuple[int, ...]
    num_classes: int
    padding_mode: Padding = "zeros"
    vocabulary: int = 0
    dropout: float = 0.0


class Stated(nn.Module):
    """A model that states its plan: a function of the names, types and settings of its modules alone."""

    skip: Skip = "residual"

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.name = request.name
        self.method = request.method
        self.form = request.form

    @property
    def plan(self) -> ResidualPlan:
        """The plan, stated by walking the model's own modules."""
        raise NotImplementedError

    def streams(self) -> list[Stream]:
        """Its residual streams through which a constant passes unchanged, where it has some."""
        return []

    def extra_repr(self) -> str:
        """Name, method and form."""
        return f"{self.name}, method={self.method.spec}, form={self.form}"
