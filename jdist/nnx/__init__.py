"""Steps over flax nnx's mutable objects: `(model, optimizer, metrics, batch)` changed in place, on all replicas.

Start at `step.distribute`, which stands where `@nnx.jit` stood; `replica` has what runs on each replica: the step as a pure
function of its objects' variables, and the gradients that it takes.

May import: step and what is below it.
"""

from jdist.nnx.replica import grad as grad
from jdist.nnx.replica import value_and_grad as value_and_grad
from jdist.nnx.step import NNXStep as NNXStep
from jdist.nnx.step import distribute as distribute
