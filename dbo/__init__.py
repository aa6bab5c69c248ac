"""Overlap only: agreement, splitting, ubatch threads, SM partition. Knows tensors, streams and ranks; nothing of models."""
