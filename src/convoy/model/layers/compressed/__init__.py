"""DeepSeek V4's compressed attention, over a window of keys and over entries of several tokens.

`attention` computes a layer, `batch` tells which entries a step closes and which of them a query may see,
and `pools` holds keys, entries and pending numbers. Open `attention` first.
"""
