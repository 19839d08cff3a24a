"""Folding: batch norms and scalars become part of the weights next to them.

batchnorm.py           `fold_batchnorm`: each batch norm goes into a neighbouring layer
inference_folding.py   `fold_`: the scalars of a whole network vanish by a change of units
scale_solver.py        solves for the units of every signal
module_flow.py         for both: the recorded flow with the modules that it calls, and the arrays of a layer in float64
"""
