"""The claims of `fixup` on data that are not at hand: ImageNet, and the translation of IWSLT and WMT.

Reference: Zhang, Dauphin, Ma 2019, sections 4.2 and 4.3, Tables 2 and 3.
"""

from __future__ import annotations

from normfree.experiments.claims import Check, Claim, Cost, register


def _imagenet_check(row: str, paper: float) -> Check:
    return Check(
        name=f"test error, {row}",
        statement=f"test error of {row}, in %",
        paper=paper,
        low=round(paper - 0.4, 1),
        high=round(paper + 0.4, 1),
        why="no spread is printed; two standard deviations of an error counted on 50,000 images are 0.4",
    )


register(
    Claim(
        id="fixup/table2",
        where="Table 2",
        statement="On ImageNet Fixup alone overfits, and with mixup it is on par with group norm.",
        paper_value="test error: ResNet-50 with Fixup 27.6 %, with mixup 24.0 % (group norm 23.9 %, batch norm "
        "23.3 %), Xavier 31.5 %, batch norm without mixup 23.6 %; ResNet-101 with mixup 21.4 % (group norm "
        "21.4 %, batch norm 20.8 %); Figures 5 and 6 show the curves",
        how="Not run, as ImageNet is not at hand: recipe fixup_imagenet on a folder of it, then with mixup=0.0, with "
        "method=groupnorm and mixup=0.1, and both with model=resnet101 and epochs=200.",
        cost=Cost(quick_seconds=84_000, full_seconds=84_000, device="gpu"),
        checks=(
            _imagenet_check("ResNet-50, batch norm", 23.6),
            _imagenet_check("ResNet-50, batch norm + mixup", 23.3),
            _imagenet_check("ResNet-50, Xavier", 31.5),
            _imagenet_check("ResNet-50, Fixup", 27.6),
            _imagenet_check("ResNet-50, Fixup + mixup", 24.0),
            _imagenet_check("ResNet-101, batch norm + mixup", 20.8),
            _imagenet_check("ResNet-101, Fixup + mixup", 21.4),
            Check(
                name="ResNet-50, training error, batch norm - Fixup",
                statement="without mixup Fixup overfits: its training error lies below batch norm's, in points",
                paper="fits the training set very well, but overfits (Figure 5)",
                low=1.0,
                why="a plot only: one point, many times what seeds differ by on 1.28 million images",
            ),
            Check(
                name="ResNet-50, Fixup + mixup - group norm + mixup",
                statement="with mixup, Fixup's error is on par with group norm's, in points",
                paper=0.1,
                high=0.5,
                why="on par, the text says; the printed gap and two standard deviations",
            ),
        ),
        measure=None,
        seeds=1,
        needs_data="ImageNet",
        needs_training=True,
    ),
    __name__,
)

register(
    Claim(
        id="fixup/table3",
        where="Table 3",
        statement="Transformers translate with Fixup at least as well as with layer norm.",
        paper_value="BLEU on IWSLT de-en: Fixup 34.5, layer norm 34.2; on WMT en-de 29.3 both",
        how="Not run, as IWSLT and WMT are not at hand: recipe translation_iwslt on a prepared folder of IWSLT, once "
        "as it is and once with method=layernorm, for 200,000 updates; for WMT with dropout 0.4.",
        cost=Cost(quick_seconds=80_000, full_seconds=80_000, device="gpu"),
        checks=tuple(
            Check(
                name=f"BLEU, {data}, Fixup - layer norm",
                statement=f"BLEU on {data} with Fixup less that with layer norm",
                paper=gap,
                low=-0.3,
                why="matches or supersedes, the text says; no spread is printed, and 0.3 is what it takes for a gain",
            )
            for data, gap in (("IWSLT de-en", 0.3), ("WMT en-de", 0.0))
        ),
        measure=None,
        seeds=1,
        needs_data="IWSLT and WMT",
        needs_training=True,
    ),
    __name__,
)
