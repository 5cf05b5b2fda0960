"""The project's scripts; each has a `main`. A regular package, so that no other `tools` is found before it."""
