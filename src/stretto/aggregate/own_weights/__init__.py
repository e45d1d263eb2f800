"""Every worker steps a copy of the model of its own; copies are brought together now and then, or partly, or in pairs.

flat_weights     the parameters as one vector, to read, to write and to move
training         `OwnWeights`, the base of these ways to train: steps, buffers, the mean, what is saved
admission        models, optimizers and steps that all of these ways refuse
buffers          replaces the buffers of all workers by their mean
bringing_together  keeps a worker's own values while the mean is in the model
"""
