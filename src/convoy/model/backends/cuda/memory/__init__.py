"""Device memory of a stage: weights, K/V pools, pinned staging buffers and pending results.

Weights are joined into few matrices for each layer, pools keep K/V by block, and staging buffers bring a
step's inputs to the device. A pending result is on its way to the host. Synthetic weights are generated on
the device itself. Open the pools first.
"""
