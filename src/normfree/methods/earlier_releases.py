"""The methods of earlier releases: which options of today give the computation that a release had."""

from __future__ import annotations

import re
from typing import NamedTuple

from normfree.storage.provenance import RELEASE

FIRST_RELEASE = "0.1"
"""The release of stored runs and conversions that do not name theirs."""


class Earlier(NamedTuple):
    """An earlier definition of a method: the options that restore it, and a pattern of the models that it differs for.

    The names of third-party models, which a method converts, are '' or have a colon.
    """

    method: str
    options: str
    models: str = ".*"


_TRANSFORMERS = r"(transformer|encoder|decoder)-.*|.*:.*|"  # and third-party models, which may be Transformers
CHANGES: dict[str, tuple[Earlier, ...]] = {  # by the release that brought the new definition
    "0.2": (
        Earlier("nf", "bias=false"),
        Earlier("nf_he", "bias=false"),
        Earlier("wn", "stem_relu=true", r"resnet\d+"),
        Earlier("wn_data", "stem_relu=true", r"resnet\d+"),
        Earlier("wn_hanin", "stem_relu=true", r"resnet\d+"),
        Earlier("wn_default", "stem_relu=true", r"resnet\d+"),
        Earlier("wn_default", "directions=he"),
        Earlier("fixup", "slow_biases=false"),
        Earlier("fixup", "scalar_lr=0.1", _TRANSFORMERS),
        Earlier("fixup", "transformer=biased", _TRANSFORMERS),
        Earlier("fixup_bounded", "scalar_lr=0.1", _TRANSFORMERS),
        Earlier("fixup_bounded", "transformer=biased", _TRANSFORMERS),
        Earlier("lsuv", "by=layer", r"(?!(mlp|cnn|dense|highway)-).*"),
    ),
}


def as_of(spec: str, release: str, model: str = "") -> str:
    """Return today's spelling of a method of an earlier release, for a model; other options stay.

    >>> as_of("nf:beta=1", "0.1"), as_of("wn", "0.1", "resnet56"), as_of("wn", "0.1", "wrn-40-10")
    ('nf:beta=1,bias=false', 'wn:stem_relu=true', 'wn')

    Args:
        spec: The method, as that release wrote it.
        release: The release, such as '0.1'.
        model: The name of the model; '' for one without a name, which the method converted.

    Raises:
        ValueError: If the release is unknown.
    """
    known = [FIRST_RELEASE, *CHANGES]
    if release not in known:
        raise ValueError(
            f"expected a release of normfree up to {RELEASE}, got '{release}'; install that release to read its files"
        )
    name, _, text = spec.partition(":")
    options = [part for part in text.split(",") if part]
    given = {option.partition("=")[0].strip() for option in options}
    for changed in known[known.index(release) + 1 :]:
        for earlier in CHANGES[changed]:
            key = earlier.options.partition("=")[0]
            if earlier.method == name and key not in given and re.fullmatch(earlier.models, model):
                options.append(earlier.options)
                given.add(key)
    return f"{name}:{','.join(options)}" if options else name
