"""Functional cases: runs of the trainer whose figures are compared with golden values."""
