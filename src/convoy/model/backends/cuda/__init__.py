"""A stage on CUDA devices: bfloat16 layers, captured decodes and paged K/V pools.

`CudaStage` runs the steps. `DeviceDecoder` runs a Llama-like model with our `kernels`, and the library's
layers run all others over our pools, with the parts of single families in `layers`. Captured graphs run
decodes, one for each bucket of batch sizes. `memory` holds weights, pools and pinned buffers. Open the module
of `CudaStage` first.
"""
