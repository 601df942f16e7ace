"""Linears in exact float32, packed weights and their pages; `native` holds compiled code, and `stored`
linears over the bytes of a file.

A packed linear gives each row the same bits whatever stands beside it. Packing brings a matrix into the
layout of oneDNN, and pages put it under few large page-table entries. `registry` tells what this machine
holds and checks, `activation` has the activations, and a small module returns freed memory. Open `linear`
first.
"""
