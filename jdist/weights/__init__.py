"""Weights as others keep them: safetensors files in and out, straight from and into a strategy's layout.

Start at `load.load`. `rules` say which tensor is which leaf; `axes` is the arithmetic of transposed, split and merged axes;
`files` reads boxes out of files; `huggingface` has the rules of models that many people have.

May import: checkpoint, core and what is below them. safetensors is imported when a file is read.
"""

from jdist.weights.huggingface import gpt2 as gpt2
from jdist.weights.huggingface import resnet as resnet
from jdist.weights.huggingface import vit as vit
from jdist.weights.load import load as load
from jdist.weights.save import save as save
