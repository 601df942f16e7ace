"""Device memory of a stage: weights, K/V pools, pinned staging buffers and pending results."""
