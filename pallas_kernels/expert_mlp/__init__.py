"""Mixture of expert MLPs: each token through the few experts it was routed to."""

from pallas_kernels.expert_mlp.api import expert_mlp, swiglu

__all__ = ["expert_mlp", "swiglu"]
