"""Mixture of expert MLPs: each token through the few experts it was routed to."""

from pallas_kernels.expert_mlp.activations import SituGlu, swiglu
from pallas_kernels.expert_mlp.api import expert_mlp
from pallas_kernels.expert_mlp.reference import Activation

__all__ = ["Activation", "SituGlu", "expert_mlp", "swiglu"]
