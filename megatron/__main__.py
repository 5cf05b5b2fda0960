"""`python -m megatron COMMAND ...` is `megatron-zero COMMAND ...`, also below torchrun -m."""

from megatron.command import main

if __name__ == "__main__":
    main()
