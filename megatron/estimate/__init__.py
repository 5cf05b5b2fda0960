"""What a model takes, seen by running it on tensors without memory."""
