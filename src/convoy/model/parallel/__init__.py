"""Split layers over the ranks of a stage: experts, vocabulary and partial sums."""
