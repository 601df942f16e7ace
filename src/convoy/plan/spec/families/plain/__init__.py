"""Hold the families that are an embedding, layers and a norm: a row is all that they need.

A module holds the row of one family, or of one vendor's closely related families. Their weights are counted
from the headers of the checkpoint. A new family of this kind is one more file here, which the registry finds
by listing the package. Open `arcee` first.
"""
