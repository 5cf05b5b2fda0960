"""One file an architecture: its config.json and its tensors, as tables (floor 0)"""
