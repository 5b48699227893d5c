"""How an attention step gets at pages in three tiers."""
