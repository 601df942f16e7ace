"""All-reduces between two ranks, and the comparison of tensor parallelism with a pipeline."""
