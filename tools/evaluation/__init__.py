"""What tools/evaluate.py is made of."""
