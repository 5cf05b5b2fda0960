"""What `tools/generate.py` reads and writes."""
