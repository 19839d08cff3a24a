"""The limits of the verdict, each with its reason. `docs/diagnosis.md` shows an example on either side of each.

Unless stated otherwise a limit is a ratio of variances or of second moments, not of standard deviations.
"""

from __future__ import annotations

# The change over depth.
LARGE = 1e3  # a change that fails with any factor; residual networks with 1e4 did not train, with 4 they did
# A normalizer makes the scale of a weight irrelevant, so that a large gradient makes the weight grow and then learn
# more slowly. GoogLeNet and RepVGG have 1.6e3 and 4e3. MLPs with batch norm trained with 5e3 (24 layers), and hardly
# with 5e5 (36 layers).
LARGE_NORMALIZED = 1e5  # a growth of the gradient that fails in spite of normalizers
FAST = 1.5  # a factor per block that matters after a few blocks; He without normalization has 2
# Batch norm with ReLU multiplies the squared gradient by π / (π - 1) = 1.47 per layer (mean-field theory), a sum with a
# shortcut by a factor that approaches 1 with depth. The limit is halfway on the log scale.
NORMALIZED_RATE = 1.21
NOTICEABLE = 10.0  # a change below which even a fast one does not matter
# An exponential change is drifting from the square root of LARGE on: at twice the depth it fails.
GROWN = 4.0  # the least change inside stages that is called growing
OFFSETS = range(7)  # the variance at the beginning of a stage, in units of the variance that a block adds
BETTER = 0.6  # largest error of a power law relative to an exponential: 0.02 to 0.5 with batch norm, above 0.7 with He
# Without residual sums all layers are scaled alike, so that training recovers from more. MLPs whose second moment falls
# to 1.3e-4 from the first hidden layer to the last (torch's default, 7 layers) trained with SGD, with 6e-5 (Xavier,
# 16 layers) they stopped halfway, and with 4e-6 (torch's default, 9 layers) they stayed at chance.
PLAIN_SMALL = 1e-4
FORGETS = 0.5  # the least factor per time step of a recurrent layer; tanh with orthogonal weights has 0.7
# The part of the first block's signal that is left on the shortcut if a normalizer follows every sum: 1e-1 with 6
# encoder layers, 1e-3 with 12 and 1e-6.5 with 24, which need a warm-up; 1e-14 with 48, which hardly train.
POST_NORM_LEFT = 1e-9
POST_NORM_SUMS = 72  # from 36 layers on, narrow ones with 1e-3 hardly train either
POST_NORM_DEEP = 1e-2  # the part that is too small with so many sums
POST_NORM_SAME = 0.02  # relative difference of second moments after a normalizer, which are 1 at the start

# Single blocks. At initialization, no network of this library whose signal is preserved, or grows as with batch norm,
# has an outlier by these limits. Inside stages no block differs by six spreads and a factor of 1.35 in both directions;
# the first block of a stage differs by up to 4, and in one direction alone by up to 11 (batch norm over four vectors).
SPREADS = 6.0  # threshold in robust standard deviations from similar blocks
INSIDE = 1.35  # least ratio, forward and backward in the same sense, inside a stage
OPENING = 10.0  # the same for the first two blocks of a stage, whose input differs from that of similar blocks
ALONE = 20.0  # least ratio in one direction alone, inside a stage
SIMILAR = 4  # number of the nearest similar blocks that a block is compared with
NOISE = 0.02  # added to the spread of log factors, so that tiny differences do not count
MOST = 0.75  # fraction of branches with the same variance, such as all that end in a normalizer or start at zero
SAME = 0.05  # relative difference of variances that count as the same; a normalizer's epsilon changes small ones
SHUT = 1e-20  # second moment of a branch over that of its shortcut; layer scales of 1e-6 leave 1e-17
TINY_SCALE = 1e-7  # root mean square of a vector of scales: below the rounding of float32; CaiT starts with 1e-6
CONSTANT_BRANCH = 1e-10  # variance relative to the squared mean; rounding of float32 leaves about 1e-14

# The input, as plain numbers. Normalized images have a root mean square of 1, images in [0, 1] of 0.3 to 0.7.
INPUT_LARGE = 10.0  # root mean square; bytes have 150
INPUT_SMALL = 0.01  # root mean square; images that were divided by 255 twice have 0.002
INPUT_OFFSET = 5.0  # mean over standard deviation; images in [0, 1] have 0.4 to 2.5

# The stem, the output and the loss.
STEM_LARGE = 1e3  # second moment after the stem over that of the input; sound stems have 0.05 to 5
STEM_SMALL = 1e-6  # the same; embeddings and patches drawn with a deviation of 0.02 have 1e-4
OUTPUT_LARGE = 1e6  # second moment of the output over that of the last block
CLASSIFIER_GAIN = 100.0  # the same, above which a high first loss is the classifier's; sound ones have 0.01 to 3
FIRST_LOSS = 4.0  # times log C plus 5; MNASNet starts at 12 with 10 classes
DRIFTED_LOSS = 2.0  # times log C plus 2: a drift of the forward signal shows at the output
LARGE_BIAS = 5.0  # of one class above the mean of all biases; torch draws them below 1
CONSTANT_OUTPUT = 1e-12  # variance over the batch relative to the second moment: no more than rounding

# Functions, as plain numbers.
SATURATED = (
    1 / NOTICEABLE
)  # of the squared gradient that a function could pass; tanh of N(0, 5.3²), sigmoid of N(0, 11²)
# A sigmoid with a mean outside of this range is a gate, which may be nearly shut or open on purpose.
GATE = (0.1, 0.9)
SHUT_GATE = 0.01  # the mean of a sigmoid that leaves 1e-4 of the squared signal, as much as vanishing does
SWAMPED = 1 / LARGE  # variance over epsilon, about the variance that a normalizer then returns
HEAVY_BIAS = 36.0  # squared bias over the rest: at 6 deviations, a unit switches with one input in 1e9
HEAVY_SIZE = 5.0  # root mean square of such a bias: gates have 1 to 3 on purpose, and 5 shuts or opens any sigmoid
LAYER_GAIN = NOTICEABLE**2  # second moment of an output over that of the input; He's initialization has 2
UNREACHABLE = 0.1  # of the targets outside the range of the output

# Units of a layer.
DEAD_SHARE = 0.8  # of units without a gradient; on samples that are nearly alike, half of all ReLUs are off
DEAD_BY_CHANCE = 1e-4  # the probability that so many units are off by chance, each with probability 1/2
EQUAL_SHARE = 0.5  # of the filters of a layer that equal another one
