"""C code for the linears, norms, attention and whole layers of a step, with the bits of the written order.

`build` compiles the sources once for each instruction set, or finds the wheel's file. `library` declares the
functions, and `choice` takes the first instruction set that has the right bits. `attention`, `activation`,
`linears` and `norm` call the functions on torch's tensors and threads. Each is compared bit by bit before
use. Open `library` first.
"""
