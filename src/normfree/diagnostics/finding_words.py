"""The table of findings: the word that is printed, its severity, its limit, the fault in a clause, and the remedy."""

from __future__ import annotations

# A finding takes three lines or more: word, severity and limit; the clause ("-": none); the remedy.
TABLE = """
input not finite | faulty | NaN or infinity
  the input holds NaN or infinity
  look at the data: the input holds NaN or infinity, so nothing behind it can be measured
input constant | faulty | all samples alike
  all samples of the input are the same (mean {mean})
  look at the data: give a batch of different samples
input changed in place | faulty | the forward pass writes into its input
  the forward pass changes its input in place
  look at the input: the forward pass overwrites the tensor that it is given (modifies it in place), so that the next
  call reads other numbers; write x = x / 255, not x /= 255 or x.div_(255)
input all negative | faulty | no number of the input is positive, and nothing behind the first activation varies
  all numbers of the input are negative (mean {mean}), so that the first activation passes nothing
  look at the data: no number of the input is positive, so that the first ReLU is dead and returns zero for every
  sample; standardize the input; subtract its mean (offset), and divide by its standard deviation
input not centred | faulty | mean above 5 deviations, and a weight layer reads it so
  the input has a mean of {mean} and a standard deviation of {deviation}
  look at the data: standardize the input; subtract its mean (offset), and divide by its standard deviation
input scale | faulty | root mean square outside 0.01 to 10, and a weight layer reads it so
  the input has a root mean square of {size}, where about 1 is usual
  look at the data: divide the input by its standard deviation{note}

weight not finite | exploding | a parameter or buffer holds NaN or infinity
  {names} {verb} NaN or infinity
  look at {place}: the weight is not finite; load or initialize it again
half precision overflow | exploding | not finite in float16, all zero, or infinite under a root or a fraction
  {place} returns {numbers}
  {remedy}
not finite | exploding | a module turns finite numbers into others; another forward pass finds it
  {text}
  look at {where}{why}

embedding too large | faulty | root mean square above 10
  the embedding {place} has a root mean square of {size}, where 0.02 to 1 is usual
  look at {place}: its vectors are too large; draw them with a standard deviation of 0.02 to 1
normalizer of one value | vanishing | a group or layer norm whose groups hold one value
  {place} normalizes groups of one value
  look at {place}: a group of one value is normalized to zero; use fewer groups or a larger input
gains around zero | faulty | the gains of all normalizers have a mean below half of their root mean square
  the gains of {names} are drawn around 0, and have a root mean square of {size} at most
  look at {names}: the gain (weight) of a normalizer starts at 1; gains around 0 shrink the signal, and reverse half of
  the channels; leave the normalizers out where weights are drawn
zero weights | vanishing | all weights of a layer outside of branches are zero, and get no gradient or let nothing pass
  all weights of {place} are zero
  look at {place}: its weights are all zero, so nothing passes through it; initialize it
statistics never move | faulty | a batch norm with a momentum of 0 whose running statistics are 0 and 1
  the running statistics of {place} never move
  look at {place}: its momentum is 0, so that its running statistics stay at 0 and 1, and it normalizes nothing in
  evaluation mode; use a momentum of 0.1
frozen weights | faulty | between layers of the same name, but for numbers, most of which learn
  {names} {verb} no gradient, while earlier layers learn
  look at {names}: the weights are frozen (requires_grad is False)
nothing learns | faulty | no parameter that requires a gradient gets one, although frozen ones would
  {text}
  look at {names}: every weight that takes part in the output is frozen (requires_grad is False), so that nothing learns
concatenated with itself | faulty | a layer reads the same output of another one twice, side by side
  {place} reads a tensor that is concatenated with itself
  look at {place}: torch.cat gives it the same tensor twice, so that half of its weights are superfluous; the tensor
  that was meant to be there, such as the skip of a U-Net, never arrives
module repeated | faulty | a list holds the same module several times
  {names} {verb} the same module, with the same weights
  look at {names}: the list holds one module several times, so that its weights are shared (tied) by mistake; make a new
  one for each place, not [block] * n
weights tied | faulty | two layers share a weight, which most layers like them do not
  {names} share the same weight
  look at {names}: they are tied to the same parameter, unlike other layers of this name; give each its own
normalizer in evaluation mode | faulty | one normalizer is, while most like it are in training mode
  {names} {verb} in evaluation mode, unlike other normalizers
  look at {names}: it uses its running statistics, not those of the batch; call train() on it, or eval() on all of them
unusual activation | faulty | one activation inside a list is of another class than all others
  {place} is {kind}, where {others} others are {usual}
  look at {place}: its activation is {kind}, unlike the {usual} of the other layers
samples mixed | faulty | one sample changes the output of another one in evaluation mode
  the output of a sample depends on the other samples of the batch
  look {spot}: one sample of the batch changes the output of another one there, as by a mean or softmax over the batch,
  or because the wrong dimension (axis) is taken for the batch by batch_first, view or transpose
place in the batch | faulty | the output of a sample depends on its place in the batch in evaluation mode
  the output of a sample depends on its place in the batch
  look {spot}: a sample returns something else at another place of the batch there; positions (an encoding, an index, a
  mask) run along the batch, the wrong dimension (axis), and not along the sequence
state between calls | faulty | two equal calls in evaluation mode return something else
  two equal calls in evaluation mode return something else
  look {spot}: the output depends on earlier calls; a state (a buffer, a cache, a list) is kept from call to call, or
  the forward pass changes weights; reset it
dropout in evaluation mode | faulty | a function drops values at random although the model is in evaluation mode
  a dropout {spot} drops values at random in evaluation mode
  look {spot}: the dropout there is also on in evaluation mode; pass training=self.training, or dropout_p=0 there
reshape of dimensions | faulty | a view or reshape gives dimensions another order, which only a permute can
  {place} reshapes {detail}, which exchanges dimensions
  look at {place}: a view or reshape from {detail} mixes up the numbers, because it keeps their order in memory;
  exchange the axes by permute or transpose, and reshape then
wrong derivative | faulty | a torch.autograd.Function disagrees with finite differences
  the derivative of {detail} at {place} is wrong: finite differences give {value} of it
  look at {place}: the backward of the custom torch.autograd.Function does not match its forward (wrong gradient); it
  has to multiply the gradient that it gets by the slope (chain rule)
gradient reversed | faulty | a function reverses the gradient, so that a step raises the loss
  {place} reverses the gradient, and a step of {detail} raises the loss
  look at {place}: the gradient has the wrong sign there (it is reversed), so that the layers before it unlearn
noise too strong | faulty | two passes of a faulty network differ five times as much as two samples, squared
  two passes of the same batch differ {size} times as much as two samples
  look {spot}: random noise or dropout there is far larger than the signal
input ignored | faulty | a quarter of the features or positions, or a whole argument, changes nothing
  the input has no influence on the output in {detail}
  look at the input and what reads it: {detail} is never used (unused), as by a wrong index, slice or dimension
samples drowned | faulty | a constant has 300 times the power of what differs between the samples, from one place on
  a constant has {share} times the power of the differences between samples at {names}
  look at {names} and what is added there: a constant that is too large (a bias, positions, an offset) drowns the
  signal, so that all samples look alike; make it smaller (start biases at 0), or the signal larger
tokens alike | faulty | the variation over positions falls to 1e-3, while the signal is sound
  from {place} on all positions (tokens, nodes) are alike: {value} of their power differs
  look at {place} and before it: every block makes the positions more alike (rank collapse); add a shortcut (residual
  sum) around each block, or average less
module shared and frozen | faulty | a frozen module stands under two names
  {names} are one module, which is frozen
  look at {names}: they are the same module with shared weights, so that freezing one froze the other; use
  copy.deepcopy
embedding too small | faulty | 1/100 of another embedding
  the embedding {place} has a root mean square of {size}, and {other} one of {large}
  look at {place}: its vectors are {ratio} times smaller than those of {other}, so that they are drowned and all samples
  look alike; draw both with the same standard deviation
recurrence too {large} | exploding | the largest eigenvalue of the recurrent weight, over all steps
  the recurrent weight of {place} multiplies the state by {radius} per step, for {steps} steps
  look at {place}: its recurrent weight is too {large}, so that the state {does} with time; draw it orthogonal
equal filters | faulty | half of the filters of a layer are equal
  {percent} of the filters of {names} are equal to another one
  look at {names}: equal filters get equal gradients and stay equal; draw the weights at random
copies of one module | faulty | weights of a list are equal, and so are their gradients
  {names} have the same weights and get the same gradients
  look at {names}: they are copies with identical weights and gradients, so that they stay equal and do the work of
  one; draw each at random, not by copy.deepcopy
dead units | faulty | 80 % of the units without a gradient, more than chance explains
  {percent} of the units of {place} get no gradient
  look at {names}: the ReLU behind is never positive for most units; look at the biases and the scale of the input
tiny scale | vanishing | a vector of scales below 1e-7, but not zero
  {names} {verb} below 1e-7, but not zero
  look at {names}: layer scales below the rounding of float32 leave their branches a gradient that is too small; start
  at 1e-6 or more, or at exactly 0
weights not registered | faulty | layers in a plain list, or made in the forward pass, or a plain tensor as a weight
  the weights in {names} are not parameters of the model
  look at {names}: plain tensors, and layers in a plain list or dictionary or made in the forward pass (new and random
  at each call), are not found by parameters(), so that they never learn and are not saved; make them in __init__, as
  nn.Parameter, nn.ModuleList or nn.ModuleDict
unused module | faulty | no part in the output although modules like it have one; the last of a list may run in vain
  {names} {verb} never used
  look at {names}: the forward pass does not call it, or ignores its output, so that it never learns

no activation | faulty | no function of the graph is nonlinear, as behind a leaky ReLU with a slope of 1
  no activation stands between the layers, so that the network is linear
  put an activation between the layers, from {first} on: without any the network is linear{also}
forgotten activation | faulty | a layer of one branch reads none, the same layer of most similar branches does
  {names} reads no activation, unlike the same layer of {others} other blocks
  look at {names}: put the activation before it, as in the other blocks; without it, two layers in a row are one linear
  map
epsilon too large | vanishing | above 1,000 times the variance, and above 1e-3 or no normalizer follows
  the variance at {place} is {variance}, and its epsilon {eps}
  look at {names}: the epsilon (eps) is far above the variance, so that the normalizer makes the signal small instead of
  normal; use an eps of 1e-5, or larger weights before it
dropout too strong | faulty | a probability of 0.9 or more: the noise is nine times the signal
  {place} drops {percent} of the signal
  look at {place}: its probability is {p}; p is the part that is dropped, not kept
{function} gate shut | vanishing | the sigmoid of the biases of an LSTM or GRU is below 0.01
  the {function} gate of {place} is {value} by its bias
  look at the biases of {place}: they shut its {function} gate, so that early time steps have no gradient; start them at
  0 or above
{function} twice | faulty | a sigmoid reads a sigmoid, or a softmax a softmax
  a {function} reads the output of another {function} behind {place}
  look behind {place}: one {function} follows another; leave one out
softmax of one value | faulty | the axis has size 1
  a softmax over one value follows {place}, which is 1 for every input
  look behind {place}: the softmax runs over an axis of size 1, so that its weights are all one and {place} gets no
  gradient; choose the axis of the positions or classes
softmax over the batch | faulty | the axis holds the samples
  a softmax behind {place} runs over the samples of the batch
  look behind {place}: the softmax is normalized over dimension 0, the samples; use the last dimension
softmax over the wrong axis | faulty | attention weights do not add up to 1 over the positions that they weigh
  the attention weights behind {place} do not add up to 1 over the positions that they weigh
  look behind {place}: the softmax of the attention runs over the wrong dimension; use the one of the keys, the last
mask of the wrong side | faulty | every position attends to later positions only
  behind {place} every position attends to later positions only
  look behind {place}: the causal mask of the attention is inverted; hide the later positions, not the earlier ones
mask of the diagonal | faulty | every position attends to itself only
  behind {place} every position attends to itself only
  look behind {place}: the mask of the attention hides every other position and leaves the diagonal, so that no
  position sees another one; hide only the later positions, or the padding
padding attended to | faulty | attention weights of all words are zero, and those of padding are not
  behind {place} only the padding is attended to
  look behind {place}: the padding mask of the attention is inverted; hide the positions of padding, not the words
choice by ties | faulty | a max or topk of the outputs of a layer of zeros
  the scores of {place} are all zero, and a choice is made among them
  look at {place}: its weights are zero, so that every sample makes the same choice (one expert); draw them at random
attention masked out | faulty | attention weights are all exactly equal, and no weight is zero
  the attention weights behind {place} are all equal
  look behind {place}: the mask of the attention hides every position, or its logits are constant, so that it is a plain
  mean and its queries and keys do not learn
saturated {function} | faulty | the derivative squared is below 1/10 of the largest possible; a gate below 0.01
  the {function} behind {names} passes {value} of the squared gradient that it could pass
  look at {names}: the {function} behind is saturated, because its input is too large; make the weights, biases or the
  scale there smaller

forgotten skip | faulty | a block returns the shape it gets without a sum, while most blocks like it add a branch
  {text}
  look at {names}: the forward pass has no sum x + f(x){also}
detached branch | dead branch | a branch with a signal, but without a gradient
  -
  look at the branch of {place}: it returns a signal, but detach() or no_grad cuts its gradient off
dead branch | dead branch | no weight of a branch gets a gradient
  -
  look at the branch of {place}: {constant}two zero layers with an activation between them never learn ('fixup' zeroes
  only the last); neither do layers around a ReLU that is never positive
constant branch | faulty | a branch adds the same to every sample
  the branch of {names} returns a constant
  look at the branch of {place}: its output does not depend on its input; it reads another tensor, or an activation in
  it is saturated or never positive
shut branch | dead branch | its output is below 1e-10 of its shortcut
  the branch of {names} is below 1e-10 of its shortcut
  look at the branch of {place}: it is dead, because its gate is shut, or a scale is next to zero; look at biases and
  scales
deep post-norm ({sums} sums) | vanishing | a normalizer after every sum leaves less than 1e-9 of the first block's \
signal on the shortcut, or 1e-2 after 72 sums
  a normalizer follows every sum, so that 1e{left} of the first block's signal is left on the shortcut after {sums} sums
  move the normalizer into the branch, x + f(norm(x)) (pre-norm), or use 'fixup'

dropout of everything | vanishing | the module returns zeros for all inputs
  {place} returns zero
  look at {place} ({kind}): it returns zeros for all inputs; {why}, or its scale is zero
no signal | vanishing | nothing from there on depends on the input
  -
  look at {where}: it returns zero or a constant for every input, such as a ReLU that is never positive, a weight of
  zeros, or an index or crop outside of the data
dead layer | vanishing | nothing behind a layer depends on the input
  {behind} does not depend on the input
  look at {place}: the ReLU behind it is never positive, so that nothing passes; look at its bias and weights
gradient cut | vanishing | the gradient is exactly zero from there on
  {text}
  look {spot}: detach() or no_grad cuts the gradient off there{also}
loss without a gradient | vanishing | no weight is behind the loss in the autograd graph
  the loss has no gradient, so that nothing learns
  look at the loss between the output and its value: detach(), no_grad, item(), argmax, rounding or a threshold cuts the
  gradient off
loss of one class | vanishing | a softmax over one class in the loss, whose gradient is zero
  the loss takes a softmax over a single class, which is 1 for every output
  look at the loss: a cross-entropy of one output (a single class) is constant, so that nothing learns; use
  binary_cross_entropy_with_logits, or two outputs
zero scale | vanishing | the gain of a normalizer is zero, and nothing passes it
  the gain of {names} is zero
  look at {names}: its scale (weight) is zero, so that it returns zero and no gradient passes; start it at 1
half precision underflow | vanishing | the gradient is exactly zero from there on in float16
  -
  the gradient is exactly 0 from {place} on in half precision (float16): scale the loss, or use bfloat16
gradient not finite | exploding | a function gets a finite gradient and returns another
  -
  look {spot}: {function} has no finite derivative there, as sqrt at 0; add a small number inside it
stem scale | exploding | the second moment grows 1,000-fold, or falls to 1e-6
  the stem multiplies the input by {size}
  look at {names}: the weights of the stem are too {large}
{block} too {large} | exploding | tenfold different from similar ones; a smaller difference is an outlier: "growing, \
except blocks.6"
  {text}
  {remedy}
{change} | exploding | see the words above
  -
  {remedy}

{function} before the loss | faulty | the loss takes logits, and the output is none
  {text}
  look at the {function} {behind}: the loss takes logits, so leave it out
logits without a softmax | faulty | the loss takes log-probabilities, and the output is none
  the loss takes log-probabilities, but the output has not been through log_softmax
  look at the loss: use cross_entropy, or end the network with log_softmax
{function} on the output | faulty | 10 % of the targets are outside its range
  {percent} of the targets are outside the range of {function}
  look at the {function} {behind}: the output cannot reach the targets; leave the activation out
shapes of output and targets | faulty | (N, 1) meets (N,)
  output and targets differ in shape, so that the loss compares every sample with every other one
  look at the loss: give the output and the targets the same shape, by squeeze or unsqueeze
targets ignored | faulty | the loss is the same for other targets
  the loss is the same for other targets
  look at the loss: it does not depend on the targets, so that there is nothing to learn
loss of the wrong sign | faulty | the loss of right answers is above that of wrong ones
  the loss of the right answers is higher than that of wrong ones
  look at the loss: it has the wrong sign, so that training prefers the wrong answers; negate it
draw without a gradient | faulty | an output depends on weights through a random draw alone, which has no gradient
  {place} reads a random draw that has no gradient to {detail}
  look before {place}: sample() has no gradient, so that this output teaches nothing to {detail}; use rsample(), or the
  reparametrization mean + deviation * noise
loss without a lower bound | faulty | it falls as the square of an output that grows, or faster
  the loss falls without bound as {detail} grows
  look at the loss: a term that depends on {detail} has the wrong sign, so that training makes it ever larger (negate
  that term), or it takes raw outputs (logits) as probabilities between 0 and 1 (put a sigmoid before it)
sum beside a mean | faulty | with every sample twice, one part of the loss stays and another doubles
  one term of the loss is a sum over the batch, and another one a mean
  look at the loss: one term adds up the samples of the batch beside a mean, so that it outweighs the other terms the
  more, the larger the batch; average all terms (mean) or sum all of them
term without a gradient | faulty | the loss depends on an output without a gradient, which changes no other gradient
  a term of the loss depends on {detail}, which has no gradient
  look at the output: {detail} was cut off by detach(), no_grad, or a derivative without create_graph=True, so that its
  term of the loss never learns
later positions seen | faulty | the targets are the next elements of the input, which the output depends on
  the output at a position depends on later positions, which the targets ask for
  look at {place}: the output leaks the answer (the future), since no causal mask or shift hides the later positions
targets not shifted | faulty | a causal model whose targets equal its input
  the targets equal the input, and the output at a position sees no later position
  look at the data: shift the targets by one position, so that the model predicts the next token and does not copy its
  input
samples left out | faulty | half of the samples have no gradient at the output, although they have a label
  {value} of the samples get no gradient from the loss
  look at the loss: most samples have no part in it, by a class weight of zero, an ignored label (ignore_index)
  or a mask
targets no probabilities | faulty | a binary cross-entropy, also inside of a loss, of targets outside 0 to 1
  the targets reach from {low} to {high}, where a binary cross-entropy takes 0 to 1
  look at the targets: a binary cross-entropy takes labels of 0 and 1, or probabilities, not {low} to {high}
items overwritten | faulty | an assignment by index has indices that repeat
  items of {place} are assigned by indices of which {percent} repeat, so that only the last item of each stays
  look behind {place}: items of one index overwrite each other (b[i] = x), and only the last one counts; use index_add
targets constant | faulty | all targets are the same, and the classes have weights of their own
  all targets are the same ({mean})
  look at the data: all targets (labels) of the batch are the same, so that there is nothing to learn
targets scale | faulty | root mean square above 30, and 30 times the output's, and the loss asks for it
  the targets have a root mean square of {size}, where about 1 is usual
  look at the data: the targets are far larger than an output at the start; divide them by their standard deviation
loss is a sum | faulty | the loss of equal logits is log C times the number of samples
  the loss adds up {count} samples instead of averaging them
  look at the loss: it is a sum over the samples, so that its gradient grows with the batch; use reduction="mean"
softmax before the loss | faulty | the output adds up to 1 although cross-entropy follows
  the output is not negative and adds up to 1
  look at the end of the network: cross-entropy takes logits, so leave the softmax out
classifier bias | faulty | the first loss is high, and a bias is 5 above the mean
  {text}
  look at the bias of {names}: {bias} above the mean makes class {favourite} certain
prior of the wrong sign | faulty | a binary loss 4 times that of zeros, with a large bias
  {text}
  look at the bias of {names}: it makes the wrong answer certain, so that the first loss is high; start it at the log
  odds of the classes
classifier scale | faulty | the first loss is high, and the output 10 times as large as the last block's
  {text}
  look at the layers between the last block and the output: the logits are too large, by the weights of {names} or a
  scale behind it{why}
first loss | faulty | cross-entropy above 4 log C + 5 (with random labels if there are no targets)
  {text}
  look at the layers between the last block and the output: the logits are too large, by the weights of {names} or a
  scale behind it{why}
scores without a scale | faulty | products of vectors of fixed lengths, whose softmax cannot reach a probability of 1/2
  the scores are cosines or other products of bounded vectors: no class can get more than {percent}
  look at {place}: its scores are bounded (cosines between -1 and 1), so that the softmax can never be confident;
  multiply them by a scale (10 to 30), or divide them by a temperature
constant output | faulty | the same for every sample
  the output is the same for every sample
  look {spot}: the output does not depend on the input{also}
"""
