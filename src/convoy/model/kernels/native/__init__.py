"""C code for decode steps, compiled into the user's cache, with the bits of torch's operators.

One module compiles the source once, one calls the functions on torch's tensors and threads, and the others
are attention, linears and norms for few rows. Each is used only after a comparison with torch, bit by bit.
Open the compiled library's module first.
"""
