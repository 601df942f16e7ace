"""Check that the output matrix of a checkpoint with tied embeddings, where stored, equals the embedding.

config.json says that one matrix serves as both. A file may hold a second one all the same, and it is not read
while the flag is set. If that matrix had other values, every logit would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor, map_tensor
from convoy.model.checkpoints.names import decoder_name
from convoy.model.checkpoints.source import ModelSource

_EMBEDDING, _OUTPUT = "model.embed_tokens.", "lm_head."


def check_tied(source: ModelSource) -> None:
    """Compare the bytes of output and embedding in their files, before a stage loads the output.

    Raises ModelError naming file, tensor and key if they differ, and for a file that cannot be read.
    """
    _check(source, _same_bytes)


def check_tied_digests(source: ModelSource, digests: Mapping[str, str]) -> None:
    """Compare output and embedding by the ``digests`` of all tensors, without needing the bytes of either.

    Raises ModelError as `check_tied` does.
    """
    _check(source, lambda one, other: digests[one.name] == digests[other.name])


def _check(source: ModelSource, is_same: Callable[[StoredTensor, StoredTensor], bool]) -> None:
    if not source.spec.tied_embeddings or source.seed is not None:
        return
    stored = {decoder_name(tensor.name): tensor for tensor in source.tensors.values()}
    for name, output in stored.items():
        # compare part by part, as quantised matrices have several; a part that the embedding lacks belongs
        # to another format of the output, and is not compared
        embedding = stored.get(_EMBEDDING + name.removeprefix(_OUTPUT)) if name.startswith(_OUTPUT) else None
        if embedding is None:
            continue
        if (output.dtype, output.shape) != (embedding.dtype, embedding.shape):
            differs = f"is {output.dtype} of shape {list(output.shape)}, not as {embedding.name}"
        elif not is_same(output, embedding):
            differs = f"has other values than {embedding.name}"
        else:
            continue
        raise ModelError(
            f"{output.path}: {output.name} {differs}, and config.json says tie_word_embeddings = true, "
            "by which they are one",
            hint="set tie_word_embeddings to false in config.json if the model has an output of its own; "
            f"else save it without {output.name}",
        )


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    # a tensor from a peer lies under its digest: equal ones share a file, and only the embedding was sent
    if (one.path, one.offset) == (other.path, other.offset):
        return True
    import torch

    views = [map_tensor(tensor).flatten().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*views)
