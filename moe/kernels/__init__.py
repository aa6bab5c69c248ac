"""Triton kernels: the expert path, the router's top k, norms, rotary embedding and paged decode. Imported only where
they run.
"""
