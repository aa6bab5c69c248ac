"""CUDA graphs of whole steps and of segments of steps, with any number of ubatches. Read in the order data flows:

    mode.py        what may be captured: NONE, PIECEWISE, FULL, and the modes that treat decode and the rest apart
    descriptor.py  the shape of a step: the key of a graph, and the step under way
    dispatcher.py  the shape of this step -> the captured one that it is padded to, before and after the ranks agree
    wrapper.py     a callable that captures once and replays afterwards
    breakable.py   one pass over the model becomes a list of graph segments and eager parts
    active.py      what the rest of `dbo` must know of a capture under way: three functions
    ubatches.py    a step of several ubatches as one callable that a wrapper can capture
    session.py     when captures happen: largest first, within a memory limit, then never again
    backend.py     what a device must offer; `cuda.py` is the one there is

A graph fixes addresses and sizes, not values: whatever varies from step to step (token ids, lengths, the number of
real tokens) stands in tensors at fixed addresses, is read by an eager part, or is agreed before the graph is chosen.
"""
