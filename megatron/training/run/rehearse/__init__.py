"""Steps of a launch line on tensors without memory, held against what was planned."""
