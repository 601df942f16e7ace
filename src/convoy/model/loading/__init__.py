"""Build the layers that a stage owns as the library's modules, and load their weights."""
