"""Compare stages over several CUDA devices, and linears of rounded weights."""
