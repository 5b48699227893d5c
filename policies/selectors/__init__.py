"""Selectors, a file each: which pages a step of decoding reads. They know only ``kvtier.selector`` and the kernels."""
