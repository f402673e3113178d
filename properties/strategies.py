"""Hypothesis strategies for tiny targets, drafts, tree shapes and sampling parameters."""

import torch
from hypothesis import strategies as st

from nanospec_fn.sampling import Sampling
from properties.enumerate import World, draft_trees

# Ties, probabilities of 1 up to rounding, and of 0.
LOGITS = st.sampled_from((0.0, 0.0, 1.0, -1.0, 2.5, -4.0, 12.0, -40.0, -torch.inf))
SHAPES = ((1, 1, 1), (1, 3, 3), (2, 2, 4), (2, 2, 3), (3, 2, 6), (3, 1, 3), (2, 3, 5))  # top_k, depth, num_nodes


@st.composite
def matrices(draw: st.DrawFn, size: int) -> torch.Tensor:
    """[V, V] float64 logits, each row with a finite entry."""
    rows = draw(st.lists(st.lists(LOGITS, min_size=size, max_size=size), min_size=size, max_size=size))
    logits = torch.tensor(rows, dtype=torch.float64)
    hopeless = (logits == -torch.inf).all(-1)
    return torch.where(hopeless[:, None], 0.0, logits)


@st.composite
def requests(draw: st.DrawFn, rule: str) -> Sampling:
    """A valid request of the given rule at a temperature above 0."""
    filters = {
        "temperature": draw(st.sampled_from((1.0, 0.5, 2.0))),
        "top_k": draw(st.sampled_from((0, 0, 1, 2, 3))),
        "top_p": draw(st.sampled_from((1.0, 1.0, 0.9, 0.5))),
    }
    if rule == "power":
        alpha = draw(st.sampled_from((1.0, 0.999, 0.7, 0.3, 0.01, 1e-6)))
        return Sampling(rule=rule, alpha=alpha, **filters)
    if rule == "relaxed":
        tau, accept_top_k = draw(st.sampled_from(((0.0, 0), (0.2, 0), (0.6, 1), (1.0, 1), (1.0, 2), (0.9, 0))))
        return Sampling(rule=rule, tau=tau, accept_top_k=accept_top_k, **filters)
    return Sampling(rule=rule, **filters)


@st.composite
def worlds(draw: st.DrawFn, rule: str) -> World:
    """A target, a draft and a request over 4 or 5 tokens."""
    size = draw(st.sampled_from((4, 5)))
    top_k, depth, num_nodes = draw(st.sampled_from(SHAPES))
    tree = draft_trees(torch.log_softmax(draw(matrices(size)), -1), top_k, depth, num_nodes)
    return World(logits=draw(matrices(size)), tree=tree, depth=depth, request=draw(requests(rule)))
