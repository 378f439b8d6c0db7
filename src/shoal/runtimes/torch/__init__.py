"""The PyTorch family: padded blocks or packed sequences, on the CPU or a CUDA device."""
