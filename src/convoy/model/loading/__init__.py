"""Build the layers that a stage owns as the library's modules, and load their weights.

The model's own class is built from an untrusted config.json, everything the stage does not own is left
out, and only its tensors are read. `LoadedModules` is the result. Two further parts keep the output's
matrix as it is stored, and wrap modules of a rank's slices. Open the module `load` first.
"""
