"""The sixth set of broken networks, with what a right answer has to say about each.

The faults are those that people bring to forums, and none of them is one of the fifth set.
The test of the same name trains each beside its healthy twin.
"""

import broken_networks_sixth_images as pictures
import broken_networks_sixth_tables as tables
import broken_networks_sixth_tokens as tokens
from fifth_parts import Broken, scored

LARGE = ["large", "explod", "grow", "blow", "scale", "std", "variance"]
CUT = ["no grad", "without grad", "zero grad", "gradient is zero", "not reach", "detach", "cut", "disconnect",
       "blocked"]  # fmt: skip

BROKEN: list[Broken] = [
    Broken(
        "multilabel_sigmoid_twice",
        pictures.multilabel_sigmoid_twice,
        {"head", "output", "loss"},
        ["sigmoid", "probabilit"],
        "The model ends in a sigmoid, and BCEWithLogitsLoss applies a second one.",
    ),
    Broken(
        "resnet_adds_branch_twice",
        pictures.resnet_adds_branch_twice,
        {"blocks"},
        ["skip", "residual", "shortcut", "vanish", "explod", "depth", "deep"],
        "The blocks add their branch to itself and not their input: 40 convolutions in a row without a skip.",
    ),
    Broken(
        "unet_concatenates_itself",
        pictures.unet_concatenates_itself,
        {"up1", "up2", "reduce1", "reduce2", "down1"},
        ["skip", "concat", "twice", "duplicate", "same input", "identical", "copies"],
        "The decoder concatenates its own features with themselves; the encoder's features never reach it.",
    ),
    Broken(
        "vit_scores_times_sqrt",
        pictures.vit_scores_times_sqrt,
        {"blocks"},
        ["softmax", "saturat", "one-hot", "temperature", "sqrt"],
        "The attention scores are multiplied by the square root of the width: the softmax is saturated.",
    ),
    Broken(
        "autoencoder_sigmoid_output",
        pictures.autoencoder_sigmoid_output,
        {"decoder", "output", "targets"},
        ["sigmoid", "range", "bound", "negative", "reach"],
        "A sigmoid bounds the output to (0, 1), but the targets are standardized pictures.",
    ),
    Broken(
        "dcgan_norm_weights_around_zero",
        pictures.dcgan_norm_weights_around_zero,
        {"main"},
        ["small", "vanish", "shrink", "decay", "gain", "scale", "weight of the norm", "fade"],
        "The batch norms' weights are drawn around 0 and not around 1: each norm shrinks the signal fiftyfold.",
    ),
    Broken(
        "audio_instance_norm_before_pool",
        pictures.audio_instance_norm_before_pool,
        {"norm", "fc"},
        ["constant", "same for all", "same for every", "instance", "mean of zero", "does not depend"],
        "Instance norm sets each channel's mean over time to zero, then the pooling takes this mean: all inputs alike.",
    ),
    Broken(
        "cnn_divided_by_255_twice",
        pictures.cnn_divided_by_255_twice,
        {"inputs"},
        ["constant", "small", "standardiz", "normaliz", "offset", "spread", "scale", "alike"],
        "The pixels were divided by 255 twice: the inputs are nearly constant at -2.",
    ),
    Broken(
        "mobilenet_nll_of_logits",
        pictures.mobilenet_nll_of_logits,
        {"classifier", "output", "loss"},
        ["log_softmax", "log-softmax", "logsoftmax", "log-probabilit", "nll", "negative", "unbounded"],
        "NLLLoss gets raw scores: a log-softmax is missing, and the loss has no lower bound.",
    ),
    Broken(
        "gpt_without_causal_mask",
        tokens.gpt_without_causal_mask,
        {"h", "output", "targets", "inputs"},
        ["causal", "future", "mask", "leak", "later", "next token"],
        "Attention has no causal mask: each position sees the token that it is to predict.",
    ),
    Broken(
        "seq2seq_targets_not_shifted",
        tokens.seq2seq_targets_not_shifted,
        {"decoder", "target", "inputs", "targets", "output"},
        ["shift", "leak", "copy", "copies", "contain", "same as", "equal", "identical"],
        "The decoder's input is the target itself, not shifted by one: it copies.",
    ),
    Broken(
        "lstm_state_detached_each_step",
        tokens.lstm_state_detached_each_step,
        {"cell", "inputs"},
        [*CUT, "earlier steps", "time step", "last step"],
        "The state is detached at each step: the gradient reaches the last time step alone.",
    ),
    Broken(
        "bigru_states_by_view",
        tokens.bigru_states_by_view,
        {"gru", "fc", "output"},
        ["mix", "other sample", "across", "view", "reshape", "transpos"],
        "The final states are viewed in a wrong order of axes: each row holds states of other samples.",
    ),
    Broken(
        "textcnn_dropout_as_keep",
        tokens.textcnn_dropout_as_keep,
        {"dropout1", "dropout2"},
        ["dropout", "drops", "p=0.98"],
        "Dropout drops 98 % of the features.",
    ),
    Broken(
        "tagger_ignores_a_tag",
        tokens.tagger_ignores_a_tag,
        {"targets", "loss", "output", "tags"},
        ["ignore"],
        "ignore_index is the most frequent tag, so that this tag is never learned.",
    ),
    Broken(
        "transformer_positions_by_sample",
        tokens.transformer_positions_by_sample,
        {"positions", "encoder", "inputs", "output"},
        ["position", "order of", "across"],
        "The positional encoding is added along the batch: the tokens of a sentence have no order.",
    ),
    Broken(
        "bag_attention_softmax_of_one",
        tokens.bag_attention_softmax_of_one,
        {"score"},
        [*CUT, "softmax", "dim", "axis", "length one", "single"],
        "The softmax of the attention runs over an axis of length one, so that the scores get no gradient.",
    ),
    Broken(
        "mlp_without_activations",
        tables.mlp_without_activations,
        {"layers"},
        ["linear map", "activation", "nonlinear", "non-linear"],
        "No activations stand between the linear layers.",
    ),
    Broken(
        "vae_kl_summed_over_batch",
        tables.vae_kl_summed_over_batch,
        {"mu", "logvar", "loss", "encoder"},
        ["kl", "dominat", "collapse", "reduction", "outweigh"],
        "The KL term is summed over the batch and outweighs the mean reconstruction error.",
    ),
    Broken(
        "graph_sum_of_neighbours",
        tables.graph_sum_of_neighbours,
        {"convs", "classify"},
        LARGE,
        "The adjacency matrix is not normalized: the features grow by the number of neighbours at each layer.",
    ),
    Broken(
        "mixer_without_transpose",
        tables.mixer_without_transpose,
        {"blocks"},
        ["transpos", "token", "position", "mix", "dim", "axis"],
        "The token mixing works on the channels: no token sees another one.",
    ),
    Broken(
        "binary_cross_entropy_of_one_logit",
        tables.binary_cross_entropy_of_one_logit,
        {"logit", "output", "loss"},
        ["one class", "single", "one output", "one logit", "one score", "bce", "binary"],
        "Cross-entropy over a single output is constant: its gradient is zero.",
    ),
    Broken(
        "siamese_root_of_zero",
        tables.siamese_root_of_zero,
        {"embed", "output"},
        ["nan", "finite", "infinit"],
        "The square root at distance zero has an infinite gradient: the gradients are NaN.",
    ),
    Broken(
        "siren_default_weights",
        tables.siren_default_weights,
        {"layers"},
        [*LARGE, "init", "sine", "frequen", "chao"],
        "The sine layers have default weights, about fifteen times too large for the frequency of 30.",
    ),
]

SIXTH = [scored(case) for case in BROKEN]
