"""Residency policies: the contract (``base``), its words (``facts``), and policies from text (``spec``)."""

from kvtier.policy.base import ResidencyPolicy, chained
from kvtier.policy.facts import (
    ANONYMOUS,
    Access,
    Key,
    Order,
    PageFacts,
    Request,
    decode_key,
    encode_key,
    show,
)
from kvtier.policy.spec import GROUP, load_policy, policy_names

__all__ = [
    "ANONYMOUS",
    "GROUP",
    "Access",
    "Key",
    "Order",
    "PageFacts",
    "Request",
    "ResidencyPolicy",
    "chained",
    "decode_key",
    "encode_key",
    "load_policy",
    "policy_names",
    "show",
]
