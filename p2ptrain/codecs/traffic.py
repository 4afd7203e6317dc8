"""What averaging costs on the wire in its two forms, so that callers can choose the cheaper one.

Among ``n`` peers, a *butterfly* sends every peer's vector once to the shares' owners and the mean once back to all:
``2 (n - 1) / n`` encoded vectors in and out of each peer, whatever ``n`` is. *Gathering* sends every peer's vector to
all others, ``n - 1`` vectors in and out of each, and everybody adds them up in the same order. It spares the second
encoding, in which a sparse codec would lose most: a mean of ``n`` contributions has up to ``n`` times their non-zeros.

Averaging gathers *by way of the owners* (`p2ptrain.codecs.part_list`): an owner's mean is the list of the parts that it
received. That is the butterfly with another encoding of the mean: ``(n - 1) / n`` vectors to the owners, and
``(n - 1) / n`` lists of ``n`` vectors back. Every vector passes through its owner's hands once, so it is one ``n``-th
more than direct gathering; in return, checks, masks, hashes and certificates are those of any other mean.
"""

from __future__ import annotations

from p2ptrain.codecs.base import Codec


def fewer_bytes_gathered(codec: Codec, dense_codec: Codec, num_values: int, num_contributors: int) -> bool:
    """Whether gathering vectors in ``codec`` moves fewer bytes than a butterfly in ``dense_codec``.

    That is ``(n - 1) sparse < 2 (n - 1) / n dense``, or ``n sparse < 2 dense``. With `topk` it holds for up to 99 peers
    against `int8` and 51 against `int4`. (With SparseLoCo's 112 bytes a chunk it would for 73 and 36:
    https://arxiv.org/abs/2508.15706.)

    Args:
        codec: Of gathered contributions.
        dense_codec: Of the butterfly's parts and means.
        num_values: Length of the vector.
        num_contributors: How many peers average, each of which contributes.

    Raises:
        ValueError: There is no contributor.
    """
    if num_contributors < 1:
        raise ValueError(f"{num_contributors} peers cannot average")
    if num_contributors == 1:
        return False
    return num_contributors * codec.encoded_bytes(num_values) < 2 * dense_codec.encoded_bytes(num_values)


def fewer_bytes_listed(codec: Codec, dense_codec: Codec, num_values: int, num_contributors: int) -> bool:
    """Whether the list of all contributions in ``codec`` is shorter than their mean in ``dense_codec``.

    That is ``n sparse < dense``: the contributions reach the owners in ``codec`` either way. With `topk` it holds for
    up to 49 peers against `int8`. Weights are left out of account: four bytes for each part.

    Args:
        codec: Of contributions.
        dense_codec: Of the mean.
        num_values: Length of the vector.
        num_contributors: How many contributions.

    Raises:
        ValueError: There is no contributor.
    """
    if num_contributors < 1:
        raise ValueError(f"{num_contributors} peers cannot average")
    return num_contributors * codec.encoded_bytes(num_values) < dense_codec.encoded_bytes(num_values)
