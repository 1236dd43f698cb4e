"""Checks of the batch with which an applied module is called against the plan's sample."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def leaves_of(batch: Sequence[Any]) -> tuple[Any, ...]:
    """Leaves of a batch: (shape, dtype) of tensors, and other values."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in pytree.tree_leaves(list(batch))
    )


def batch_like(batch: Sequence[Any], plan_leaves: Sequence[Any], tree: pytree.TreeSpec) -> tuple[Any, ...]:
    """Leaves of a batch in the plan's order: (shape, dtype) of tensors, and other values. Raises ValueError if they
    differ from the plan's (`plan_leaves`) in more than sizes."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(plan_leaf, tuple) else plan_leaf
        for leaf, plan_leaf in zip(check_batch(batch, plan_leaves, tree), plan_leaves, strict=True)
    )


def check_batch(batch: Sequence[Any], plan_leaves: Sequence[Any], tree: pytree.TreeSpec) -> list[Any]:
    """Leaves of a batch. Raises ValueError if they differ from the plan's in more than sizes, or are nested
    differently."""
    leaves = leaves_in_order(batch, tree)
    for number, (leaf, plan_leaf) in enumerate(zip(leaves, plan_leaves, strict=True)):
        if isinstance(plan_leaf, tuple):
            if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"inputs.{number} requires a gradient, which is supported for parameters only; detach it"
                )
            if not isinstance(leaf, Tensor) or (leaf.dim(), leaf.dtype) != (len(plan_leaf[0]), plan_leaf[1]):
                is_tensor = isinstance(leaf, Tensor)
                leaf_text = f"{list(leaf.shape)} {leaf.dtype}" if is_tensor else type(leaf).__name__
                raise ValueError(
                    f"inputs.{number} (={leaf_text}) must have the number of dimensions and the dtype of the planned "
                    f"{list(plan_leaf[0])} {plan_leaf[1]}; plan again for this batch"
                )
        elif isinstance(leaf, Tensor) or leaf != plan_leaf:
            raise ValueError(f"inputs.{number} (={leaf!r}) must be {plan_leaf!r}, the captured value; plan again")
    return [leaf.resolve_conj().resolve_neg() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def leaves_in_order(batch: Sequence[Any], plan_tree: pytree.TreeSpec) -> list[Any]:
    """Leaves of a batch in the plan's order, for any order of a dict's keys. Raises ValueError for a batch that is
    nested differently."""
    try:
        return plan_tree.flatten_up_to(list(batch))
    except ValueError:
        tree = pytree.tree_structure(list(batch))
        num_given, num_wanted = tree.num_leaves, plan_tree.num_leaves
        counts = f"has {num_given} values" if num_given != num_wanted else "has another nesting"
        raise ValueError(
            f"the batch {counts}: {_nesting(tree)}; the plan has {num_wanted}: {_nesting(plan_tree)}; pass that "
            "structure or plan again for this batch"
        ) from None


class _BatchLeaf:
    def __repr__(self) -> str:
        return "_"


def _nesting(tree: pytree.TreeSpec) -> str:
    """Nesting as text: `(_, {'x': _})`."""
    return repr(tuple(pytree.tree_unflatten([_BatchLeaf()] * tree.num_leaves, tree)))
