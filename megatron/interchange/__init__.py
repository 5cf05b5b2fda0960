"""Other people's checkpoints: which of their tensors and settings are which of ours, as tables"""
