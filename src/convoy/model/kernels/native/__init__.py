"""C code for decode steps, compiled into the user's cache, with the bits of torch's operators."""
