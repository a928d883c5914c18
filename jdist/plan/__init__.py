"""What a config's step needs on hardware that need not be here: memory, collectives and a model of its time.

target       "v5p:8x8x8", "cpu:8", "gpu" -> devices, and the config's strategy on them
step         the step that `jdist run` would compile, and the shapes it is called with
compile      that step compiled: memory, bytes accessed, text
hlo          the text of a compiled program -> instructions, and how often each runs
collectives  what the devices exchange: kind, count, bytes, mesh axis
host         what a device and its host copy to each other
flops        matmuls and convolutions of a step
hardware     public figures of each chip, from chips.yaml
roofline     a model of the step's time from all of these
check        the prediction beside what a run allocates, where the devices are here
plan         all of it in order; table prints it
"""
