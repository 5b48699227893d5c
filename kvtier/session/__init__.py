"""A sequence of tokens as a block table over the store's pages."""
